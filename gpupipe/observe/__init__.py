"""The views that people look at."""

from __future__ import annotations

from gpupipe.observe.view import show

__all__ = ["show"]

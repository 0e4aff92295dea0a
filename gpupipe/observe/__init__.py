"""The views that people look at."""

from __future__ import annotations

from gpupipe.data.verdict import Limit, limit
from gpupipe.observe.live import Look, Sink, monitor
from gpupipe.observe.view import show

__all__ = ["Limit", "Look", "Sink", "limit", "monitor", "show"]

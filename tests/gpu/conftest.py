"""What holds for tests on a GPU only."""

from __future__ import annotations

import os

# Timing six ways to launch each kernel at each size would take most of the run. The model's first choice is as right as any,
# and the tests of every tile go through all of them.
os.environ.setdefault("GPUPIPE_AUTOTUNE", "off")

"""How often fused modules ran fused and how often as written, as a line for training logs.

What runs inside a compiled graph is not counted: there is no Python left to count it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

fused: Counter[str] = Counter()
"""Calls that ran fused, by kind."""
written: Counter[tuple[str, str]] = Counter()
"""Calls that ran as written, by kind and reason."""
checked = [0, 0.0]
"""How many signatures were checked, and the largest error found, in parts of what is allowed."""


@contextmanager
def apart() -> Iterator[None]:
    """What runs within is not counted."""
    were_fused, were_written = fused.copy(), written.copy()
    try:
        yield
    finally:
        fused.clear()
        fused.update(were_fused)
        written.clear()
        written.update(were_written)


def line() -> str:
    """What fused modules have done since the start or the last :func:`reset`, as one line."""
    parts = [f"fused {sum(fused.values())}"]
    if fused:
        parts[0] += f" ({', '.join(f'{kind} {count}' for kind, count in sorted(fused.items()))})"
    parts.append(f"as written {sum(written.values())}")
    if written:
        parts[1] += f" ({', '.join(f'{kind} {count}: {why}' for (kind, why), count in sorted(written.items()))})"
    parts.append(f"checked {checked[0]}, largest error {100 * checked[1]:.0f} % of what is allowed")
    return "; ".join(parts)


def reset() -> None:
    """Counts from zero."""
    fused.clear()
    written.clear()
    checked[:] = [0, 0.0]

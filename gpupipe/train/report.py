"""What :func:`gpupipe.train.fuse` did to a model, and why."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


@dataclass(frozen=True)
class Entry:
    """One module, or one edge between modules.

    Attributes:
        name: in the model.
        what: its class.
        said: how it runs now, or why it was left, or which layout it has and why.
    """

    name: str
    what: str
    said: str


@dataclass
class Report:
    """What was replaced, what was left, and which layouts were chosen. ``print`` shows modules that are alike as one line.

    Attributes:
        replaced: the modules that are fused now.
        left: those with parameters that run as written.
        layouts: how tensors lie between fused parts, and why.
    """

    replaced: list[Entry] = field(default_factory=list)
    left: list[Entry] = field(default_factory=list)
    layouts: list[Entry] = field(default_factory=list)

    def __str__(self) -> str:
        parts = (("fused", self.replaced), ("as written", self.left), ("layouts", self.layouts))
        lines = []
        for title, entries in parts:
            if entries:
                lines.append(f"{title} ({len(entries)})")
                lines += as_lines(entries)
        return "\n".join(lines) if lines else "nothing is fused"


def as_lines(entries: list[Entry]) -> list[str]:
    """Entries as lines of columns, one for those that are alike."""
    alike = Counter((_NUMBER.sub("*", entry.name), entry.what, entry.said) for entry in entries)
    shown = [
        (f"{name or '(the model)'}{f' x{count}' if count > 1 else ''}", what, said)
        for (name, what, said), count in alike.items()
    ]
    widths = [max(len(row[column]) for row in shown) for column in (0, 1)]
    return [f"  {name:<{widths[0]}}  {what:<{widths[1]}}  {said}".rstrip() for name, what, said in shown]

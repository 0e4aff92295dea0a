"""A picture for each family of ops: how long every subject takes, beside the bytes' own limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from common import Row

METRICS = ("gpu_time_us", "call_time_us")
"""What is drawn: the first that a family has values of."""


def draw(rows: Sequence[Row], families: Mapping[str, str], folder: Path, suffix: str) -> list[Path]:
    """Writes ``ops-FAMILY--SUFFIX.png`` for each family that has values.

    Args:
        rows: of the benchmark; cases end with ``-fwd`` or ``-bwd``.
        families: of each case, by its name without that ending.

    Returns:
        The files.
    """
    files = []
    for family in dict.fromkeys(families.values()):
        own = [row for row in rows if families.get(row.case.rsplit("-", 1)[0]) == family and row.value is not None]
        metric = next((name for name in METRICS if any(row.metric == name for row in own)), None)
        if metric is not None:
            file = folder / f"ops-{family}--{suffix}.png"
            _one([row for row in own if row.metric == metric], metric, file)
            files.append(file)
    return files


def _one(rows: Sequence[Row], metric: str, file: Path) -> None:
    """Horizontal bars on a logarithmic scale, for peers may take 30 times as long; a mark at the limit."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(row.case for row in rows))
    subjects = list(dict.fromkeys(row.subject for row in rows if row.subject != "limit"))
    values = {(row.case, row.subject): row.value for row in rows if row.value is not None}
    thick = 0.8 / len(subjects)
    figure = Figure(figsize=(10, 1 + 0.16 * len(cases) * (len(subjects) + 1)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for number, subject in enumerate(subjects):
        places = [at + (number - (len(subjects) - 1) / 2) * thick for at in range(len(cases))]
        drawn = [(place, values[case, subject]) for place, case in zip(places, cases, strict=True) if (case, subject) in values]
        axes.barh([place for place, _ in drawn], [value for _, value in drawn], thick, label=subject, color=f"C{number}")
    limits = [(at, values[case, "limit"]) for at, case in enumerate(cases) if (case, "limit") in values]
    if limits:
        at, value = zip(*limits, strict=True)
        axes.vlines(value, [y - 0.45 for y in at], [y + 0.45 for y in at], color="black", label="limit of the bytes")
    axes.set(xscale="log", xlabel=metric, yticks=range(len(cases)), yticklabels=cases, ylim=(len(cases) - 0.5, -0.5))
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(file, dpi=110)

"""Writes the figures of the README from the committed results, between its two markers; nothing there is typed by hand.

python benchmarks/figures.py            # rewrites README.md
python benchmarks/figures.py --check    # exits with 1 when README.md is not what the results say
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from common import RESULTS

README = RESULTS.parent.parent / "README.md"
LEFT_OUT = ("first_batch_ms", "cpu_ms_per_clip")
"""Metrics that only the result files tell."""
BEGIN, END = "<!-- figures:begin -->", "<!-- figures:end -->"


def is_peer(subject: str) -> bool:
    return subject != "limit" and subject != "gpupipe" and not subject.startswith("gpupipe-")


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    if row["value"] is None:
        return "failed"
    return f"{number(row['value'])} ({number(row['low'])}–{number(row['high'])})"


def compare(rows: list[dict[str, Any]]) -> list[str]:
    """One table line for each case and metric that gpupipe and at least one peer have, and for each variant of gpupipe."""
    lines = []
    groups: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["case"], row["metric"]), {})[row["subject"]] = row
    for (_, metric), subjects in groups.items():
        if metric in LEFT_OUT or not any(is_peer(name) for name in subjects):
            continue
        lines += [line(row, subjects) for name, row in sorted(subjects.items()) if name != "limit" and not is_peer(name)]
    return lines


def line(own: dict[str, Any], subjects: dict[str, dict[str, Any]]) -> str:
    """The table line of one row of ours, against the best peer and the limit among ``subjects``."""
    limit = subjects.get("limit")
    peers = [row for name, row in subjects.items() if is_peer(name) and row["value"] is not None]
    higher = own["better"] == "higher"
    best = (max if higher else min)(peers, key=lambda row: row["value"], default=None)
    ratio = share = "–"
    if own["value"] is not None and best is not None:
        ratio = f"{own['value'] / best['value'] if higher else best['value'] / own['value']:.2f}x"
    if own["value"] is not None and limit is not None and limit["value"] is not None:
        share = f"{100 * (own['value'] / limit['value'] if higher else limit['value'] / own['value']):.0f} %"
    peer = f"{best['subject']}: {cell(best)}" if best else "all failed"
    variant = "" if own["subject"] == "gpupipe" else f"{own['subject'].removeprefix('gpupipe-')}: "
    return f"| {own['case']} | {own['metric']} | {variant}{cell(own)} | {peer} | {ratio} | {share} |"


def section(folder: Path = RESULTS) -> str:
    """The text between the markers."""
    parts = []
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        lines = compare(data["rows"])
        if not lines:
            continue
        facts = ", ".join(f"{key} {value}" for key, value in data["machine"].items() if value is not None)
        parts.append(
            f"**{data['benchmark']}** (`benchmarks/results/{path.name}`, {data['created'][:10]}; {facts})\n\n"
            "| case | metric | gpupipe | best peer | gpupipe against it | of the limit |\n|---|---|---|---|---|---|\n"
            + "\n".join(lines)
        )
    if not parts:
        return "No results are committed yet.\n"
    note = "Median (lowest–highest) of the runs. A ratio above 1.00x means that gpupipe did better, below it that it did worse."
    return "\n\n".join([*parts, note]) + "\n"


def rewritten(readme: str, text: str) -> str:
    """The README with ``text`` between its markers.

    Raises:
        ValueError: when the markers are not there once each, in order.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after:
        raise ValueError(f"the README must hold {BEGIN} and then {END}, once each")
    return f"{before}{BEGIN}\n{text}{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Writes the README's figures from benchmarks/results.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 when the README is out of step")
    options = parser.parse_args()
    old = README.read_text(encoding="utf-8")
    new = rewritten(old, section())
    if options.check:
        if new != old:
            print("README.md is not what benchmarks/results say: run python benchmarks/figures.py", file=sys.stderr)
        return int(new != old)
    README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

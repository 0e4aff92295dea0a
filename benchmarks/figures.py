"""Writes the figures of README.md and of pages in docs/ from the committed results, between two markers in each, and draws the
pictures that they show.

python benchmarks/figures.py            # rewrites them
python benchmarks/figures.py --check    # exits with 1 when one of them is not what the results say
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from common import NOT_BEGUN, RESULTS

README = RESULTS.parent.parent / "README.md"
PERFORMANCE = README.parent / "docs" / "performance.md"
CONFORMANCE = README.parent / "docs" / "conformance.md"
CONCEPTS = README.parent / "docs" / "concepts.md"
ELSEWHERE = ("conformance", "jitter", "scaling")
"""Benchmarks whose tables are on pages of their own, or in a form of their own."""
_LONGEST = 60
"""Characters of an error in a table."""
LEFT_OUT = ("first_batch_ms", "cpu_ms_per_clip")
"""Metrics that only the result files tell."""
HEADLINES: dict[str, tuple[str, ...]] = {
    "loader": ("clips_per_s",),
    "decode": ("clips_per_s",),
    "transform": ("gpu_ms_per_clip",),
    "ops": ("gpu_time_us",),
    "block": ("step_ms",),
    "loader_train": ("step_ms",),
    "train": ("step_ms", "peak_gb"),
}
"""Of each benchmark the metrics that README.md shows; docs/performance.md has them all."""
SHORT_CASES = {
    "ops": re.compile(r"^(?!.*-l(?:16|8)-).*(?:-n32768-h3072-|-c128-)|^softmax"),
    "train": re.compile(r"^(?!.*loss)"),
}
"""Of benchmarks with many cases those that README.md shows."""
PLACES = ("host", "device")
FREE = "headspace"
LIMITS = ("bare", "limit", FREE)
"""Subjects that do not do the work, the one that counts first: a product or convolution without what stands around it, what the
hardware allows, the loop whose data is free."""
WITHOUT_LIMIT = ("wait_ms_p99",)
"""Metrics whose limit is nothing."""
NOTES = {
    "loader_train": "The limit is `headspace`, the same loop over batches that are on the device already. The GPU counts as\n"
    "idle while nothing of the training step runs on it.",
    "ops": "The limit is the time that a copy on the device takes for the bytes which the op must move, or the vendor\n"
    "library's product or convolution alone where there is one; attention over whole frames and more is bound by its products.",
}
"""What belongs below the table of a benchmark."""
BY_SUBJECT = ("train",)
"""Benchmarks whose subjects are parts of one whole, each measured against ``eager``."""
BEGIN, END = "<!-- figures:begin -->", "<!-- figures:end -->"


def is_peer(subject: str) -> bool:
    return subject not in LIMITS and subject != "gpupipe" and not subject.startswith("gpupipe-")


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    if row["value"] is None:
        return "not run" if NOT_BEGUN in row.get("error", "") else "failed"
    return f"{number(row['value'])} ({number(row['low'])}–{number(row['high'])})"


def compare(rows: list[dict[str, Any]]) -> list[str]:
    """One table line for each case and metric that gpupipe and at least one peer have, or that has the loop with free data, and
    for each variant of gpupipe."""
    lines = []
    groups: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["case"], row["metric"]), {})[row["subject"]] = row
    for (_, metric), subjects in groups.items():
        if metric in LEFT_OUT or not any(is_peer(name) or name == FREE for name in subjects):
            continue
        lines += [line(row, subjects) for name, row in sorted(subjects.items()) if name not in LIMITS and not is_peer(name)]
    return lines


def quotient(own: dict[str, Any], other: dict[str, Any]) -> float | None:
    """How many times as well ``own`` did as ``other``; None where one has no value or the divisor is 0."""
    above, below = (own["value"], other["value"]) if own["better"] == "higher" else (other["value"], own["value"])
    return above / below if above is not None and below else None


def line(own: dict[str, Any], subjects: dict[str, dict[str, Any]]) -> str:
    """The table line of one row of ours, against the best peer and the limit among ``subjects``."""
    limit = next((subjects[name] for name in LIMITS if name in subjects and own["metric"] not in WITHOUT_LIMIT), None)
    peers = [row for name, row in subjects.items() if is_peer(name) and row["value"] is not None]
    higher = own["better"] == "higher"
    best = (max if higher else min)(peers, key=lambda row: row["value"], default=None)
    ratio = share = "–"
    if best is not None:
        over = quotient(own, best)
        ratio = "–" if over is None else f"{over:.2f}x"
    if limit is not None:
        over = quotient(own, limit)
        share = "–" if over is None else f"{100 * over:.0f} %"
    none = "all failed" if any(map(is_peer, subjects)) else "none was run"
    peer = f"{best['subject']}: {cell(best)}" if best else none
    variant = "" if own["subject"] == "gpupipe" else f"{own['subject'].removeprefix('gpupipe-')}: "
    return f"| {own['case']} | {own['metric']} | {variant}{cell(own)} | {peer} | {ratio} | {share} |"


def short(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a benchmark that README.md shows."""
    name = data["benchmark"]
    cases = SHORT_CASES.get(name, re.compile(""))
    return [row for row in data["rows"] if row["metric"] in HEADLINES.get(name, ()) and cases.search(row["case"])]


def section(folder: Path = RESULTS, *, brief: bool = False) -> str:
    """The tables of docs/performance.md, or with ``brief`` those of README.md."""
    parts = []
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["benchmark"] == "soak":
            parts.append(soak(path.name, data))
        head = f"**{data['benchmark']}** (`benchmarks/results/{path.name}`, {data['created'][:10]}; {facts_of(data)})\n\n"
        rows = short(data) if brief else data["rows"]
        if data["benchmark"] in BY_SUBJECT:
            parts.append(head + by_subject(rows) + shown(path, "" if brief else "../"))
            continue
        lines = compare(rows) if data["benchmark"] not in ELSEWHERE else []
        if not lines:
            continue
        parts.append(
            f"{head}| case | metric | gpupipe | best peer | gpupipe against it | of the limit |\n|---|---|---|---|---|---|\n"
            + "\n".join(lines)
            + (f"\n\n{NOTES[data['benchmark']]}" if data["benchmark"] in NOTES else "")
        )
    if not brief:
        parts += by_ranks(folder)
    if not parts:
        return "No results are committed yet.\n"
    note = (
        "Median (lowest–highest) of the runs. A ratio above 1.00x means that gpupipe did better, below it that it did worse.\n"
        "The limit is what the GPU's engines could do if every packet from the keyframe on were decoded: leaving out packets\n"
        "that no wanted frame needs passes it."
    )
    return "\n\n".join([*parts, note]) + "\n"


def by_ranks(folder: Path) -> list[str]:
    """A table for each kind of machine that the scaling run was made on: a line for each case, subject and metric, a column for
    each number of ranks."""
    machines: dict[str, dict[int, dict[str, Any]]] = {}
    for path in folder.glob("scaling--*.json"):
        data = json.loads(path.read_text(encoding="utf-8"))
        ranks = int(data["machine"]["ranks"])
        machines.setdefault(path.stem.removesuffix(f"x{ranks}"), {})[ranks] = data
    parts = []
    for name, runs in sorted(machines.items()):
        counts = sorted(runs)
        found: dict[tuple[str, str, str], dict[int, dict[str, Any]]] = {}
        for count in counts:
            for row in runs[count]["rows"]:
                found.setdefault((row["case"], row["subject"], row["metric"]), {})[count] = row
        lines = [f"| case | subject | metric | {' | '.join(f'ranks: {count}' for count in counts)} |"]
        lines.append("|---" * (len(counts) + 3) + "|")
        lines += [f"| {' | '.join([*key, *(cell(rows.get(count)) for count in counts)])} |" for key, rows in found.items()]
        files = ", ".join(f"`benchmarks/results/{name}x{count}.json`, {runs[count]['created'][:10]}" for count in counts)
        lone = "\n\nRuns with several ranks are still to be made." if counts == [1] else ""
        parts.append(f"**scaling** ({files}; {facts_of(runs[counts[0]])})\n\n" + "\n".join(lines) + lone)
    return parts


def soak(name: str, data: dict[str, Any]) -> str:
    """What a long run came to, in a sentence."""
    value = {row["metric"]: row["value"] for row in data["rows"]}
    left = value["threads_left"] + value["processes_left"]
    clips = value["seconds"] * value["clips_per_s"]
    grown = (f"{value[f'{where}_growth_mib']:.1f} MiB ({where}, peak {number(value[f'{where}_peak_mib'])})" for where in PLACES)
    return (
        f"**soak** (`benchmarks/results/{name}`, {data['created'][:10]}): {clips:,.0f} clips in"
        f" {value['seconds'] / 60:.0f} minutes, with bad files among the good; memory grew by {' and '.join(grown)};"
        f" threads and processes left after closing: {left:.0f}."
    )


def by_subject(rows: list[dict[str, Any]]) -> str:
    """A table with a line for each case and subject and a column for each metric, how it stands to eager's behind it."""
    found = {(row["case"], row["subject"], row["metric"]): row for row in rows}
    metrics = list(dict.fromkeys(row["metric"] for row in rows))
    lines = [f"| case | subject | {' | '.join(metrics)} |", "|---" * (len(metrics) + 2) + "|"]
    for case, subject in dict.fromkeys((row["case"], row["subject"]) for row in rows):
        cells = []
        for metric in metrics:
            own, base = found.get((case, subject, metric)), found.get((case, "eager", metric))
            over = quotient(own, base) if own is not None and base is not None and own is not base else None
            cells.append(cell(own) + (f", {over:.2f}x" if over is not None else ""))
        lines.append(f"| {case} | {subject} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n\nBehind each figure: how many times as well as `eager` does."


def shown(path: Path, up: str) -> str:
    """Links to the pictures of a result file: the one that is drawn of it, and those of loss curves that lie beside it."""
    name, gpu = path.stem.split("--")
    curves = sorted(path.parent.glob(f"{name}-loss*--{gpu}.png"))
    files = [path.with_suffix(".png"), *curves]
    return "".join(f"\n\n![{file.stem}]({up}benchmarks/results/{file.name})" for file in files)


def draw(path: Path) -> Path:
    """Draws a result file by subject, a row of bars for each case: time of a step, and peak memory where it was measured."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in json.loads(path.read_text(encoding="utf-8"))["rows"] if row["value"] is not None]
    metrics = [metric for metric in HEADLINES["train"] if any(row["metric"] == metric for row in rows)]
    cases = list(dict.fromkeys(row["case"] for row in rows if row["metric"] in metrics))
    figure = Figure(figsize=(5 * len(metrics) + 2, 0.8 + 2.2 * len(cases)), layout="constrained")
    FigureCanvasAgg(figure)
    for line, case in enumerate(cases):
        for column, metric in enumerate(metrics):
            axes = figure.add_subplot(len(cases), len(metrics), line * len(metrics) + column + 1)
            own = [row for row in rows if (row["case"], row["metric"]) == (case, metric)]
            values = [row["value"] for row in own]
            around = [[row["value"] - row["low"] for row in own], [row["high"] - row["value"] for row in own]]
            colours = ["C0" if row["subject"] == "gpupipe" else "0.7" for row in own]
            axes.barh([row["subject"] for row in own], values, xerr=around, color=colours)
            axes.invert_yaxis()
            axes.set(title=case, xlabel=metric)
            axes.title.set_fontsize(9)
    figure.savefig(path.with_suffix(".png"), dpi=100)
    return path.with_suffix(".png")


def facts_of(data: dict[str, Any]) -> str:
    """The machine of a result file, and the commits that were measured, in a line."""
    commits = dict.fromkeys([data["commit"], *(row.get("commit", data["commit"]) for row in data["rows"])])
    of = "" if len(commits) == 1 else f"commits {', '.join(each[:7] for each in commits)}, each case of one; "
    return of + ", ".join(f"{key} {value}" for key, value in data["machine"].items() if value is not None)


def conformance(folder: Path = RESULTS) -> str:
    """The tables of docs/conformance.md: for each file and subject whether it was read right, or why not."""
    paths = sorted(folder.glob("conformance--*.json"))
    parts = [_conformance_table(path.name, json.loads(path.read_text(encoding="utf-8"))) for path in paths]
    return "\n\n".join(parts) + "\n" if parts else "No results are committed yet.\n"


def _conformance_table(name: str, data: dict[str, Any]) -> str:
    rows = {(row["case"], row["subject"], row["metric"]): row for row in data["rows"]}
    subjects = list(dict.fromkeys(row["subject"] for row in data["rows"]))
    cases = list(dict.fromkeys(row["case"] for row in data["rows"] if row["metric"] == "read_right"))
    totals = [f"{rows['all', subject, 'files_right']['value']:.0f} of {len(cases)}" for subject in subjects]
    lines = [f"| file | {' | '.join(subjects)} |", "|---" * (len(subjects) + 1) + "|", f"| **all** | {' | '.join(totals)} |"]
    lines += [f"| {case} | {' | '.join(_answer(rows, case, subject) for subject in subjects)} |" for case in cases]
    return f"`benchmarks/results/{name}`, {data['created'][:10]}; {facts_of(data)}\n\n" + "\n".join(lines)


def jitter(folder: Path = RESULTS) -> str:
    """The table of docs/concepts.md: what each depth of the buffer comes to, gpupipe's own first."""
    paths = sorted(folder.glob("jitter--*.json"))
    parts = [_jitter_table(path.name, json.loads(path.read_text(encoding="utf-8"))) for path in paths]
    return "\n\n".join(parts) + "\n" if parts else "No results are committed yet.\n"


def _jitter_table(name: str, data: dict[str, Any]) -> str:
    rows = {(row["case"], row["metric"], row["subject"]): row for row in data["rows"]}
    subjects = list(dict.fromkeys(row["subject"] for row in data["rows"]))
    lines = [f"| case | metric | {' | '.join(subjects)} |", "|---|---" + "|---" * len(subjects) + "|"]
    for case, metric in dict.fromkeys((row["case"], row["metric"]) for row in data["rows"]):
        cells = (cell(rows.get((case, metric, subject))) for subject in subjects)
        lines.append(f"| {case} | {metric} | {' | '.join(cells)} |")
    head = f"`benchmarks/results/{name}`, {data['created'][:10]}; {facts_of(data)}"
    return f"{head}\n\n" + "\n".join(lines) + "\n\nMedian (lowest–highest) of the runs; for all of them less is better."


def _answer(rows: dict[tuple[str, str, str], dict[str, Any]], case: str, subject: str) -> str:
    row = rows.get((case, subject, "read_right"))
    if row is None:
        return "–"
    if row["value"] is None:
        error = re.sub(r"[^\s\[\]()]*/", "", row["error"]).replace("|", "/")  # no folders of the machine it was run on
        return f"no: {error if len(error) <= _LONGEST else error[:_LONGEST] + '…'}"
    by = rows.get((case, subject, "by_nvdec"))
    return "yes" if by is None else "yes, NVDEC" if by["value"] else "yes, CPU"


def pages() -> list[tuple[Path, str]]:
    """Each page with the text that belongs between its markers."""
    return [(README, section(brief=True)), (PERFORMANCE, section()), (CONFORMANCE, conformance()), (CONCEPTS, jitter())]


def rewritten(readme: str, text: str) -> str:
    """A page with ``text`` between its markers.

    Raises:
        ValueError: when the markers are not there once each, in order.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after:
        raise ValueError(f"the page must hold {BEGIN} and then {END}, once each")
    return f"{before}{BEGIN}\n{text}{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Writes the figures of the pages from benchmarks/results.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 when a page is out of step")
    options = parser.parse_args()
    stale = 0
    for path in sorted(RESULTS.glob("*.json")) if not options.check else ():
        if json.loads(path.read_text(encoding="utf-8"))["benchmark"] in BY_SUBJECT:
            draw(path)
    for page, text in pages():
        old = page.read_text(encoding="utf-8")
        new = rewritten(old, text)
        if new == old:
            continue
        if options.check:
            print(f"{page.name} is not what benchmarks/results say: run python benchmarks/figures.py", file=sys.stderr)
            stale = 1
        else:
            page.write_text(new, encoding="utf-8")
    return stale


if __name__ == "__main__":
    sys.exit(main())

"""The benchmark of several ranks: what counts as exact, what a group leaves behind, and that all parts run on the CPU."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import bench_scaling
import common
import pytest
import scaling_parts
from rank_groups import Group, GroupError
from test_benchmarks import assert_form

ROOT = Path(__file__).resolve().parent.parent
WAITING = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("rank", os.environ["RANK"], "is up", flush=True)
time.sleep(600)
"""


def clips(*numbers: int, epoch: int = 0, pixels: str = "same") -> list[list[Any]]:
    return [[epoch, number, f"{number}.mp4", f"{pixels} {number}"] for number in numbers]


WHOLE = [clips(0, 1), clips(2, 3), clips(4, 5), clips(0, 1, epoch=1), clips(2, 3, epoch=1)]


def test_samples_are_alike_whichever_rank_of_a_step_has_them() -> None:
    first = [[clips(0, 1)]]
    second = [[clips(3, 2), clips(1, 0, epoch=1)], [clips(5, 4), clips(3, 2, epoch=1)]]
    assert bench_scaling.unlike([first, second], WHOLE) == 0


@pytest.mark.parametrize(
    ("second", "odd"),
    [
        ([[clips(2, 3), clips(0, 1, epoch=1)], [clips(4, 5, pixels="other"), clips(2, 3, epoch=1)]], 2),
        ([[clips(2, 3), clips(0, 1, epoch=1)], [clips(2, 3), clips(2, 3, epoch=1)]], 2),
        ([[clips(2, 3), clips(4, 5)], [clips(0, 1, epoch=1), clips(2, 3, epoch=1)]], 4),
        ([[clips(2, 3)], [clips(4, 5)]], 4),
    ],
    ids=["other pixels", "one twice", "another step", "too few"],
)
def test_a_sample_that_is_not_in_its_place_is_counted(second: list[Any], odd: int) -> None:
    """Otherwise a resume that is not exact would pass for one."""
    assert bench_scaling.unlike([[[clips(0, 1)]], second], WHOLE) == odd


def test_the_rate_of_double_is_against_the_same_subject_of_half_the_ranks() -> None:
    half = [common.summarise("loader", "gpupipe", "clips_per_s", [9.0, 10.0, 11.0])]
    rows = [
        common.summarise("loader", "gpupipe", "clips_per_s", [18.0, 19.0, 20.0]),
        common.summarise("loader", "gpupipe", "cpu_ms_per_clip", [1.0], "lower"),
        common.summarise("train", "gpupipe", "samples_per_s", [5.0]),
    ]
    (made,) = bench_scaling.on_double(rows, half)
    assert (made.case, made.metric, made.value) == ("loader", bench_scaling.ON_DOUBLE, 1.9)
    assert (made.low, made.high) == (18 / 11, 20 / 9)
    broken = [common.failed("loader", "gpupipe", "clips_per_s", "broke")]
    assert bench_scaling.on_double(broken, half) == bench_scaling.on_double(rows, broken) == []


def test_a_subject_that_trains_otherwise_has_no_figure() -> None:
    figures: list[tuple[float, float]] = []
    bench_scaling.compare([(2.0, 0.5), (1.9, 0.4)], figures)
    bench_scaling.compare([(2.01, 0.501), (1.9, 0.4)], figures)
    assert figures == [(2.0, 0.5), (1.9, 0.4)]
    with pytest.raises(GroupError, match="first steps"):
        bench_scaling.compare([(2.0, 0.5), (1.9, 0.3)], figures)


@pytest.mark.parametrize(("off", "told"), [(1.00001, None), (1.01, "norm_error is 1.0e-02"), (math.nan, "loss_error is nan")])
def test_a_split_model_that_learns_something_else_has_no_time(off: float, told: str | None) -> None:
    alone = {"figures": [[2.0, 0.5], [1.9, 0.4]], "step_ms": [10.0, 12.0], "peak_bytes": 10**9}
    one, other = (2.0, 0.5 * off) if off == off else (off, 0.5)
    found = {"alone": alone, "tp": {**alone, "figures": [[one, other], [1.9, 0.4]]}, "sp": alone}
    rows = {(row.subject, row.metric): row for row in scaling_parts.compared("split", [found, found], 1e-4)}
    assert rows["gpupipe-sp", "step_ms"].value == rows["gpupipe", "step_ms"].value == 11
    if told is None:
        assert rows["gpupipe-tp", "norm_error"].high == pytest.approx(1e-5, rel=1e-2)
        assert rows["gpupipe-tp", "peak_gb"].value == 1
    else:
        assert ("gpupipe-tp", "step_ms") not in rows
        assert any(told in str(row.error) for row in rows.values())


def test_the_verdict_is_of_the_fastest() -> None:
    rows = []
    for subject, step, share in (("gpupipe-ddp-1mb", 10.0, 0.5), ("gpupipe-fsdp2", 9.0, 1.5)):
        for metric, value in (("step_ms", step), ("exchange_over_work", share), ("exposed_ms", 2.0)):
            rows.append(common.summarise("overlap", subject, metric, [value], "lower"))
    assert scaling_parts.verdict(rows).startswith("fastest is gpupipe-fsdp2, 9.0 ms a step: communication-bound")
    assert "compute-bound" in scaling_parts.verdict(rows[:3])


def test_more_ranks_than_gpus_are_a_row_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    sizes = bench_scaling.Sizes(bench_scaling.case_of("h264-tiny-s1"), {}, batch=1, steps=1, runs=1)
    bench = bench_scaling.Bench(sizes, "cuda", [2], tmp_path, [], 1.0, 1)
    ((row,),) = bench_scaling.group_rows(bench, bench_scaling.PARTS, 2)
    assert row.value is None
    assert "2 ranks need as many GPUs, and there are 1" in str(row.error)


def test_a_group_that_is_left_leaves_no_process(tmp_path: Path) -> None:
    """Not even those that its ranks put into sessions of their own; the error of a group that is late has its last words."""
    script = tmp_path / "waiting.py"
    script.write_text(WAITING)
    with Group(2, [str(script)], tmp_path / "log.txt") as group:
        for rank in (0, 1):
            group.wait_for(f"rank {rank} is up", 60)
        assert len({group.rank(0).pid, group.rank(1).pid}) == 2
        assert len(group.members()) >= 5, "launcher, ranks, and a child of each"
        with pytest.raises(GroupError, match=r"(?s)not done after 0 s.*is up"):
            group.wait(0.1)
        with pytest.raises(GroupError, match="no process is rank 2"):
            group.rank(2)
    assert group.left(10) == 0


def test_a_group_that_ends_too_early_says_what_it_said(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("raise SystemExit('out of cheese')\n")
    begin = time.monotonic()
    with Group(1, [str(script)], tmp_path / "log.txt") as group, pytest.raises(GroupError, match=r"(?s)ended with status 1"):
        group.wait_for("never said", 100)
    assert "out of cheese" in group.text
    assert time.monotonic() - begin < 100


def results(tmp_path: Path, *options: str) -> dict[int, dict[tuple[str, str, str], dict[str, Any]]]:
    """The rows of each file by case, subject and metric; by its number of ranks."""
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_scaling.py"), "--quick", *options]
    command += ["--media", str(tmp_path / "media"), "--out", str(tmp_path / "out")]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    assert run.returncode == 0, run.stderr
    found = {}
    for path in (tmp_path / "out").glob("*.json"):
        data = json.loads(path.read_text(encoding="utf-8"))
        assert_form(data, path.name)
        assert path.name == f"scaling--cpux{data['machine']['ranks']}.json"
        assert all(row["value"] is not None for row in data["rows"]), data["rows"]
        found[data["machine"]["ranks"]] = {(row["case"], row["subject"], row["metric"]): row for row in data["rows"]}
    assert list((tmp_path / "media").glob("ranks-*")) == [], "nothing but the videos is left"
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_all_parts_run_on_two_ranks_of_the_cpu(tmp_path: Path) -> None:
    """Resume is exact, and a group of which a rank is killed ends by itself in time, leaves nothing, and goes on."""
    (rows,) = results(tmp_path).values()
    cases = {case for case, _, _ in rows}
    split = {f"split-video-dit-{dtype}" for dtype in ("float32", "bfloat16")}
    assert cases == {"loader-h264-tiny-s1", "train-video-dit", "killed", "resume-1-2", "overlap-video-dit", *split}
    for case in split:
        assert {subject for one, subject, metric in rows if (one, metric) == (case, "norm_error")} == {
            "gpupipe-tp",
            "gpupipe-sp",
        }
    subjects = {subject for case, subject, metric in rows if metric == "samples_per_s"}
    assert subjects == {"gpupipe", "gpupipe-fsdp2"}
    assert rows["resume-1-2", "gpupipe", "samples_alike"]["value"] == 12
    assert rows["killed", "gpupipe", "end_s"]["value"] < 60
    assert rows["killed", "gpupipe", "processes_left"]["value"] == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_number_of_ranks_has_its_file_and_is_set_against_its_half(tmp_path: Path) -> None:
    found = results(tmp_path, "--parts", "loader", "--ranks", "2", "1")
    assert set(found) == {1, 2}
    key = ("loader-h264-tiny-s1", "gpupipe")
    one, two = (found[ranks][*key, "clips_per_s"]["value"] for ranks in (1, 2))
    assert found[2][*key, bench_scaling.ON_DOUBLE]["value"] == pytest.approx(two / one)
    assert (*key, bench_scaling.ON_DOUBLE) not in found[1]

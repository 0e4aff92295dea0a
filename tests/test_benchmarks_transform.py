"""The benchmark of the clip transforms: peers do the same work, failures are told, and bytes are counted right."""

from __future__ import annotations

import sys
from pathlib import Path

import bench_transform
import pytest
import torch
import transform_bytes
from bench_transform import HOST_METRIC, NEAR, Options, rows_of
from transform_cases import case_of, make_clips, reference
from transform_subjects import SUBJECTS, Subject

from gpupipe.device.inventory import load, package

CPU = torch.device("cpu")
ONCE = Options(runs=1, budget=0.0, ncu=False)

WHERE = '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC"'
RANGE = '"0","4711","python3.12","127.0.0.1","range","1","7","","","0","9.0"'
KERNEL = '"1","4711","python3.12","127.0.0.1","void k<float, 4>(float *, int)","1","7","(128, 1, 1)","(24, 1, 1)","0","9.0"'
RAW = f"""==PROF== Connected to process 4711 (/usr/bin/python3.12)
==PROF== Profiling "range": Application replay pass 1
==PROF== Disconnected from process 4711
{WHERE},"dram__bytes_read.sum","dram__bytes_write.sum"
"","","","","","","","","","","","byte","byte"
{RANGE},"1,234,567","1000"
{KERNEL},"433","n/a"
"""
DETAILS = f"""==PROF== Connected to process 4711 (/usr/bin/python3.12)
{WHERE},"Section Name","Metric Name","Metric Unit","Metric Value"
{KERNEL},"Command line profiler metrics","dram__bytes_read.sum","Mbyte","3.20"
{KERNEL},"Command line profiler metrics","dram__bytes_write.sum","Kbyte","1,000.5"
{KERNEL},"Command line profiler metrics","gpu__time_duration.sum","ns","99"
"""


def test_tables_of_ncu_are_added_up() -> None:
    # Wrong: a kernel, a unit or a thousand left out, and with it traffic of a subject.
    assert transform_bytes.dram_bytes(RAW) == 1_234_567 + 1000 + 433
    assert transform_bytes.dram_bytes(DETAILS) == 3.2e6 + 1_000_500


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ("", "counted nothing"),
        ("==ERROR== ERR_NVGPUCTRPERM - no permission\n", "ERR_NVGPUCTRPERM"),
        ("\n".join(RAW.splitlines()[:5]), "counted nothing"),
        (RAW.replace('"byte","byte"', '"sector","sector"'), "'sector'"),
    ],
)
def test_a_table_without_figures_is_no_zero(table: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        transform_bytes.dram_bytes(table)


def test_ranges_are_given_to_ncu_as_it_takes_them() -> None:
    # Wrong: ncu refuses to start (it takes no --profile-from-start with ranges), or counts the warm-up too.
    commands = {
        mode: transform_bytes.ncu_command("ncu", mode, Path("log"), ["python", "x.py"]) for mode in transform_bytes.MODES
    }
    assert "--profile-from-start" not in commands["app-range"]
    assert commands["kernel"][commands["kernel"].index("--profile-from-start") + 1] == "off"
    for command in commands.values():
        assert command[-2:] == ["python", "x.py"]
        assert command[command.index("--cache-control") + 1] == "none"


def fake_ncu(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    script = folder / "ncu"
    script.write_text(
        f"#!{sys.executable}\nimport pathlib, sys\nlog = pathlib.Path(sys.argv[sys.argv.index('--log-file') + 1])\n{body}"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_where_ncu_knows_no_ranges_kernels_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Wrong: an older ncu gives a failure in place of the figure that it could give.
    body = f"log.write_text({DETAILS!r} if 'kernel' in sys.argv else '==ERROR== unknown replay mode')\n"
    fake_ncu(tmp_path, monkeypatch, body)
    assert transform_bytes.measured(["program"]) == 3.2e6 + 1_000_500


def test_a_failure_of_ncu_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Wrong: a run without permission for the counters ends the benchmark, or leaves no word.
    fake_ncu(tmp_path, monkeypatch, "log.write_text('==ERROR== ERR_NVGPUCTRPERM')\nsys.exit(1)\n")
    with pytest.raises(RuntimeError, match="ERR_NVGPUCTRPERM"):
        transform_bytes.measured(["program"])
    row = bench_transform.dram_row(case_of("nv12-tiny-32-eval"), "gpupipe", CPU, 1)
    assert (row.metric, row.value) == ("dram_mb_per_clip", None)
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert not transform_bytes.has_ncu()


def test_bytes_of_operations_are_counted_once_each() -> None:
    # Wrong: views counted as traffic, or what an operation overwrites as read.
    a, b = torch.zeros(10, 6), torch.zeros(10, 6)
    assert transform_bytes.moved_by_torch(lambda: torch.add(a, b)) == 3 * 240
    assert transform_bytes.moved_by_torch(lambda: a[2:4].t().unsqueeze(0)) == 0
    assert transform_bytes.moved_by_torch(lambda: a[:5].copy_(b[:5])) == 2 * 120
    assert transform_bytes.moved_by_torch(lambda: a.mul_(2)) == 2 * 240
    assert transform_bytes.moved_by_torch(lambda: a + torch.zeros(1, 6).expand(10, 6)) == 24 + 2 * 240 + 24
    assert transform_bytes.moved_by_torch(lambda: a.to(torch.bfloat16)) == 240 + 120


def test_contrast_costs_another_pass() -> None:
    # Wrong: gpupipe's traffic told as less than its two launches move.
    for name, more in (("nv12-tiny-32-eval", False), ("nv12-tiny-32-train", True)):
        case = case_of(name)
        clips = make_clips(case, CPU)
        assert (transform_bytes.moved_by_gpupipe(case, clips) > transform_bytes.moved_at_least(case, clips)) == more


@pytest.mark.parametrize("kind", ["train", "eval"])
@pytest.mark.parametrize("name", ["gpupipe", "torchvision-v2", "kornia", "dali", "opencv-1t", "albumentations-16t"])
def test_peers_make_what_gpupipe_makes(name: str, kind: str) -> None:
    # Wrong: a peer is timed at other work (a flip, a crop or an order of colours is not as drawn).
    subject = SUBJECTS[name]
    if not package(subject.package).present:
        pytest.skip(f"needs {subject.package}")
    case = case_of(f"nv12-tiny-32-{kind}")
    clips = make_clips(case, CPU)
    (batch,) = bench_transform.batches_of(case, clips, subject, CPU)
    subject.prepare(case, CPU)(batch.clips, batch.out)
    bench_transform.check(batch, {number: reference(case, clip) for number, clip in enumerate(clips)})


@pytest.mark.parametrize("name", ["opencv-1t", "albumentations-1t"])
def test_what_a_peer_cannot_do_is_its_row(name: str) -> None:
    # Wrong: a case that a peer has no operation for ends the run.
    if not package(SUBJECTS[name].package).present:
        pytest.skip(f"needs {SUBJECTS[name].package}")
    (row,) = rows_of(case_of("p010-tiny-32-eval"), [name], CPU, ONCE)
    assert row.value is None
    assert "P010" in (row.error or "")


def test_a_package_that_is_missing_is_a_row_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SUBJECTS, "kornia", Subject(lambda case, device: load("no_such_peer"), "no_such_peer"))
    rows = rows_of(case_of("nv12-tiny-32-eval"), ["kornia", "gpupipe"], CPU, ONCE)
    failed, *others = rows
    assert (failed.subject, failed.metric, failed.value) == ("kornia", HOST_METRIC, None)
    assert "no_such_peer" in (failed.error or "")
    assert all(row.value is not None for row in others)


@pytest.mark.parametrize("change", [None, 2 * NEAR])
def test_other_output_is_no_result(change: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    # Wrong: a subject that leaves clips out, or computes something else, has a time.
    def make(clips: object, out: torch.Tensor) -> None:
        if change is not None:
            out.copy_(torch.stack([reference(case, clip) for clip in make_clips(case, CPU)]))
            out[-1] += change

    case = case_of("nv12-tiny-32-eval")
    monkeypatch.setitem(SUBJECTS, "kornia", Subject(lambda case, device: make))
    (row,) = rows_of(case, ["kornia"], CPU, ONCE)
    assert row.value is None
    assert "wrong output" in (row.error or "")

"""The benchmarks: the form of their results, the check of equal work, and figures that follow from the results alone."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import bench_decode
import bench_transform
import common
import conformance
import figures
import loader_cases
import make_media
import pytest
import soak
import torch

ROOT = Path(__file__).resolve().parent.parent


def assert_form(data: dict[str, Any], name: str) -> None:
    """Checks a result against the contract in benchmarks/README.md."""
    assert set(data) == {"benchmark", "created", "commit", "machine", "rows"}
    assert name == f"{data['benchmark']}--{common.machine_slug(data['machine'])}.json"
    assert data["rows"]
    seen = set()
    for row in data["rows"]:
        key = (row["case"], row["subject"], row["metric"])
        assert key not in seen
        seen.add(key)
        assert row["better"] in ("higher", "lower")
        if row["value"] is None:
            assert row["error"]
        else:
            assert row["low"] <= row["value"] <= row["high"]
            answered = row["metric"] == conformance.BY_NVDEC  # a yes or a no, not an amount
            assert row["low"] > 0 or row["better"] == "lower" or answered, "only what should be small may be nothing, or less"
            assert row["runs"] >= 1


def test_rows_are_medians_with_their_spread() -> None:
    row = common.summarise("case", "gpupipe", "clips_per_s", [3.0, 1.0, 2.0])
    assert row.to_json() == {
        "case": "case", "subject": "gpupipe", "metric": "clips_per_s", "better": "higher",
        "value": 2.0, "low": 1.0, "high": 3.0, "runs": 3,
    }  # fmt: skip
    failure = common.failed("case", "peer", "clips_per_s", "it\nbroke").to_json()
    assert (failure["value"], failure["error"]) == (None, "it broke")
    with pytest.raises(AssertionError):
        common.Row("case", "peer", "clips_per_s", "higher", None, None, None, 0)


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        (None, "cpu"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3"),
    ],
)
def test_the_gpu_names_the_file(name: str | None, slug: str) -> None:
    assert common.gpu_slug(name) == slug


def test_appending_keeps_other_cases_of_the_same_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(case: str, value: float, *, keep: bool = True, driver: int = 1) -> list[Any]:
        rows = [common.summarise(case, "gpupipe", "clips_per_s", [value])]
        facts = {"gpu": "NVIDIA H200", "driver": driver}
        path = common.write_results("loader", rows, facts, tmp_path, keep_other_cases=keep)
        data = json.loads(path.read_text())
        assert_form(data, path.name)
        assert ("commits" in figures.facts_of(data)) == any("commit" in row for row in data["rows"])
        return [(row["case"], row["value"], *([row["commit"]] if "commit" in row else [])) for row in data["rows"]]

    monkeypatch.setenv("GPUPIPE_COMMIT", "one")
    assert write("a", 1.0) == [("a", 1.0)]
    assert write("b", 2.0) == [("a", 1.0), ("b", 2.0)]
    assert write("a", 3.0) == [("b", 2.0), ("a", 3.0)]
    monkeypatch.setenv("GPUPIPE_COMMIT", "two")
    assert write("c", 4.0) == [("b", 2.0, "one"), ("a", 3.0, "one"), ("c", 4.0)]
    assert write("a", 5.0) == [("b", 2.0, "one"), ("c", 4.0), ("a", 5.0)]
    monkeypatch.setenv("GPUPIPE_COMMIT", "one")
    assert write("d", 6.0) == [("b", 2.0), ("c", 4.0, "two"), ("a", 5.0, "two"), ("d", 6.0)]
    assert write("e", 7.0, driver=2) == [("e", 7.0)]
    assert write("f", 8.0, keep=False) == [("f", 8.0)]


def test_what_a_process_leaves_behind_ends_with_it() -> None:
    leaves = "import subprocess; child = subprocess.Popen(['sleep', '60']); print('M', child.pid)"
    (pid,), ending = common.answers([sys.executable, "-c", leaves], "M ", 20)
    assert ending == "the process ended with status 0", "although its child has its stdout"
    until = time.monotonic() + 10
    while Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < until
        time.sleep(0.01)


def row(subject: str, value: float | None, case: str = "x", better: str = "higher") -> dict[str, Any]:
    return {"case": case, "subject": subject, "metric": "m", "better": better, "value": value, "low": value, "high": value}


def test_figures_compare_with_the_best_peer() -> None:
    rows = [
        row("gpupipe", 30.0),
        row("slow", 10.0),
        row("fast", 20.0),
        row("broken", None),
        row("gpupipe-cpu", 99.0),
        row("limit", 60.0),
    ]
    assert figures.compare(rows) == [
        "| x | m | 30.0 (30.0–30.0) | fast: 20.0 (20.0–20.0) | 1.50x | 50 % |",
        "| x | m | cpu: 99.0 (99.0–99.0) | fast: 20.0 (20.0–20.0) | 4.95x | 165 % |",
    ]
    rows = [row("gpupipe", 4.0, better="lower"), row("a", 2.0, better="lower"), row("b", 3.0, better="lower")]
    assert "a: 2.00 (2.00–2.00) | 0.50x | – |" in figures.compare(rows)[0]


def test_headspace_is_a_limit_and_no_peer() -> None:
    rows = [row("gpupipe", 4.0, better="lower"), row("headspace", 3.0, better="lower"), row("peer", 8.0, better="lower")]
    assert figures.compare(rows) == ["| x | m | 4.00 (4.00–4.00) | peer: 8.00 (8.00–8.00) | 2.00x | 75 % |"]
    waits = [{**each, "metric": "wait_ms_p99"} for each in rows]
    assert figures.compare(waits)[0].endswith("| 2.00x | – |"), "a loop that never waits is no measure of waiting"
    rows[0] = row("gpupipe", 0.0, better="lower")
    assert figures.compare(rows)[0].endswith("| – | – |"), "nothing is divided by nothing"
    alone = [row("gpupipe", 4.0, better="lower"), row("headspace", 3.0, better="lower")]
    assert figures.compare(alone) == ["| x | m | 4.00 (4.00–4.00) | none was run | – | 75 % |"]


def test_readme_shows_the_headlines_alone() -> None:
    rows = [
        {**row(subject, value), "case": case, "metric": metric}
        for subject, value in (("gpupipe", 2.0), ("peer", 4.0))
        for case in ("norm-n32768-h3072-bf16-fwd", "norm-n1024-h3072-bf16-fwd")
        for metric in ("gpu_time_us", "call_time_us")
    ]
    shown = figures.short({"benchmark": "ops", "rows": rows})
    assert {(each["case"], each["metric"]) for each in shown} == {("norm-n32768-h3072-bf16-fwd", "gpu_time_us")}
    assert figures.short({"benchmark": "unknown", "rows": rows}) == []


def test_figures_do_not_hide_a_failure() -> None:
    assert "| failed | peer: 2.00 (2.00–2.00) | – | – |" in figures.compare([row("gpupipe", None), row("peer", 2.0)])[0]
    assert "| all failed | – | – |" in figures.compare([row("gpupipe", 2.0), row("peer", None)])[0]
    assert figures.compare([row("gpupipe", 2.0)]) == []
    assert figures.cell(common.failed("x", "gpupipe", "step_ms", f"TimeoutError: {common.NOT_BEGUN}").to_json()) == "not run"


def test_parts_of_a_step_are_held_against_eager() -> None:
    rows = [
        {**row(subject, value), "metric": metric, "better": better}
        for subject, values in {"eager": (10.0, 4.0), "fused": (8.0, None), "bf16": (10.0, 8.0)}.items()
        for (metric, better), value in zip((("step_ms", "lower"), ("samples_per_s", "higher")), values, strict=True)
    ]
    lines = figures.by_subject(rows).splitlines()
    assert lines[0] == "| case | subject | step_ms | samples_per_s |"
    assert lines[2] == "| x | eager | 10.0 (10.0–10.0) | 4.00 (4.00–4.00) |"
    assert lines[3] == "| x | fused | 8.00 (8.00–8.00), 1.25x | failed |"
    assert lines[4] == "| x | bf16 | 10.0 (10.0–10.0), 1.00x | 8.00 (8.00–8.00), 2.00x |"


def test_training_is_shown_with_its_pictures(tmp_path: Path) -> None:
    """By metrics of its own in README.md, with links that hold from either page."""
    found = [
        common.summarise(case, subject, metric, [value, value + 1], "lower")
        for case, metric in (("dit", "step_ms"), ("dit", "peak_gb"), ("dit", "saved_gb"), ("loss-dit", "loss_final"))
        for subject, value in (("eager", 8.0), ("gpupipe", 4.0))
    ]
    found.append(common.failed("dit", "compile", "step_ms", "it broke", "lower"))
    path = common.write_results("train", found, {"gpu": "NVIDIA H200"}, tmp_path)
    (tmp_path / "train-loss-wan--h200.png").write_bytes(b"")
    (tmp_path / "train-loss-wan--cpu.png").write_bytes(b"")
    brief, whole = figures.section(tmp_path, brief=True), figures.section(tmp_path)
    assert "| case | subject | step_ms | peak_gb |" in brief
    assert "| dit | compile | failed | – |" in brief
    assert "loss_final" in whole
    pictures = ("train--h200", "train-loss-wan--h200")
    for text, up in ((brief, ""), (whole, "../")):
        assert [line for line in text.splitlines() if line.startswith("![")] == [
            f"![{name}]({up}benchmarks/results/{name}.png)" for name in pictures
        ]
    assert figures.draw(path).read_bytes().startswith(b"\x89PNG")


def test_figures_replace_only_what_lies_between_the_markers() -> None:
    text = f"head\n{figures.BEGIN}\nold\n{figures.END}\ntail\n"
    assert figures.rewritten(text, "new\n") == f"head\n{figures.BEGIN}\nnew\n{figures.END}\ntail\n"
    for bad in ("no markers", f"{figures.END} {figures.BEGIN}", f"{text}{text}"):
        with pytest.raises(ValueError, match="once each"):
            figures.rewritten(bad, "new\n")


def test_the_pages_are_in_step_with_the_results() -> None:
    for page, text in figures.pages():
        assert (old := page.read_text(encoding="utf-8")) == figures.rewritten(old, text), page.name


def test_conformance_tables_say_who_decoded_and_why_not(tmp_path: Path) -> None:
    right = common.summarise("a", "gpupipe", "read_right", [1.0])
    wrong = common.failed("a", "peer", "read_right", "Error: [/some/where/a.mp4] | has no frames")
    rows = [right, common.summarise("a", "gpupipe", "by_nvdec", [1.0]), wrong]
    rows += [common.summarise("all", name, "files_right", [value]) for name, value in (("gpupipe", 1.0), ("peer", 0.0))]
    common.write_results("conformance", rows, {"gpu": "NVIDIA H200"}, tmp_path)
    text = figures.conformance(tmp_path)
    assert "| **all** | 1 of 1 | 0 of 1 |" in text
    assert "| a | yes, NVDEC | no: Error: [a.mp4] / has no frames |" in text
    assert figures.section(tmp_path) == "No results are committed yet.\n"


def test_the_table_of_the_buffers_depth_has_all_subjects_side_by_side(tmp_path: Path) -> None:
    rows = [
        common.summarise("slow-disk", "gpupipe", "stalls", [2.0, 0.0, 1.0], "lower"),
        common.summarise("slow-disk", "queue-2", "stalls", [20.0], "lower"),
        common.failed("slow-disk", "queue-16", "stalls", "out of memory", "lower"),
        common.summarise("steady", "gpupipe", "stalls", [0.0], "lower"),
    ]
    common.write_results("jitter", rows, {"gpu": None}, tmp_path)
    text = figures.jitter(tmp_path)
    assert "| case | metric | gpupipe | queue-2 | queue-16 |" in text
    assert "| slow-disk | stalls | 1.00 (0.00–2.00) | 20.0 (20.0–20.0) | failed |" in text
    assert "| steady | stalls | 0.00 (0.00–0.00) | – | – |" in text
    assert figures.section(tmp_path) == "No results are committed yet.\n", "nothing to divide there"


def test_committed_results_keep_the_form() -> None:
    for path in sorted(common.RESULTS.glob("*.json")):
        assert_form(json.loads(path.read_text(encoding="utf-8")), path.name)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("media")
    return make_media.make(folder, ["h264-tiny"], sources=2, seconds=2)["h264-tiny"]


def test_media_is_what_its_kind_says(sources: list[Path]) -> None:
    for path in sources:
        pts, keys = loader_cases.packets(path)
        assert len(pts) == 60
        assert keys[0] == 0
        assert pts != sorted(pts)  # frames are coded out of order, as encoders do
    assert sources[0].read_bytes() != sources[1].read_bytes()


def test_draws_depend_on_the_seed_alone(sources: list[Path], tmp_path: Path) -> None:
    case = loader_cases.case_of("h264-tiny-s1")
    starts = [
        [visit.start for visit in loader_cases.draw(case, sources, tmp_path / str(k), seed)] for k, seed in enumerate((5, 5, 6))
    ]
    assert starts[0] == starts[1] != starts[2]
    assert all(0 <= start <= 60 - case.frames for start in starts[0])
    assert len(list((tmp_path / "0").iterdir())) == case.clips


def test_the_check_tells_neighbouring_clips_apart(sources: list[Path], tmp_path: Path) -> None:
    case = loader_cases.case_of("h264-tiny-s1")
    draws = loader_cases.draw(case, sources, tmp_path, 0)[: case.batch]
    cpu = torch.device("cpu")

    def batch(shift: int) -> torch.Tensor:
        clips = [loader_cases.decode_cpu(d.path, loader_cases.indices(case, d.start + shift)) for d in draws]
        return torch.stack([loader_cases.finish(clip, case, cpu) for clip in clips])

    assert loader_cases.check(batch(0), draws, case) is None
    assert all(0 < visit.start < 60 - case.frames for visit in draws)
    assert "differs" in (loader_cases.check(batch(1), draws, case) or "")
    assert "differs" in (loader_cases.check(batch(-1), draws, case) or "")
    assert "bfloat16" in (loader_cases.check(batch(0).float(), draws, case) or "")


def test_packets_needed_counts_from_the_keyframe(sources: list[Path], tmp_path: Path) -> None:
    case = loader_cases.case_of("h264-tiny-s1")
    draws = [loader_cases.Draw(str(sources[0]), 0)]
    needed = loader_cases.packets_needed(case, draws, sources)
    pts, _ = loader_cases.packets(sources[0])
    assert needed == max(pts.index(p) for p in sorted(pts)[: case.frames]) + 1


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("benchmark", "subjects"),
    [("loader", {"gpupipe", "pyav-16t"}), ("decode", {"gpupipe", "gpupipe-nvdec", "pyav-16t"})],
)
def test_a_benchmark_of_clips_runs_on_the_cpu(benchmark: str, subjects: set[str], tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / f"bench_{benchmark}.py"), "--quick"]
    command += ["--media", str(tmp_path / "media"), "--out", str(tmp_path / "results")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stderr
    (path,) = (tmp_path / "results").glob(f"{benchmark}--*.json")
    data = json.loads(path.read_text())
    assert_form(data, path.name)
    rates = {row["subject"]: row for row in data["rows"] if row["metric"] == "clips_per_s"}
    assert set(rates) == subjects
    assert all(row["value"] is not None for row in rates.values()), rates
    assert {row["subject"] for row in data["rows"] if row["metric"] == "clips_per_s_warm" and row["value"] > 0} == subjects


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("bench_transform", ["--quick"]),
        ("bench_beside", ["--quick"]),
        ("bench_jitter", ["--quick"]),
        ("bench_storage", ["--quick"]),
        ("bench_loader_train", ["--quick"]),
        ("bench_ops", ["--quick"]),
        ("bench_block", ["--quick"]),
        ("bench_train", ["--quick"]),
        (
            "conformance",
            [
                "--device",
                "cpu",
                "--only",
                "h264_hidden_start",
                "vp9_layers",
                "--shared",
                "/nowhere",
                "--subjects",
                "gpupipe-cpu",
            ],
        ),
    ],
)
def test_other_benchmarks_run_on_the_cpu(script: str, options: list[str], tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / f"{script}.py"), *options, "--out", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    assert run.returncode == 0, run.stderr
    (path,) = tmp_path.glob("*.json")
    data = json.loads(path.read_text())
    assert_form(data, path.name)
    assert len(data["rows"]) >= 2
    lacking = importlib.util.find_spec("diffusers") is None  # its models are then errors that say so
    wrong = [row for row in data["rows"] if row["value"] is None and not (lacking and "diffusers" in row["error"])]
    assert wrong == []


@pytest.mark.parametrize("name", ["nv12-1080p-224", "rgb-1080p-224-eval", "nv12-4k-224-eval", "nv12-256p-224-test"])
def test_names_of_transform_cases_are_checked(name: str) -> None:
    with pytest.raises(ValueError, match="is not FORMAT-SIZE-OUTPUT-KIND"):
        bench_transform.case_of(name)


def test_names_of_cases_say_what_they_are() -> None:
    case = loader_cases.case_of("hevc-720p-g60-s4-frame-cold")
    assert (case.kinds, case.stride, case.frames, case.cold) == (("hevc-720p-g60",), 4, 1, True)
    assert loader_cases.case_of("h264-1080p-g250-s1").kinds == ("h264-1080p",)
    assert len(loader_cases.case_of("mixed-s1").kinds) == len(loader_cases.MIXED)
    for sweep in [bench_decode.CASES, *bench_decode.SWEEPS.values()]:
        assert [loader_cases.case_of(name).name for name in sweep] == sweep
    for name in ("h264-1080p", "h264-1080p-s1", "h265-1080p-g250-s1", "h264-999p-g250-s1", "mixed-g250-s1"):
        with pytest.raises(ValueError, match="is not"):
            loader_cases.case_of(name)
    kind = make_media.kind_of("vp9-720p-g30")
    assert (kind.codec, kind.width, kind.height, kind.gop) == ("libvpx-vp9", 1280, 720, 30)


def test_a_kind_of_media_that_is_none_is_named_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["make_media.py", str(tmp_path / "out"), "--kinds", "h264-360p"])
    with pytest.raises(SystemExit) as left:
        make_media.main()
    told = capsys.readouterr().err.splitlines()[-1]
    assert left.value.code == 2
    assert "'h264-360p' is not CODEC-SIZE[-gN] with one of h264, hevc, vp9, av1 and one of 4k, 1080p" in told
    with pytest.raises(ValueError, match="h264-360p"):
        make_media.make(tmp_path / "out", ["h264-360p"])
    assert not (tmp_path / "out").exists()
    monkeypatch.setenv("COLUMNS", "300")  # argparse breaks lines at hyphens too
    monkeypatch.setattr(sys, "argv", ["make_media.py", "--help"])
    with pytest.raises(SystemExit):
        make_media.main()
    shown = " ".join(capsys.readouterr().out.split())
    assert "h264, hevc, vp9, av1; 4k, 1080p, 720p, 256p, tiny" in shown
    assert "Default: h264-1080p h264-256p" in shown


@pytest.mark.parametrize("codec", list(make_media.CODECS))
def test_media_of_every_codec(codec: str, tmp_path: Path) -> None:
    (path,) = make_media.make(tmp_path, [f"{codec}-tiny-g12"], sources=1, seconds=1)[f"{codec}-tiny-g12"]
    pts, keys = loader_cases.packets(path)
    assert len(pts) == 30
    assert len(keys) >= 3


def test_a_cold_file_is_one_of_its_own(sources: list[Path], tmp_path: Path) -> None:
    case = dataclasses.replace(loader_cases.case_of("h264-tiny-s1"), cold=True)
    (first, *_) = loader_cases.draw(case, sources, tmp_path / "visits", 0)
    assert not os.path.samefile(first.path, sources[0])
    assert Path(first.path).read_bytes() == sources[0].read_bytes()


def test_a_short_soak_leaves_nothing_and_has_the_form(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "soak.py"), "--minutes", "0.05", "--device", "cpu", "--files", "13"]
    command += ["--kinds", "h264-tiny", "--media", str(tmp_path / "media"), "--out", str(tmp_path), "--allow", "2000"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 0, run.stderr
    data = json.loads((tmp_path / "soak--cpu.json").read_text(encoding="utf-8"))
    assert_form(data, "soak--cpu.json")
    values = {row["metric"]: row["value"] for row in data["rows"]}
    assert values["threads_left"] == values["processes_left"] == 0
    assert values["clips_per_s"] > 0
    assert "2 bad files" in run.stderr


def test_growth_is_told_from_a_steady_state() -> None:
    assert soak.growth([10, 50, 90, 100, 100, 101, 100, 99, 100]) == 0
    assert soak.growth([100, 110, 120, 130, 140, 150, 160, 170, 180]) == 30
    assert soak.growth([7]) == 0

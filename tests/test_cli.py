"""The commands as a person or a script meets them: output, exit codes, errors, Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import typer

from gpupipe import __version__
from gpupipe.cli import app, main
from gpupipe.cli.bench import _long_enough
from gpupipe.cli.index import IndexConfig, index
from gpupipe.cli.probe import ProbeConfig, probe
from gpupipe.config import LoaderConfig
from gpupipe.data.index.fill import fill

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["--frames", "4", "--size", "32", "--batch", "2", "--device", "cpu"]


class Result(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Runs a command in this process."""
    monkeypatch.delenv("GPUPIPE_DEBUG", raising=False)

    def call(*arguments: str | Path) -> Result:
        with pytest.raises(SystemExit) as left:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return Result(int(left.value.code or 0), out, err)

    return call


@pytest.fixture
def folder(clips: dict[str, Path], tmp_path: Path) -> Path:
    """Three copies of one clip in a folder of their own."""
    videos = tmp_path / "videos"
    videos.mkdir()
    for name in "abc":
        shutil.copy(clips["h264"], videos / f"{name}.mp4")
    return videos


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **extra}


def test_version_and_help(run) -> None:  # type: ignore[no-untyped-def]
    assert run("--version") == (0, f"gpupipe {__version__}\n", "")
    shown = run("--help")
    assert shown.code == 0
    for command in ("demo", "bench", "probe", "doctor"):
        assert command in shown.out
    assert run("prob").code == 2, "an unknown command is a wrong command line"


def options_of(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """All options with a value of a command and those below it."""
    for parameter in command.params:
        if parameter.param_type_name == "option" and not parameter.is_flag:
            yield f"{name} {parameter.opts[0]}", parameter
    for below, each in getattr(command, "commands", {}).items():
        yield from options_of(each, f"{name} {below}".strip())


def test_help_tells_what_holds_where_nothing_is_given() -> None:
    found = dict(options_of(typer.main.get_command(app)))
    assert len(found) > 30
    told = {name: each.default if each.default is not None else each.show_default for name, each in found.items()}
    assert [name for name, default in told.items() if default is None or isinstance(default, bool)] == []
    loader = LoaderConfig()
    for name, default in (
        ("frames", loader.clip.frames),
        ("stride", loader.clip.stride),
        ("sampling", loader.clip.sampling),
        ("batch", loader.batch.size),
        ("decoder", loader.decode.decoder),
        ("cpu-workers", loader.decode.cpu_workers),
        ("cache", loader.cache.clips),
        ("cache-gib", loader.cache.clips_gib),
        ("seed", loader.seed),
        ("device", loader.device),
    ):
        assert told[f"bench --{name}"] == f"{default}".removesuffix(".0"), name


def test_start_up_loads_nothing_heavy() -> None:
    code = "import sys, gpupipe.cli; print([m for m in ('torch', 'numpy', 'av', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_probe_tells_what_the_index_holds(run, fresh_cache: Path, folder: Path) -> None:  # type: ignore[no-untyped-def]
    from gpupipe.data import index as indices

    video = folder / "a.mp4"
    result = run("probe", video, "--json", "--device", "cpu")
    assert result.code == 0
    facts = json.loads(result.out)
    index = indices.load(str(video))
    assert (facts["codec"], facts["frames"]) == ("h264", 60) == (index.info.codec, index.info.frames)
    assert facts["packets"] == len(index.pts)
    assert facts["start_points"] == int(index.start.sum()) >= 1
    assert facts["start_distance_mean"] <= facts["start_distance_max"] <= 60
    assert (facts["decoder"], facts["decoder_reason"]) == ("cpu", "the device is the CPU")
    assert not facts["index_cached"]
    assert Path(facts["index_file"]).is_file()

    again = run("probe", video, "--device", "cpu")
    assert "index       from the cache" in again.out
    assert "h264, yuv420p, 8 bit" in again.out
    assert again.err == ""


def test_probe_shows_rotation(run, tricky: Path) -> None:  # type: ignore[no-untyped-def]
    shown = run("probe", tricky / "t07_rot.mp4", "--device", "cpu").out
    assert "320x240, shown as 240x320" in shown
    facts = json.loads(run("probe", tricky / "t05_vfr.mp4", "--device", "cpu", "--json").out)
    assert facts["variable_rate"] is True


def test_probe_says_what_untagged_colours_are_read_as(run, tricky: Path) -> None:  # type: ignore[no-untyped-def]
    shown = run("probe", tricky / "t08_untagged.mp4", "--device", "cpu").out
    assert "matrix not tagged (read as bt601), range not tagged (read as limited)" in shown
    facts = json.loads(run("probe", tricky / "t08_bt709_tv.mp4", "--device", "cpu", "--json").out)
    assert facts["color_matrix_used"] == facts["color_matrix"] == "bt709"


def test_indices_that_cannot_be_kept_are_a_failure(  # type: ignore[no-untyped-def]
    run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("GPUPIPE_CACHE", str(tmp_path / "file" / "inside"))  # root may write anywhere, but not into a file
    result = run("index", folder, "--json")
    assert (result.code, json.loads(result.out)["not_kept"]) == (1, 3)
    shown = run("index", folder)
    assert shown.code == 1
    assert "set GPUPIPE_CACHE" in shown.out
    video = next(folder.glob("*.*"))
    assert "not kept" in run("probe", video, "--device", "cpu").out


def test_the_cache_is_listed_and_cleared(run, folder: Path, fresh_cache: Path) -> None:  # type: ignore[no-untyped-def]
    assert json.loads(run("cache", "ls", "--json").out)["indices"] == 0
    assert run("index", folder).code == 0
    (fresh_cache / "autotune").mkdir()
    (fresh_cache / "autotune" / "a.json").write_text("{}")
    listed = json.loads(run("cache", "ls", "--json").out)
    assert (listed["indices"], listed["launches"]) == (3, 1)
    assert (listed["removed"], listed["cache"]) == (0, str(fresh_cache))
    assert listed["size_bytes"] == sum(file.stat().st_size for file in fresh_cache.rglob("*.*")) > 2
    assert "removed" in run("cache", "clear").out
    assert [path for path in fresh_cache.rglob("*") if path.is_file()] == []
    assert run("cache", "away").code == 2


def test_bench_tells_of_a_run_too_short_for_a_rate(run, folder: Path) -> None:  # type: ignore[no-untyped-def]
    shown = run("bench", folder, "--clips", "4", *SMALL).out
    assert "note  only" in shown
    assert "--warmup leaves out" in shown


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (["--stride", "3"], "4 frames, stride 3, 32x32"),
        (["--config", "fps.yaml"], "4 frames, 5 frames a second, 32x32"),
        (["--sampling", "uniform"], "4 frames, over the whole video, 32x32"),
    ],
)
def test_bench_shows_what_is_measured(  # type: ignore[no-untyped-def]
    run, folder: Path, options: list[str], shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fps.yaml").write_text("clip: {fps: 5}\n")
    lines = [line.split("  ", 1) for line in run("bench", folder, "--clips", "4", *SMALL, *options).out.splitlines()]
    facts = {line[0]: line[-1].strip() for line in lines}
    assert [facts[name] for name in ("clip", "batch", "device")] == [shown, "2 clips", "cpu"]


def test_bench_measures_and_leaves_its_files(run, folder: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    plot, file = tmp_path / "plot.png", tmp_path / "report.json"
    result = run("bench", folder, "--clips", "10", *SMALL, "--json", "--plot", plot, "--report", file)
    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert json.loads(file.read_text()) == report
    assert plot.read_bytes().startswith(b"\x89PNG")
    measured = report["measured"]
    assert 10 <= measured["clips"] < 12
    assert measured["frames"] == 4 * measured["clips"]
    assert measured["decoders"] == {"cpu": measured["clips"]}
    assert measured["packets_per_frame"] >= 1
    assert measured["clips_per_s"] == pytest.approx(measured["clips"] / measured["seconds"])
    assert 0 < measured["wait_p50_seconds"] <= measured["wait_p99_seconds"]
    assert measured["resources"]["cpu_cores_mean"] > 0
    assert measured["resources"]["peak_host_bytes"] > 50 << 20, "an interpreter with torch takes more than that"
    assert "making" not in result.out
    assert "measuring 3 videos" in result.err, "progress belongs on stderr"


def test_bench_takes_a_batch_however_short_its_time(run, folder: Path) -> None:  # type: ignore[no-untyped-def]
    result = run("bench", str(folder), "--device", "cpu", "--seconds", "0.001", "--size", "16", "--frames", "2", "--json")
    assert result.code == 0
    assert json.loads(result.out)["measured"]["batches"] == 1


def test_a_pass_of_bench_is_long_but_no_longer_than_it_need_be(folder: Path) -> None:
    def rows(batch: int) -> int:
        return len(_long_enough((str(folder),), LoaderConfig.parse({"batch": batch})))

    assert (rows(1), rows(8), rows(100_000)) == (66, 513, 100_002), "in whole passes over three videos"


def test_bench_measures_a_loaders_own_settings(run, folder: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "run.yaml"
    file.write_text(
        "clip: {frames: 3, fps: 5}\ntransform: {preset: kinetics_train, size: 48}\nbatch: 2\nseed: 5\ndevice: cpu\n"
        "decode: {cpu_workers: 1}\n"
    )
    result = run("bench", folder, "--clips", "4", "--config", file, "--seed", "0", "--size", "32", "--json")
    assert result.code == 0, result.err
    report = json.loads(result.out)
    loader = report["loader"]
    assert (loader["clip"]["frames"], loader["clip"]["fps"], loader["seed"]) == (3, 5.0, 0)
    assert loader["transform"]["size"] == [32, 32]
    assert loader["transform"]["color_jitter"]["hue"] == [-0.1, 0.1]
    assert loader["decode"]["cpu_workers"] == 1
    assert report["measured"]["frames"] == 3 * report["measured"]["clips"]
    assert "cpu_workers" in run("bench", folder, "--cpu-workers", "many").err


def test_bench_shows_the_stages_at_work(run, folder: Path) -> None:  # type: ignore[no-untyped-def]
    result = run("bench", folder, "--clips", "8", *SMALL, "--live", "--json")
    assert "measuring" not in result.err, "one picture of the run at a time"
    assert "batches" in result.err.splitlines()[-1]
    assert "busy: " in result.err
    report = json.loads(result.out)
    assert "training loop" in report["measured"]["limit"]
    shown = run("bench", folder, "--clips", "8", *SMALL)
    assert any(row.startswith("limit ") and "training loop" in row for row in shown.out.splitlines())


def test_bench_tells_who_asks_for_batches_of_clips(run, folder: Path) -> None:  # type: ignore[no-untyped-def]
    result = run("bench", folder, "--batches", "6")
    assert result.code == 2
    assert "--clips" in result.err
    assert "--batches" not in run("bench", "--help").out


def test_bench_names_bad_files(run, folder: Path) -> None:  # type: ignore[no-untyped-def]
    (folder / "bad.mp4").write_bytes(b"")
    result = run("bench", folder, "--clips", "8", *SMALL)
    assert result.code == 0
    assert f"bad file  {folder / 'bad.mp4'}" in result.out
    assert "clips/s" in result.out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["probe", "no/such.mp4"], "no/such.mp4"),
        (["probe", "{tmp}"], "`gpupipe index` goes through a folder"),
        (["probe", "{tmp}/empty.mp4"], "empty.mp4"),
        (["bench", "no/such/folder"], "no/such/folder"),
        (["bench", "{tmp}/void"], "void"),
        (["bench", "{tmp}/*.avi"], "*.avi"),
        (["bench", "{tmp}/empty.mp4", "--device", "cuda:99"], "cuda:99"),
        (["bench", "{tmp}/empty.mp4", "--device", "tpu"], "tpu"),
        (["bench", "{tmp}/empty.mp4", "--device", "cpu", "--decoder", "nvdec"], "nvdec"),
        (["bench", "{tmp}/empty.mp4", "--device", "cpu", "--decoder", "dali"], "dali"),
        (["bench", "{tmp}/empty.mp4", "--size", "0"], "size"),
        (["bench", "{tmp}/empty.mp4", "--transform", "run.yaml"], "--config run.yaml"),
        (["bench", "{tmp}/empty.mp4", "--report", "no/folder/x.json"], "no/folder"),
        (["bench", "{tmp}/empty.mp4", "--report", "{tmp}/void"], "--report {tmp}/void is a folder"),
        (["bench", "{tmp}/empty.mp4", "--plot", "{tmp}/void.png"], "--plot {tmp}/void.png is a folder"),
        (["view", "{tmp}/empty.mp4", "--out", "{tmp}/void.png"], "--out {tmp}/void.png is a folder"),
        (["view", "{tmp}/empty.mp4", "--out", "{tmp}/empty.mp4/x/y.png"], "/x/y.png cannot be written: see {tmp}/empty.mp4"),
        (["bench", "{tmp}/empty.mp4", "--device", "cpu"], "empty.mp4"),
        (["demo", "no/such.mp4", "--out", "{tmp}/out"], "no/such.mp4"),
        (["demo", "--out", "{tmp}/empty.mp4"], "empty.mp4"),
        (["demo", "--out", "{tmp}/out", "--device", "cuda:99"], "cuda:99"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_error(run, tmp_path: Path, arguments: list[str], named: str) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "void").mkdir()
    (tmp_path / "void.png").mkdir()
    result = run(*(argument.replace("{tmp}", str(tmp_path)) for argument in arguments))
    assert result.code == 1
    assert result.out == ""
    last = result.err[result.err.index("gpupipe: [TT_ERR") :]
    assert named.replace("{tmp}", str(tmp_path)) in last
    assert "Traceback" not in result.err


def test_debug_shows_the_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpupipe.errors import OpenError

    monkeypatch.setenv("GPUPIPE_DEBUG", "1")
    with pytest.raises(OpenError):
        main(["probe", str(tmp_path / "absent.mp4")])


def test_output_is_plain_where_nobody_watches(folder: Path) -> None:
    """Also where the environment asks libraries for colour, as CI services do."""
    forced = environment(FORCE_COLOR="1", GITHUB_ACTIONS="true")
    commands = (["bench", str(folder), "--clips", "4", *SMALL], ["probe", str(folder / "a.mp4")], ["--help"], ["bench"])
    for arguments in commands:
        done = subprocess.run([sys.executable, "-m", "gpupipe", *arguments], env=forced, capture_output=True, text=True)
        assert done.returncode == (2 if arguments == ["bench"] else 0), done.stderr
        assert "\x1b" not in done.stdout + done.stderr
        assert "\r" not in done.stdout + done.stderr
        assert len(done.stderr.splitlines()) <= 6


def test_a_closed_stdout_and_a_name_beyond_its_encoding(clips: dict[str, Path], tmp_path: Path) -> None:
    file = shutil.copy(clips["h264"], tmp_path / "日本.mp4")
    command = [sys.executable, "-m", "gpupipe", "probe", str(file)]
    done = subprocess.run(command, env=environment(PYTHONIOENCODING="ascii:strict"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert r"\u65e5\u672c.mp4" in done.stdout
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    done = subprocess.run(closed, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", ["bench", "demo"])
def test_interrupt_leaves_at_once_and_quietly(command: str, folder: Path, tmp_path: Path) -> None:
    arguments = {"bench": ["bench", str(folder), "--seconds", "60", *SMALL], "demo": ["demo", "--out", str(tmp_path / "out")]}
    process = subprocess.Popen(
        [sys.executable, "-m", "gpupipe", *arguments[command]],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        for line in process.stderr:  # wait until the work has begun
            if line.startswith(("measuring", "making clips")):
                break
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in err


def test_interrupt_of_an_evaluated_string_leaves_with_the_same_status(tmp_path: Path) -> None:
    program = """
from gpupipe import cli

def interrupted():
    raise KeyboardInterrupt

cli.app = lambda **_: eval("interrupted()")
cli.main([])
"""
    (tmp_path / "interrupted.py").write_text(program)
    command = [sys.executable, "-m", "interrupted"]
    done = subprocess.run(command, env=environment(), cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")


def test_index_makes_what_is_missing_and_names_what_is_bad(clips: dict[str, Path], tmp_path: Path, fresh_cache: Path) -> None:
    (tmp_path / "bad.mp4").write_bytes(b"no video")
    for name in ("h264", "hevc", "vp9"):
        (tmp_path / clips[name].name).symlink_to(clips[name])
    report = index(IndexConfig(videos=(str(tmp_path),), processes=2))
    assert (report["videos"], report["frames"], report["packets"]) == (3, 180, 180)
    assert report["video_seconds"] == pytest.approx(6, abs=0.1)
    assert list(report["bad_files"]) == [str(tmp_path / "bad.mp4")]
    assert "cannot be opened as a video" in report["bad_files"][str(tmp_path / "bad.mp4")]
    assert len(list(fresh_cache.rglob("*.gpx"))) == 3
    assert (report["made"], report["there_already"]) == (3, 0)
    shutil.copy(clips["h264"], tmp_path / "new.mp4")
    again = index(IndexConfig(videos=(str(tmp_path),)))
    assert [again[name] for name in ("videos", "made", "there_already")] == [4, 1, 3]


def test_index_names_all_that_cannot_be_used_and_indexes_the_rest(folder: Path, run: Any, fresh_cache: Path) -> None:
    (folder / "bad.mp4").write_bytes(b"no video")
    (folder / "bad.csv").write_text("file\na.mp4\n")
    given = [folder / "nope.mp4", folder / "bad.csv", folder / "*.avi", folder / "bad.mp4", folder / "a.mp4"]
    found = run("index", *given)
    assert found.code == 1
    lines = found.out.splitlines()
    assert "indices  1 made, 0 there already" in lines
    assert "4 cannot be used:" in lines
    for path in given[:4]:
        at = next(number for number, line in enumerate(lines) if line.startswith(f"  {path}: [TT_ERR_"))
        assert lines[at + 1].startswith("    What to do: ")
    found = run("index", folder / "a.mp4")
    assert (found.code, "not kept" in found.out) == (0, False)
    assert "0 made, 1 there already" in found.out


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_index_fails_when_files_cannot_be_used(form: list[str], folder: Path, run: Any) -> None:
    assert run("index", folder, *form).code == 0
    (folder / "bad.mp4").write_bytes(b"no video")
    found = run("index", folder, *form)
    assert found.code == 1
    assert "bad.mp4" in found.out


def test_leaving_fill_early_ends_its_processes(clips: dict[str, Path], fresh_cache: Path) -> None:
    outcomes = fill([str(path) for path in clips.values()], 2)
    next(outcomes)
    outcomes.close()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # one of another test's has ended meanwhile
            assert "gpupipe.data.scan.worker" not in child.cmdline()


def test_probe_states_the_cost_of_clips(clips: dict[str, Path]) -> None:
    costs = probe(ProbeConfig(file=str(clips["h264"]), device="cpu", plan=True))["plan"]
    assert [cost["stride"] for cost in costs] == [1], "60 frames have room for no clip of 16 frames at stride 4"
    assert 16 < costs[0]["packets"] < costs[0]["plain_packets"] < 60
    intra = probe(ProbeConfig(file=str(clips["mpeg4"]), device="cpu", plan=True))["plan"]
    assert intra[0]["packets"] == intra[0]["plain_packets"], "nothing is left out of what the rules do not cover"

"""Software decoding in processes: the same frames, errors that keep their kind, and nothing that stays behind."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from clips import spoilt

from gpupipe import VideoLoader
from gpupipe.data import index as indices
from gpupipe.data import loader as loader_room
from gpupipe.data.decode import Choice, DecodeEngine, DecodeProcess, Fallbacks, Unsupported, cpu, helping
from gpupipe.data.plan import make_plan
from gpupipe.data.stop import Stopped
from gpupipe.errors import DecodeError, DeviceError, OpenError
from gpupipe.telemetry import Telemetry
from gpupipe.types import Planes


@pytest.fixture
def process() -> Iterator[DecodeProcess]:
    made = DecodeProcess()
    yield made
    made.close()
    made.close()


def helpers() -> list[psutil.Process]:
    """This test run's decoding processes."""
    found = []
    for child in psutil.Process().children():
        try:
            found += [child] if "gpupipe.data.decode.worker" in child.cmdline() else []
        except psutil.NoSuchProcess:
            continue
    return found


def same(ours: Planes, theirs: Planes) -> bool:
    planes = [(getattr(ours, name), getattr(theirs, name)) for name in ("y", "u", "v")]
    return ours.format == theirs.format and all(torch.equal(a.to(torch.int32), b.to(torch.int32)) for a, b in planes)


def test_frames_equal_those_of_a_thread(clips: dict[str, Path], process: DecodeProcess) -> None:
    """Sizes and formats in turn: the memory grows, and is used again."""
    for name in ("h264_odd", "vp9", "h264", "mpeg4", "hevc", "vp9_odd"):
        index = indices.load(str(clips[name]))
        for wanted in ([5], [59, 0, 31, 30], range(10, 26)):
            plan = make_plan(index, wanted)
            assert same(process.decode(index, plan), cpu.decode(index, plan)), (name, wanted)
    assert len(helpers()) == 1


def test_deep_frames_come_as_16_bits(tricky: Path, process: DecodeProcess) -> None:
    index = indices.load(str(tricky / "t09_h264_hi10.mp4"))
    plan = make_plan(index, [3, 20])
    ours = process.decode(index, plan)
    assert ours.data.dtype == torch.uint16
    assert same(ours, cpu.decode(index, plan))


def test_damage_is_told_across_processes(clips: dict[str, Path], tmp_path: Path, process: DecodeProcess) -> None:
    index = indices.load(str(spoilt(clips["h264"], tmp_path / "rot.mp4", 30)))
    plan = make_plan(index, [12, 40])
    found: list[int] = []
    process.decode(index, plan, damaged=found)
    assert found == [40]


def test_a_helper_leaves_a_damaged_clip_to_the_hardware(clips: dict[str, Path], tmp_path: Path) -> None:
    """NVDEC patches damage up in its own way: who gets to a clip first must not show in it."""
    index = indices.load(str(spoilt(clips["h264"], tmp_path / "rot.mp4", 30)))
    telemetry = Telemetry()
    engine = DecodeEngine(torch.device("cpu"), mode="auto", keep=1, fallbacks=Fallbacks(), telemetry=telemetry)
    with pytest.raises(DecodeError, match="could decode frame 40 only in part"):
        engine.run("cpu", index, make_plan(index, [12, 40]), whole=True)
    assert telemetry.value("damaged_frames") == 0
    assert len(engine.run("cpu", index, make_plan(index, [12]), whole=True)) == 1


def test_errors_keep_their_kind(clips: dict[str, Path], tmp_path: Path, process: DecodeProcess) -> None:
    path = Path(shutil.copy(clips["h264"], tmp_path / "video.mp4"))
    index = indices.load(str(path))
    plan = make_plan(index, [5])
    process.decode(index, plan)
    data = path.read_bytes()
    path.write_bytes(data + b"more")
    with pytest.raises(OpenError, match=r"video\.mp4 was replaced or changed"):
        process.decode(index, plan)
    path.unlink()
    with pytest.raises(OpenError, match=r"cannot open .*video\.mp4"):
        process.decode(index, plan)
    damaged = tmp_path / "damaged.mp4"
    spoilt = bytearray(data)
    for packet in range(12, 30):
        at = int(index.position[packet])
        spoilt[at : at + int(index.size[packet])] = b"\xff" * int(index.size[packet])
    damaged.write_bytes(spoilt)
    broken = indices.load(str(damaged))
    with pytest.raises(DecodeError, match=r"damaged\.mp4: frame \d+ could not be decoded") as caught:
        process.decode(broken, make_plan(broken, [20]))
    assert caught.value.time_seconds == pytest.approx(20 / 30)
    assert len(helpers()) == 1, "an error is no reason to end the process"


def test_a_process_that_dies_is_replaced_and_one_that_dies_twice_is_an_error(
    clips: dict[str, Path], process: DecodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = indices.load(str(clips["h264"]))
    plan = make_plan(index, [5])
    process.decode(index, plan)
    (child,) = helpers()
    os.kill(child.pid, signal.SIGKILL)
    child.wait(60)
    assert same(process.decode(index, plan), cpu.decode(index, plan))
    start = DecodeProcess._start

    def dying(self: DecodeProcess, stop: Any) -> Any:
        child, file = start(self, stop)
        child.kill()
        return child, file

    with monkeypatch.context() as context:
        context.setattr(DecodeProcess, "_start", dying)
        with pytest.raises(DecodeError, match="process that decoded it ended, twice"):
            process.decode(index, plan)
    assert same(process.decode(index, plan), cpu.decode(index, plan))


def test_work_that_is_not_wanted_any_more_is_given_up(clips: dict[str, Path], process: DecodeProcess) -> None:
    index = indices.load(str(clips["h264"]))
    plan = make_plan(index, [5])
    process.decode(index, plan)
    (child,) = helpers()
    child.suspend()  # it would not answer in any time
    asked = time.monotonic()
    with pytest.raises(Stopped):
        process.decode(index, plan, lambda: time.monotonic() - asked > 0.3)
    assert time.monotonic() - asked < 10
    assert same(process.decode(index, plan, lambda: False), cpu.decode(index, plan))


OPTIONS: dict[str, Any] = {"clip": {"frames": 8}, "transform": {"size": 64, "dtype": "float32"}, "batch": 4, "seed": 3}
NAMES = ("h264", "hevc", "vp9", "h264_odd", "mpeg4", "vp9_odd")


def batches(loader: VideoLoader) -> list[torch.Tensor]:
    with loader:
        return [batch.video for batch in loader]


@pytest.fixture
def paths(clips: dict[str, Path]) -> list[Path]:
    return [clips[name] for name in NAMES] * 3


@pytest.fixture
def expected(paths: list[Path]) -> list[torch.Tensor]:
    return batches(VideoLoader(paths, device="cpu", **OPTIONS))


def test_a_loader_on_the_cpu_with_processes(paths: list[Path], expected: list[torch.Tensor]) -> None:
    loader = VideoLoader(paths, device="cpu", decode={"cpu_workers": 2}, **OPTIONS)
    for _ in range(2):
        loader.set_epoch(0)
        found = [batch.video for batch in loader]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert len(helpers()) == 2, "started once"
    loader.set_epoch(0)
    for _ in loader:
        break
    loader.close()
    assert not helpers()


class FakeHardware(DecodeEngine):
    """Stands for NVDEC: takes H.264 and VP9, gives up on odd sizes when it meets them, and decodes as the CPU does."""

    def choose(self, index: indices.VideoIndex) -> Choice:
        known = self._fallbacks.get(index.info.path)
        return Choice("nvdec" if index.info.codec in ("h264", "vp9") and known is None else "cpu", known)

    def run(self, decoder: Any, index: indices.VideoIndex, plan: Any, stop: Any = None, **how: Any) -> Planes:
        if decoder == "nvdec" and index.info.width % 16:
            self._fallbacks.add(index.info.path, "an odd size")
            raise Unsupported("an odd size")
        assert decoder == "nvdec" or self._process is not None, "no hardware thread decodes in software"
        planes = super().run("cpu", index, plan, stop, **how)
        self._telemetry.count(f"by_{decoder}")
        return planes


@pytest.fixture
def two_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaders on the CPU get two threads with stand-ins for NVDEC and two helpers."""

    def engines(config: Any, device: Any, telemetry: Any) -> tuple[list[DecodeEngine], list[DecodeEngine]]:
        shared: dict[str, Any] = {"mode": "auto", "keep": 1, "fallbacks": Fallbacks(), "telemetry": telemetry}
        return (
            [FakeHardware(device, **shared) for _ in range(2)],
            [FakeHardware(device, **shared, process=DecodeProcess()) for _ in range(2)],
        )

    monkeypatch.setattr(loader_room, "engines_of", engines)


@pytest.mark.parametrize("workers", [0, 2])
def test_what_hardware_cannot_decode_goes_to_the_helpers(
    workers: int, paths: list[Path], expected: list[torch.Tensor], two_kinds: None
) -> None:
    with VideoLoader(paths, device="cpu", decode={"cpu_workers": workers}, **OPTIONS) as loader:
        for _ in range(3):
            loader.set_epoch(0)
            found = list(loader)
            assert all(torch.equal(batch.video, wanted) for batch, wanted in zip(found, expected, strict=True))
            decoders = {(Path(clip.path).name, clip.decoder) for batch in found for clip in batch.clips}
            assert {("hevc.mp4", "cpu"), ("mpeg4.avi", "cpu"), ("h264_odd.mp4", "cpu")} <= decoders
            assert workers or ("h264.mp4", "cpu") not in decoders, "helpers that need not help do not"
        stats = loader.stats()
    assert stats["by_cpu"] + stats["by_nvdec"] == stats["clips"] == 48
    assert stats["by_nvdec"] > 0
    assert not helpers()


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Helpers that are let in after a few clips and help wherever they can."""
    values = {"_FEWEST": 2, "_SETTLE": 1, "_WINDOW": 4, "_MARGIN": 0.0, "_WORTH": 0.0, "_MUCH_SLOWER": 0.0}
    for name, value in values.items():
        monkeypatch.setattr(helping, name, value)


_EPOCHS = 25
"""Epochs within which a helper has got to work, on a busy machine too."""
AHEAD: dict[str, Any] = {**OPTIONS, "device": "cpu", "decode": {"cpu_workers": 2}, "jitter": {"depth": 2}}


def test_helpers_work_ahead_and_change_no_bit(paths: list[Path], two_kinds: None, eager: None) -> None:
    many = paths * 8
    expected = batches(VideoLoader(many, device="cpu", **OPTIONS))
    with VideoLoader(many, **AHEAD) as loader:
        helped: set[str] = set()
        for _ in range(_EPOCHS):
            loader.set_epoch(0)
            found = list(loader)
            assert all(torch.equal(batch.video, wanted) for batch, wanted in zip(found, expected, strict=True))
            assert [batch.index for batch in found] == list(range(len(expected)))
            helped |= {Path(clip.path).name for batch in found for clip in batch.clips if clip.decoder == "cpu"}
            if helped & {"h264.mp4", "vp9.webm"}:
                break
        assert helped & {"h264.mp4", "vp9.webm"}


def test_what_helpers_cannot_do_is_the_hardwares(
    paths: list[Path], two_kinds: None, eager: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever becomes of a helper: which clips are in a batch must not depend on it."""
    many = paths * 8
    expected = batches(VideoLoader(many, device="cpu", **OPTIONS))
    ask = DecodeProcess._ask

    def dying(self: DecodeProcess, request: dict[str, Any], stop: Any) -> Any:
        if request["identity"]["path"].endswith(("h264.mp4", "vp9.webm")):
            self._start(stop)[0].kill()
        return ask(self, request, stop)

    monkeypatch.setattr(DecodeProcess, "_ask", dying)
    with VideoLoader(many, **AHEAD) as loader:
        for _ in range(_EPOCHS):
            loader.set_epoch(0)
            found = [batch.video for batch in loader]
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
            if loader.stats().get("helps_failed"):
                break
        assert loader.stats()["helps_failed"] > 0
        assert not loader.bad_files


def test_a_helper_that_is_stuck_holds_up_no_batch(
    paths: list[Path], two_kinds: None, eager: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = paths * 8
    expected = batches(VideoLoader(many, device="cpu", **OPTIONS))
    held, entered = threading.Event(), []
    decode = DecodeProcess.decode

    def stuck(self: DecodeProcess, index: indices.VideoIndex, plan: Any, *more: Any) -> Planes:
        if index.info.path.endswith(("h264.mp4", "vp9.webm")) and len(entered) < 2:
            entered.append(index.info.path)
            held.wait(60)
        return decode(self, index, plan, *more)

    monkeypatch.setattr(DecodeProcess, "decode", stuck)
    monkeypatch.setattr("gpupipe.data.pipeline._GRACE_SECONDS", 0.1)
    options = {**AHEAD, "decode": {"cpu_workers": 2, "limit_seconds": 3.0}}
    try:
        with VideoLoader(many, **options) as loader:
            for _ in range(_EPOCHS):
                loader.set_epoch(0)
                found = [batch.video for batch in loader]
                assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
                if entered:
                    break
            assert entered
            assert loader.stats()["threads_given_up"] == len(entered)
            assert not loader.bad_files
    finally:
        held.set()


def test_processes_start_before_they_have_a_clip_and_as_few_as_help(paths: list[Path], two_kinds: None) -> None:
    only = [path for path in paths if path.name in ("h264.mp4", "vp9.webm")]
    with VideoLoader(only * 4, **AHEAD) as loader:
        assert len(list(loader)) == 6
        assert not helpers(), "in so short an epoch nobody helps"


@pytest.mark.skipif(not hasattr(os, "setpriority"), reason="this system has no priorities")
def test_processes_yield_to_the_users_own_work(clips: dict[str, Path]) -> None:
    process = DecodeProcess(nice=10)
    try:
        process.get_ready()
        (child,) = helpers()
        assert process.ready
        assert child.nice() == min(19, psutil.Process().nice() + 10)
        assert os.getpgid(child.pid) != os.getpgid(0), "Ctrl-C is for this process alone"
        assert os.getsid(child.pid) == os.getsid(0), "in a session of its own, priorities would mean nothing against others"
        child.kill()
        child.wait(60)
        assert not process.ready
        process.get_ready()
        assert process.ready
        index = indices.load(str(clips["h264"]))
        plan = make_plan(index, [5])
        assert same(process.decode(index, plan), cpu.decode(index, plan))
    finally:
        process.close()


@pytest.mark.parametrize("policy", ["substitute", "skip", "raise"])
def test_bad_files_between_two_kinds_of_engines(policy: str, paths: list[Path], tmp_path: Path, two_kinds: None) -> None:
    bad = tmp_path / "bad.mp4"
    bad.write_bytes(b"no video")
    options = {**OPTIONS, "on_bad_file": policy}
    with VideoLoader([bad, *paths, bad], device="cpu", **options) as loader:
        if policy == "raise":
            with pytest.raises(OpenError, match=r"bad\.mp4"):
                list(loader)
        else:
            clips = sum(len(batch.clips) for batch in loader)
            assert clips == (20 if policy == "substitute" else 18)
            assert list(loader.bad_files) == [str(bad)]


def test_a_clip_that_comes_back_late_does_not_hang_a_full_pipeline(
    paths: list[Path], two_kinds: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All batches are begun, the oldest waits for one clip, and that one turns out to be for software."""
    run = FakeHardware.run

    def slow(self: FakeHardware, decoder: Any, index: indices.VideoIndex, plan: Any, stop: Any = None, **how: Any) -> Planes:
        if decoder == "nvdec" and index.info.width % 16:
            time.sleep(1.0)
        return run(self, decoder, index, plan, stop, **how)

    monkeypatch.setattr(FakeHardware, "run", slow)
    options = {**OPTIONS, "batch": 2, "jitter": {"depth": 2}, "shuffle": False}
    with VideoLoader([paths[3], *paths * 3], device="cpu", **options) as loader:
        assert sum(len(batch.clips) for batch in loader) == 54


def test_kept_clips_go_to_whoever_comes(paths: list[Path], expected: list[torch.Tensor], two_kinds: None) -> None:
    """What only software decodes needs no helper any more once it is kept: the hardware threads take it, and decode nothing."""
    cache = {"clips": "device", "clips_gib": 0.2}
    with VideoLoader(paths, **OPTIONS, device="cpu", cache=cache) as loader:
        for epoch in range(2):
            loader.set_epoch(0)
            before = loader.stats().get("packets_decoded", 0)
            assert all(torch.equal(a, b) for a, b in zip([batch.video for batch in loader], expected, strict=True)), epoch
        stats = loader.stats()
        assert stats["packets_decoded"] == before
        assert stats["cache_hits"] >= 16


def test_too_many_open_files_are_no_fault_of_the_videos(paths: list[Path], expected: list[torch.Tensor]) -> None:
    """Descriptors beyond 1023, of which select() knows nothing."""
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1050)]
    try:
        found = batches(VideoLoader(paths, device="cpu", decode={"cpu_workers": 2}, **OPTIONS))
    finally:
        for file in held:
            os.close(file)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_process_that_cannot_be_started_is_no_fault_of_the_videos(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpupipe.data.child.sys.executable", "/no/such/python")
    with VideoLoader(paths, device="cpu", decode={"cpu_workers": 2}, **OPTIONS) as loader:
        with pytest.raises(DeviceError, match="cannot be started"):
            list(loader)
        assert not loader.bad_files


def _start_by(monkeypatch: pytest.MonkeyPatch, codes: list[str]) -> None:
    """Makes the first processes run other code, one each."""
    original = subprocess.Popen

    def begin(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return original([command[0], "-c", codes.pop(0)] if codes else command, **options)

    monkeypatch.setattr("gpupipe.data.child.subprocess.Popen", begin)


SHOT = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


def test_a_process_that_is_killed_while_it_starts_is_started_again(
    paths: list[Path], expected: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    _start_by(monkeypatch, [SHOT])
    found = batches(VideoLoader(paths, device="cpu", decode={"cpu_workers": 1}, **OPTIONS))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (SHOT, "twice it was ended by signal 9, as for want of memory, before it was ready"),
        ("import no_such_module", "exit status 1 before it was ready: ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_a_start_that_fails_twice_says_why(
    clips: dict[str, Path], process: DecodeProcess, monkeypatch: pytest.MonkeyPatch, code: str, why: str
) -> None:
    _start_by(monkeypatch, [code, code])
    with pytest.raises(DeviceError, match=why):
        process.get_ready()
    process.get_ready()
    assert process.ready


def test_leaving_early_ends_helpers_amid_their_work(paths: list[Path], two_kinds: None) -> None:
    for round_number in range(6):
        loader = VideoLoader(paths * 4, device="cpu", **OPTIONS)
        for number, _ in enumerate(loader):
            if number == round_number:
                break
        begin = time.monotonic()
        loader.close()
        assert time.monotonic() - begin < 10
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("gpupipe-clips")]
    assert not helpers()


class StuckHardware(DecodeEngine):
    """Stays in one video as in native code: it hears of nothing."""

    held = threading.Event()
    stuck_in: tuple[str, ...] = ()
    entered: list[str]

    def run(self, decoder: Any, index: indices.VideoIndex, plan: Any, stop: Any = None, **how: Any) -> Planes:
        name = Path(index.info.path).name
        if name in self.stuck_in:
            self.entered.append(name)
            self.held.wait(30)
        return super().run("cpu", index, plan, stop, **how)


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[StuckHardware]]:
    def engines(config: Any, device: Any, telemetry: Any) -> tuple[list[DecodeEngine], list[DecodeEngine]]:
        shared: dict[str, Any] = {"mode": "auto", "keep": 1, "fallbacks": Fallbacks(), "telemetry": telemetry}
        return [StuckHardware(device, **shared) for _ in range(2)], []

    monkeypatch.setattr(loader_room, "engines_of", engines)
    monkeypatch.setattr("gpupipe.data.pipeline._GRACE_SECONDS", 0.1)
    monkeypatch.setattr(StuckHardware, "held", threading.Event())
    monkeypatch.setattr(StuckHardware, "entered", [], raising=False)
    yield StuckHardware
    StuckHardware.held.set()


LIMITED: dict[str, Any] = {**OPTIONS, "device": "cpu", "decode": {"limit_seconds": 0.5}, "batch": 3, "shuffle": False}


@pytest.mark.parametrize("policy", ["substitute", "skip", "raise"])
def test_a_thread_that_is_stuck_is_given_up_and_replaced(
    policy: str, clips: dict[str, Path], tmp_path: Path, stuck: type[StuckHardware], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StuckHardware, "stuck_in", ("one.mp4", "two.mp4"))
    bad = [str(shutil.copy(clips["h264"], tmp_path / name)) for name in ("one.mp4", "two.mp4")]
    paths = [bad[0], clips["h264"], clips["vp9"], clips["hevc"], bad[1], clips["mpeg4"], *[clips["h264"]] * 6]
    with VideoLoader(paths, **LIMITED, on_bad_file=policy) as loader:  # both threads are stuck before the epoch is through
        begin = time.monotonic()
        if policy == "raise":
            with pytest.raises(DecodeError, match=r"one\.mp4: a decoder was stuck in it for longer than 0.5 s"):
                list(loader)
        else:
            batches = list(loader)
            names = [Path(clip.path).name for batch in batches for clip in batch.clips]
            assert len(names) == (12 if policy == "substitute" else 10)
            assert not {"one.mp4", "two.mp4"} & set(names)
            assert sorted(loader.bad_files) == bad
            assert loader.stats()["threads_given_up"] == len(stuck.entered) >= 2
            before = [batch.video.clone() for batch in batches]
            stuck.held.set()  # they wake up, and must leave the batches alone
            time.sleep(0.3)
            assert all(torch.equal(a, batch.video) for a, batch in zip(before, batches, strict=True))
        assert time.monotonic() - begin < 20
    stuck.held.set()


def test_work_that_hears_is_ended_by_the_limit_without_giving_up_its_thread(
    clips: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = str(shutil.copy(clips["h264"], tmp_path / "slow.mp4"))
    original = cpu.decoded

    def crawl(context: Any, packet: Any, faulty: Any = None) -> Any:
        if threading.current_thread().name.startswith("gpupipe-clips") and crawl_in[0]:
            time.sleep(0.2)
        return original(context, packet, faulty)

    crawl_in = [False]
    visits: list[str] = []
    run = DecodeEngine.run

    def watched(self: DecodeEngine, decoder: Any, index: indices.VideoIndex, plan: Any, stop: Any, **how: Any) -> Planes:
        crawl_in[0] = index.info.path == slow
        visits.append(index.info.path)
        return run(self, decoder, index, plan, stop, **how)

    monkeypatch.setattr(cpu, "decoded", crawl)
    monkeypatch.setattr(DecodeEngine, "run", watched)
    options = {**LIMITED, "decode": {"limit_seconds": 0.5, "threads": 1}}
    with VideoLoader([slow, clips["vp9"], clips["hevc"]], **options) as loader:
        (batch,) = list(loader)
        assert slow not in batch.paths
        assert f"{slow}: a visit to it took longer than 0.5 s" in loader.bad_files[slow]
        assert "threads_given_up" not in loader.stats()
        assert slow not in {path for batch in loader for path in batch.paths}
    assert visits.count(slow) == 1, "a later visit would take as long again"


def test_a_loader_that_is_dropped_leaves_no_process(paths: list[Path]) -> None:
    """Without a garbage collection, which may be long in coming."""
    gc.collect()
    gc.disable()
    try:
        for batch in VideoLoader(paths * 2, device="cpu", **{**OPTIONS, "decode": {"cpu_workers": 2}}):
            assert len(batch.clips)
            assert helpers()
            break
        del batch
        end = time.monotonic() + 5
        while helpers() and time.monotonic() < end:
            time.sleep(0.02)
        assert not [child for child in helpers() if child.status() != psutil.STATUS_ZOMBIE]
    finally:
        gc.enable()


def test_a_process_that_somebody_ends_is_replaced_and_no_file_is_blamed(paths: list[Path]) -> None:
    options = {**OPTIONS, "decode": {"cpu_workers": 1}}
    expected = batches(VideoLoader(paths * 6, device="cpu", **options))
    with VideoLoader(paths * 6, device="cpu", **options) as loader:
        found = []
        for number, batch in enumerate(loader):
            found.append(batch.video)
            if number in (0, 2):
                for child in helpers():
                    child.kill()
        assert not loader.bad_files
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_no_room_for_shared_frames_is_no_fault_of_a_video(paths: list[Path]) -> None:
    code = (
        "import resource, sys; from gpupipe import VideoLoader\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
        "loader = VideoLoader(sys.argv[1:], device='cpu', batch=1, clip={'frames': 2}, decode={'cpu_workers': 1})\n"
        "next(iter(loader))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, *map(str, paths)], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 1
    assert "DeviceError" in run.stderr
    assert "no room for" in run.stderr

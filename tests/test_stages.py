"""What the stages of a loader do: threads' time is divided without rest, and the stage that limits is named."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gpupipe import VideoLoader
from gpupipe.data import index as indices
from gpupipe.data import loader as loader_room
from gpupipe.data import pipeline
from gpupipe.data.assembly import Assembly
from gpupipe.data.bytes import LocalFile
from gpupipe.data.decode import cpu
from gpupipe.data.plan import make_plan
from gpupipe.data.stages import CREW, Consumer, StageFigures, stages, traffic
from gpupipe.data.transform import ClipTransform
from gpupipe.data.verdict import Limit, limit
from gpupipe.telemetry import Telemetry

SMALL: dict[str, Any] = {
    "clip": {"frames": 2},
    "transform": {"size": 16, "dtype": "float32"},
    "decode": {"threads": 2},
    "device": "cpu",
    "batch": 1,
}


class Time:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


# Threads' time


def test_a_thread_is_at_one_thing_at_a_time() -> None:
    """Nested spans take their time out of the one around them, and give the thread back to it."""
    now = Time()
    telemetry = Telemetry(now=now)
    clock = telemetry.clock("plan", own=True)
    now.now = 1.0
    with telemetry.span("decode"):
        now.now = 3.0
        with telemetry.span("read"):
            now.now = 7.0
        now.now = 15.0
    now.now = 31.0
    assert telemetry.spent() == {"plan": 1 + 16, "decode": 2 + 8, "read": 4}
    assert telemetry.snapshot()["decode_seconds"] == 14, "a duration has all that is nested in it"
    clock.end()
    now.now = 99.0
    assert telemetry.spent() == {"plan": 17, "decode": 10, "read": 4}, "an ended clock stands"


def test_what_goes_on_counts_while_it_does() -> None:
    """A decode that is stuck shows before it comes to an end, or a look at a hanging loader would show nothing."""
    now = Time()
    telemetry = Telemetry(now=now)
    telemetry.clock("plan", own=True)
    with telemetry.at("decode"):
        now.now = 30.0
        assert telemetry.spent()["decode"] == 30
    assert "decode_seconds" not in telemetry.snapshot(), "at() keeps no duration"


def test_a_clock_that_another_thread_ends_counts_once() -> None:
    """As for a thread that is stuck in native code, given up, and comes back later."""
    now = Time()
    telemetry = Telemetry(now=now)
    clock = telemetry.clock("plan", own=True)
    with telemetry.at("decode"):
        now.now = 2.0
        clock.end()
        now.now = 5.0
        assert telemetry.spent() == {"plan": 0, "decode": 2}
        now.now = 9.0
    assert telemetry.spent() == {"plan": 0, "decode": 2}


def test_a_span_gives_the_thread_back_when_its_block_fails() -> None:
    now = Time()
    telemetry = Telemetry(now=now)
    clock = telemetry.clock("plan", own=True)
    with pytest.raises(ZeroDivisionError), telemetry.span("decode"):
        raise ZeroDivisionError
    assert clock.at == "plan"


def test_clocks_are_each_threads_own_and_none_is_kept() -> None:
    telemetry = Telemetry()

    def work() -> None:
        clock = telemetry.clock("plan", own=True)
        assert telemetry.own_clock is clock
        clock.end()

    for _ in range(50):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert telemetry.own_clock is None
    telemetry.spent()
    assert telemetry._clocks == [], "a thousand epochs would keep as many clocks as they had threads"


def test_no_time_is_lost_or_counted_twice() -> None:
    """Threads turn their clocks while others look at them and end them."""
    telemetry = Telemetry()
    lives: list[float] = []

    def work() -> None:
        clock = telemetry.clock("plan", own=True)
        born = clock.since
        for _ in range(300):
            with telemetry.span("decode"), telemetry.at("read"):
                pass
        clock.end()
        with telemetry.span("decode"):  # as a thread that was given up may
            pass
        assert clock.ended is not None
        lives.append(clock.ended - born)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    totals = []
    while any(thread.is_alive() for thread in threads):
        totals.append(sum(telemetry.spent().values()))
        time.sleep(0.001)
    for thread in threads:
        thread.join()
    assert sum(telemetry.spent().values()) == pytest.approx(sum(lives))
    assert totals == sorted(totals), "time only grows"


def test_a_hand_over_is_taken_out_of_the_loops_own_time() -> None:
    """The loop's thread may be any; its clock is named."""
    now = Time()
    telemetry = Telemetry(now=now)
    clock = telemetry.clock("step")
    with telemetry.span("hand_over", clock):
        now.now += 2
    now.now += 3
    assert telemetry.spent() == {"hand_over": 2, "step": 3}


def test_the_loops_time_is_divided() -> None:
    now = Time()
    telemetry = Telemetry(now=now)
    consumer = Consumer(telemetry)
    consumer.end()  # before the first batch: there is nothing to end
    for waited, stepped in ((5.0, 1.0), (2.0, 3.0)):
        consumer.asks()
        now.now += waited
        consumer.gets(ready_since=now.now - 0.5)
        now.now += stepped
    consumer.asks()
    consumer.gets(None)
    now.now += 100
    assert telemetry.spent() == {"start": 5, "wait": 2, "step": 4}
    assert telemetry.snapshot()["step_p50_seconds"] == 3
    assert telemetry.snapshot()["ready_seconds"] == 1


# A running loader


def crew_seconds(found: dict[str, StageFigures]) -> list[float]:
    rows = (found[name] for name in CREW if name in found)
    return [row["busy_seconds"] + row["input_seconds"] + row["output_seconds"] for row in rows]


def test_figures_of_a_loader(clips: dict[str, Path]) -> None:
    """Every stage counts its own items and bytes, and all divide the same threads' time."""
    videos = [str(clips["h264"])] * 6
    with VideoLoader(videos, **SMALL | {"batch": 2}) as loader:
        before = loader.stats()
        batches = list(loader)
        after = loader.stats()
    assert before["limit"] == "nothing has run yet"
    found = after["stages"]
    assert list(found) == [name for name in CREW if name != "custom"] + ["buffer", "consumer"]
    assert {name: row["items"] for name, row in found.items() if name != "read"} == {
        "index": 6, "plan": 6, "decode": 6, "transform": 6, "assemble": 3, "buffer": 3, "consumer": 3,
    }  # fmt: skip
    assert found["read"]["items"] >= 6
    seconds = crew_seconds(found)
    assert seconds == pytest.approx([seconds[0]] * len(seconds))
    assert 0 < seconds[0] <= found["decode"]["threads"] * found["decode"]["seconds"] * 1.001
    assert found["decode"]["busy_seconds"] > 0
    assert found["decode"]["p50_seconds"] == after["decode_p50_seconds"]
    loop = found["consumer"]
    assert loop["busy_seconds"] + loop["input_seconds"] <= loop["seconds"] * 1.001
    assert found["assemble"]["bytes"] == sum(tensor.nbytes for batch in batches for tensor in batch.values())
    assert found["decode"]["bytes"] == 6 * 2 * 320 * 240 * 3 // 2
    assert 0 < found["read"]["bytes"] <= 6 * Path(videos[0]).stat().st_size
    assert (after["to_device_bytes"], after["device_written_bytes"]) == (0, 0), "there is no bus on the CPU"
    with VideoLoader(videos, **SMALL) as loader:
        list(loader)
        later = loader.stats()
        assert later["stages"]["consumer"]["seconds"] == loader.stats()["stages"]["consumer"]["seconds"], "no epoch, no time"


def test_queues_show_what_waits(clips: dict[str, Path]) -> None:
    with VideoLoader([str(clips["h264"])] * 8, **SMALL | {"jitter": {"depth": 3}}) as loader:
        batches = iter(loader)
        next(batches)
        deadline = time.monotonic() + 20
        while loader.stats()["stages"]["buffer"]["queue"] < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        found = loader.stats()["stages"]
        assert (found["buffer"]["queue"], found["assemble"]["queue"]) == (3, 0)
        assert found["index"]["queue"] is None
        held = loader.stats()["stages"]["assemble"]["output_seconds"]
        time.sleep(0.05)
        assert loader.stats()["stages"]["assemble"]["output_seconds"] > held, "threads without room, seen while they wait"


def test_failures_are_those_of_their_stage(clips: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty.mp4").touch()
    videos = [str(tmp_path / "empty.mp4"), *[str(clips["h264"])] * 3]
    with VideoLoader(videos, **SMALL, shuffle=False) as loader:
        list(loader)
        found = loader.stats()["stages"]
    assert {name: row["failures"] for name, row in found.items() if row["failures"]} == {"index": 1}

    def fail(*arguments: Any) -> Any:
        raise cpu.DecodeError("no")

    with VideoLoader(videos[1:], **SMALL, on_bad_file="skip") as loader:
        monkeypatch.setattr(cpu, "decode", fail)
        with pytest.raises(cpu.DecodeError, match="all 3 clips"):
            list(loader)
        assert loader.stats()["stages"]["decode"]["failures"] == 3


def test_telemetry_is_asked_little(clips: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A call takes a few microseconds, a clip of 256p about 20 ms of CPU time: 40 calls are a half percent of it."""
    calls = itertools.count()
    for name in ("count", "observe", "turn"):
        real = getattr(Telemetry, name)

        def counted(*arguments: Any, real: Callable[..., Any] = real) -> Any:
            next(calls)
            return real(*arguments)

        monkeypatch.setattr(Telemetry, name, counted)
    with VideoLoader([str(clips["h264"])] * 64, **SMALL | {"batch": 8}) as loader:
        before = next(calls)
        list(loader)
    assert (next(calls) - before) / 64 < 40


def test_traffic_is_what_was_uploaded_and_written() -> None:
    counts = {"bytes_uploaded": 5, "bytes_planes": 70, "bytes_batches": 900}
    assert traffic(counts, torch.device("cuda", 0)) == {"to_device_bytes": 5, "device_written_bytes": 970}
    assert traffic({}, torch.device("cuda", 0)) == {"to_device_bytes": 0, "device_written_bytes": 0}
    assert traffic(counts, torch.device("cpu")) == {"to_device_bytes": 0, "device_written_bytes": 0}


def test_bytes_of_a_plan_are_those_of_its_packets(clips: dict[str, Path]) -> None:
    """NVDEC is sent these, no more: packets that are left out are not in them."""
    index = indices.load(str(clips["h264"]))
    plan = make_plan(index, [3, 40])
    assert plan.packet_bytes(index) == sum(int(index.size[packet]) for run in plan.passes for packet in run.packets)
    assert 0 < plan.packet_bytes(index) < int(index.size.sum())


# Who limits


class Slowed:
    """Loaders whose time is made up: it goes on only in stages that are slowed, while the loop waits for a batch.

    One thread makes one batch at a time, so that the outcome does not depend on how busy the machine is. No clip is made.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.time = Time()
        self.asked = threading.Event()
        """Set while the loop waits for a batch."""
        self.busy = threading.Event()
        """Set while it is at one."""
        self.slowed = 0
        """How often a stage was slowed."""
        self.more: dict[str, Any] = {}
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(loader_room, "Telemetry", lambda marker: Telemetry(marker, self.time))
        asks, gets = Consumer.asks, Consumer.gets

        def ask(consumer: Consumer) -> None:
            self.busy.clear()
            asks(consumer)
            self.asked.set()

        def get(consumer: Consumer, since: float | None) -> None:
            self.asked.clear()
            gets(consumer, since)
            self.busy.set()

        monkeypatch.setattr(Consumer, "asks", ask)
        monkeypatch.setattr(Consumer, "gets", get)
        monkeypatch.setattr(ClipTransform, "apply_batch", lambda *_: None)

    def slow(self, name: str, seconds: float = 1.0, *, beside: bool = False) -> None:
        """Slows a stage at each clip; ``beside`` the loop's work, but for the first one."""
        if name == "custom":
            self.more["after"] = lambda clip: self.takes(seconds)
            return
        place, function = PLACES[name]
        real = getattr(place, function)

        def slower(*arguments: Any, **more: Any) -> Any:
            self.takes(seconds, self.busy if beside and self.slowed else self.asked)
            self.slowed += 1
            return real(*arguments, **more)

        self._monkeypatch.setattr(place, function, slower)

    def takes(self, seconds: float, when: threading.Event | None = None) -> None:
        assert (when or self.asked).wait(60)
        self.time.now += seconds

    def loader(self, videos: list[str], **more: Any) -> VideoLoader:
        alone = {"decode": {"threads": 1}, "jitter": {"depth": 1}}
        return VideoLoader(videos, **SMALL | alone | self.more | more)

    def limit(self, videos: list[str]) -> Limit:
        with self.loader(videos) as loader:
            list(loader)
            found = loader.stats()
        limiting = limit(found["stages"])
        assert found["limit"] == limiting.text
        return limiting


PLACES: dict[str, tuple[Any, str]] = {
    "index": (pipeline.indices, "load"),
    "wait": (pipeline.IndexAhead, "wait_for"),
    "plan": (pipeline, "prepare"),
    "read": (LocalFile, "read_into"),
    "decode": (cpu, "decode"),
    "transform": (ClipTransform, "apply_batch"),
    "assemble": (Assembly, "finish"),
}
DATA = ("index", "plan", "read", "decode", "transform", "custom", "assemble")


@pytest.fixture
def slowed(monkeypatch: pytest.MonkeyPatch) -> Slowed:
    return Slowed(monkeypatch)


@pytest.fixture(scope="module")
def videos(clips: dict[str, Path]) -> list[str]:
    return [str(clips["h264"])] * 4


@pytest.mark.parametrize("name", DATA)
def test_a_slow_stage_is_named(name: str, slowed: Slowed, videos: list[str]) -> None:
    slowed.slow(name)
    limiting = slowed.limit(videos)
    assert limiting.stages == (name,)
    assert limiting.text.startswith(
        f"{name} limits: 1 thread spends 100 % of its time there, the training loop waits 100 % of the time"
    )
    assert (limiting.waiting, limiting.room) == (1, 0)


@pytest.mark.parametrize("pair", list(itertools.combinations(DATA, 2)), ids="+".join)
def test_two_slow_stages_are_both_named(pair: tuple[str, str], slowed: Slowed, videos: list[str]) -> None:
    for name in pair:
        slowed.slow(name)
    limiting = slowed.limit(videos)
    assert limiting.stages == pair
    assert limiting.text.startswith(f"{pair[0]} and {pair[1]} limit together: 1 thread spends 50 % and 50 % of its time there")


@pytest.mark.parametrize("pair", [("decode", "transform"), ("transform", "decode"), ("custom", "index")], ids="+".join)
def test_the_slower_of_two_is_named(pair: tuple[str, str], slowed: Slowed, videos: list[str]) -> None:
    slowed.slow(pair[0], 3.0)
    slowed.slow(pair[1], 1.0)
    assert slowed.limit(videos).stages == pair[:1]


def test_an_index_that_others_make_counts_for_the_index(slowed: Slowed, videos: list[str]) -> None:
    """As where processes index ahead of NVDEC: threads wait for them, which is no work of any stage."""
    slowed.slow("wait")
    with slowed.loader(videos) as loader:
        list(loader)
        found = loader.stats()["stages"]
    assert (found["index"]["busy_seconds"], found["index"]["input_seconds"]) == (0, len(videos))
    assert limit(found).stages == ("index",)


def eventually(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def is_at(loader: VideoLoader, *names: str) -> bool:
    """Whether one of a loader's threads is at one of these, or has ended."""
    return any(clock.at in names or clock.ended is not None for clock in loader._telemetry._clocks)


@pytest.mark.parametrize(
    ("decode", "step", "named"), [(0.0, 1.0, "consumer"), (1.0, 3.0, "consumer"), (9.0, 1.0, "decode"), (1.0, 0.0, "decode")]
)
def test_a_slow_loop_and_a_slow_decode(decode: float, step: float, named: str, slowed: Slowed, videos: list[str]) -> None:
    """The two are at work at the same time: in each of the loop's steps a clip is decoded, as far as it goes."""
    slowed.slow("decode", decode if named == "consumer" else decode - step, beside=named == "consumer")
    with slowed.loader(videos * 3) as loader:
        for batch in loader:
            if named == "consumer" and batch.index < len(loader) - 1:
                eventually(lambda ahead=batch.index + 2: slowed.slowed == ahead and is_at(loader, "room", "idle"))
                slowed.time.now += step - decode
            else:
                slowed.time.now += step
        limiting = limit(loader.stats()["stages"])
    assert limiting.stages == (named,), limiting
    assert limiting.text.startswith("the training loop limits: it is busy 100 %" if named == "consumer" else "decode limits: ")


def test_a_slow_video_that_holds_up_others_is_told_from_a_slow_stage(
    slowed: Slowed, videos: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One clip in many is slow, and the buffer is small: the other threads stand still behind it, and so does the loop."""
    real, others, here = cpu.decode, {"threads": 4}, threading.Lock()

    def decode(*arguments: Any) -> Any:
        if here.acquire(blocking=False):  # the first clip of all from here on
            assert slowed.asked.wait(60)
            eventually(lambda: [clock.at for clock in loader._telemetry._clocks].count("room") == 3)
            slowed.time.now += 100
        return real(*arguments)

    with slowed.loader(videos * 5, decode=others, jitter={"depth": 4}) as loader:
        batches = iter(loader)
        next(batches)  # before it the loop's waits are those of the start
        eventually(lambda: [clock.at for clock in loader._telemetry._clocks].count("room") == 4)
        monkeypatch.setattr(cpu, "decode", decode)
        before = loader.stats()["stages"]
        list(batches)
        limiting = limit(loader.stats()["stages"], before)
    assert limiting.stages == (), limiting
    assert limiting.text.startswith("batches come unevenly")
    assert "jitter.depth" in limiting.help


def made_up(
    *, seconds: float = 100.0, wait: float = 0.0, start: float = 0.0, room: float = 0.0, **busy: float
) -> dict[str, Any]:
    """The figures of a run with two threads, of which ``busy`` tells the stages' thread-seconds."""
    now = Time()
    telemetry = Telemetry(now=now)
    for name, spent in (busy | {"room": room, "start": start, "wait": wait, "step": seconds - wait - start}).items():
        clock = telemetry.clock(name)
        now.now += spent
        clock.end()
    clock = telemetry.clock("running")
    now.now += seconds
    clock.end()
    return stages(telemetry, telemetry.snapshot(), {}, custom=False)


@pytest.mark.parametrize(
    ("figures", "named", "words"),
    [
        ({"wait": 95, "decode": 194, "transform": 6}, ("decode",), "decode limits: 2 threads spend 97 % of their time there"),
        ({"wait": 95, "decode": 110, "transform": 80, "plan": 10}, ("decode", "transform"), "decode and transform limit"),
        ({"wait": 95, "decode": 150, "transform": 50}, ("decode",), "waits 95 % of the time"),
        ({"wait": 95, "index_wait": 150, "decode": 50}, ("index",), "index limits"),
        ({"wait": 6, "room": 120, "decode": 80}, ("consumer",), "is busy 94 % of the time, 2 threads wait for room 60 % of it"),
        ({"wait": 5, "room": 10, "decode": 190}, ("consumer", "decode"), "keep pace"),
        ({"wait": 40, "room": 80, "decode": 120}, (), "unevenly"),
        ({"wait": 95, "room": 60, "decode": 140}, ("decode",), "30 % of it threads stand still behind slow videos"),
        ({"wait": 0, "start": 60, "room": 80, "decode": 120}, ("consumer",), "60 % of the time went into waits for the first"),
    ],
)  # fmt: skip
def test_the_rule(figures: dict[str, float], named: tuple[str, ...], words: str) -> None:
    found = limit(made_up(**figures))
    assert found.stages == named, found
    assert words in found.text


@pytest.mark.parametrize(
    ("figures", "advised", "said"),
    [
        ({"wait": 1, "room": 150, "decode": 50}, False, True),
        ({"wait": 8, "room": 150, "decode": 50}, False, False),
        ({"wait": 1, "room": 10, "decode": 190}, False, True),
        ({"wait": 5, "room": 10, "decode": 190}, True, False),
        ({"wait": 95, "decode": 150}, True, False),
    ],
)
def test_nothing_is_advised_where_nothing_is_to_be_gained(figures: dict[str, float], advised: bool, said: bool) -> None:
    """Else users tune stages that cost them nothing."""
    found = limit(made_up(**figures))
    assert bool(found.help) == advised, found
    assert ("faster data would gain nothing" in found.text) == said


def test_a_limit_between_two_looks_leaves_out_what_was_before() -> None:
    early = made_up(wait=95, decode=200)
    late = made_up(seconds=200, wait=95, decode=240, room=160)
    assert limit(late, early).stages == ("consumer",)
    assert limit(early, early).text == "nothing has run yet"

"""The schedule: what only software can decode waits for it, helpers help where they are in time, and all comes to an end."""

from __future__ import annotations

import itertools
import math
import random
import threading
import time
from collections.abc import Callable, Generator
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import pytest
from simulated import Clip, Machine

from gpupipe.config import JitterConfig
from gpupipe.data.decode import Decoder, Helping, Schedule
from gpupipe.data.decode import helping as helping_room
from gpupipe.data.depth import DepthControl
from gpupipe.data.jitter import Closed, JitterBuffer
from gpupipe.data.tasks import further_batches, most_bytes
from gpupipe.telemetry import Telemetry


def tasks(clips: list[Clip]) -> Generator[Clip | None]:
    yield from clips


def schedule(clips: list[Clip], *, hardware: int = 1, helping: Helping | None = None) -> Schedule[Clip, Clip]:
    return Schedule(tasks(clips), lambda clip: clip, hardware=hardware, helping=helping, window=32)


def drain(one: Schedule[Clip, Clip], decoder: Decoder, seconds: float = 0.0) -> list[int]:
    taken = []
    while (clip := one.take(decoder)) is not None:
        taken.append(clip.number)
        one.done(clip, decoder, seconds)
    return taken


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_clips_come_in_order_to_one_engine() -> None:
    assert drain(schedule([Clip(k) for k in range(5)]), "nvdec") == [0, 1, 2, 3, 4]
    mixed = [Clip(k, "cpu" if k % 2 else "nvdec") for k in range(5)]
    assert drain(schedule(mixed, hardware=0), "nvdec") == [0, 1, 2, 3, 4], "without hardware there is one line"


def test_software_clips_hold_up_no_hardware() -> None:
    one = schedule([Clip(0, "cpu"), Clip(1), Clip(2, "cpu"), Clip(3)])
    first, second = one.take("nvdec"), one.take("nvdec")
    assert (first, second) == (Clip(1), Clip(3))
    assert one.take("cpu") == Clip(0, "cpu")
    assert one.take("cpu") == Clip(2, "cpu")
    for clip in (first, second, Clip(0, "cpu"), Clip(2, "cpu")):
        assert clip is not None
        one.done(clip, clip.decoder, 0.1)
    assert one.take("nvdec") is one.take("cpu") is None


def test_the_end_waits_for_what_may_still_be_passed_on() -> None:
    one = schedule([Clip(0)])
    clip = one.take("nvdec")
    assert clip is not None
    got: list[Clip | None] = []
    thread = threading.Thread(target=lambda: got.append(one.take("cpu")))
    thread.start()
    time.sleep(0.05)
    assert not got, "the clip at work may turn out to be one for software"
    one.pass_on(Clip(0, "cpu"))
    thread.join(5)
    assert got == [Clip(0, "cpu")]
    one.done(Clip(0, "cpu"), "cpu", 0.1)
    assert one.take("nvdec") is None


def test_room_for_a_few_wakes_no_crowd() -> None:
    """Each thread that wakes takes the interpreter lock from the training loop, which has just taken a batch."""
    room: list[int] = []
    waits: list[str] = []
    turns = iter(range(100))

    def few() -> Generator[Clip | None]:
        while True:
            yield Clip(next(turns)) if room and room.pop() else None

    def waited(why: str) -> Any:
        waits.append(why)
        return nullcontext()

    one: Schedule[Clip, Clip] = Schedule(few(), lambda clip: clip, hardware=0, window=32, waits=waited)
    taken: list[Clip | None] = []

    def work() -> None:
        with suppress(Closed):
            while True:
                taken.append(one.take("nvdec"))

    threads = [threading.Thread(target=work) for _ in range(12)]
    for thread in threads:
        thread.start()
    until(lambda: len(waits) >= 12)
    try:
        for turn in range(1, 4):
            before = len(waits)
            room += [1, 1, 1]
            one.room()
            until(lambda goal=3 * turn: len(taken) == goal)  # type: ignore[misc]
            time.sleep(0.05)
            assert len(waits) - before <= 5, "three that found a clip, and came back, and one that asked in vain"
    finally:
        one.close()
        for thread in threads:
            thread.join(5)
    assert {clip.number for clip in taken if clip is not None} == set(range(9))


def test_clips_that_need_no_decoding_are_for_all_and_teach_nothing() -> None:
    clips = [Clip(0, "cpu", decoded=True), Clip(1, "cpu"), Clip(2, decoded=True)]
    helping = Helping(1)
    one = schedule(clips, helping=helping)
    kept = one.take("nvdec")
    assert kept is not None
    assert kept.number == 0, "whatever its decoder"
    one.done(kept, "nvdec", 0.001)
    software = [one.take("nvdec"), one.take("cpu")]
    assert [clip.number for clip in software if clip is not None] == [2, 1]
    for clip, decoder in zip(software, ("nvdec", "cpu"), strict=True):
        assert clip is not None
        one.done(clip, decoder, 1.0)  # type: ignore[arg-type]
    assert helping.distance("h264", 3.0) == 2 * 3.0, "of the one that was decoded"


def test_a_task_without_a_clip_and_an_error_in_preparing_do_not_hang_the_others() -> None:
    def prepare(clip: Clip) -> Clip | None:
        if clip.number == 2:
            raise ValueError("no")
        return clip if clip.number != 1 else None

    one: Schedule[Clip, Clip] = Schedule(tasks([Clip(k) for k in range(4)]), prepare, hardware=1, window=4)
    first = one.take("nvdec")
    assert first == Clip(0)
    with pytest.raises(ValueError, match="no"):
        one.take("nvdec")
    assert one.take("nvdec") == Clip(3)
    one.done(Clip(0), "nvdec")
    one.done(Clip(3), "nvdec")
    assert one.take("nvdec") is one.take("cpu") is None


def test_closing_wakes_all() -> None:
    one = schedule([Clip(0)])
    one.take("nvdec")
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            one.take("cpu")
        except Closed as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    one.close()
    thread.join(5)
    assert len(raised) == 1
    with pytest.raises(Closed):
        one.take("nvdec")


def test_it_may_be_closed_by_a_thread_that_holds_its_lock() -> None:
    """Garbage collection may end a pipeline anywhere."""
    one = schedule([Clip(0)])
    with one._lock:
        one.close()
    with pytest.raises(Closed):
        one.take("nvdec")


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Helpers that are let in after a few clips."""
    for name, value in {"_FEWEST": 2, "_SETTLE": 1, "_WINDOW": 4, "_MARGIN": 0.5, "_WORTH": 0.5, "_MUCH_SLOWER": 0.1}.items():
        monkeypatch.setattr(helping_room, name, value)


@pytest.mark.parametrize("seed", range(40))
def test_every_clip_is_delivered_once_whatever_the_threads_do(seed: int, hasty: None) -> None:
    """Real threads in random time: clips are passed on, given back, taken from stuck threads, and taken back from late ones."""
    draw = random.Random(seed)
    count, batch, depth, further = 240, draw.choice([1, 4, 8]), draw.choice([1, 2, 4]), draw.choice([0, 3, 20])
    clips = [Clip(k, draw.choice(["nvdec", "nvdec", "nvdec", "cpu"])) for k in range(count)]
    helping = Helping(3) if seed % 4 else None
    jitter: JitterBuffer[int] = JitterBuffer(depth, Telemetry(), lambda: one.room(), in_order=seed % 3 > 0)
    jitter.finish(count // batch)
    most, lent = 0, 0

    def batches() -> Generator[Clip | None]:
        nonlocal most
        for first in range(0, count, batch):
            while jitter.reserve(further if one.far else None) is None:
                yield None
            most = max(most, jitter.in_flight)
            yield from clips[first : first + batch]

    one: Schedule[Clip, Clip] = Schedule(
        batches(),
        lambda clip: clip if clip.number % 50 != 7 else skipped(clip),
        hardware=4,
        helping=helping,
        window=depth * batch,
        further=further * batch,
        reach=lambda: (jitter.taken + depth) * batch,
        behind=lambda: jitter.behind,
    )
    lock = threading.Lock()
    arrived: set[int] = set()

    def arrive(clip: Clip) -> None:
        with lock:
            assert clip.number not in arrived
            arrived.add(clip.number)
            first = clip.number // batch * batch
            complete = arrived.issuperset(range(first, first + batch))
        if complete:
            jitter.put(clip.number // batch, clip.number // batch)

    def skipped(clip: Clip) -> None:
        arrive(clip)

    def work(decoder: Decoder, place: int, own: random.Random) -> None:
        nonlocal lent
        if decoder == "cpu" and not one.wait_until_wanted(place):
            return
        while (clip := one.take(decoder, place)) is not None:
            time.sleep(own.choice([0.0, 0.0001, 0.001, 0.004 if decoder == "cpu" else 0.001]))
            chance = own.random()
            if one.is_lent(clip, decoder):
                lent += 1
                if chance < 0.2:
                    one.give_back(clip)
                    continue
                if not one.claim(clip, 0.001):
                    continue
            elif decoder == "nvdec" and chance < 0.1:
                one.pass_on(replace(clip, decoder="cpu"))
                continue
            elif chance < 0.2:
                one.again(replace(clip, decoder=own.choice(["nvdec", "cpu"])))
                continue
            assert decoder == "cpu" or clip.decoder == "nvdec"
            one.done(clip, decoder, 0.001)
            arrive(clip)

    failures: list[BaseException] = []

    def guarded(*arguments: Any) -> None:
        try:
            work(*arguments)
        except BaseException as error:
            failures.append(error)
            jitter.fail(error)

    engines: list[tuple[Decoder, int]] = [("nvdec", k) for k in range(4)] + [("cpu", k) for k in range(3)]
    threads = [
        threading.Thread(target=guarded, args=(*engine, random.Random(k)), daemon=True) for k, engine in enumerate(engines)
    ]
    for thread in threads:
        thread.start()
    received = []
    while (number := jitter.take()) is not None:
        received.append(number)
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert not failures
    assert sorted(received) == list(range(count // batch))
    assert seed % 3 == 0 or received == sorted(received)
    assert most <= depth + further
    assert helping is not None or not lent


def test_a_clip_that_comes_back_is_taken_while_there_is_no_room() -> None:
    """It may be what everybody waits for: the consumer for its batch, the others for room."""

    def full() -> Generator[Clip | None]:
        yield Clip(0)
        while True:
            yield None

    one: Schedule[Clip, Clip] = Schedule(full(), lambda clip: clip, hardware=1, window=4)
    assert one.take("nvdec") == Clip(0)
    got: list[Clip | None] = []
    thread = threading.Thread(target=lambda: got.append(one.take("nvdec")))
    thread.start()
    time.sleep(0.05)
    assert not got, "it waits for room"
    one.again(Clip(7))
    thread.join(5)
    assert got == [Clip(7)]
    one.pass_on(Clip(8))
    assert one.take("nvdec") == Clip(8)


def test_room_wakes_those_who_wait_for_it() -> None:
    room = [False]

    def some() -> Generator[Clip | None]:
        while not room[0]:
            yield None
        yield Clip(0)

    one: Schedule[Clip, Clip] = Schedule(some(), lambda clip: clip, hardware=1, window=4)
    got: list[Clip | None] = []
    thread = threading.Thread(target=lambda: got.append(one.take("nvdec")))
    thread.start()
    time.sleep(0.05)
    one.room()
    time.sleep(0.05)
    assert not got, "a call too many does no harm"
    room[0] = True
    one.room()
    thread.join(5)
    assert got == [Clip(0)]


def test_a_task_that_comes_back_as_the_others_end_is_not_lost() -> None:
    def ending() -> Generator[Clip | None]:
        yield Clip(0)
        one.again(Clip(9))

    one: Schedule[Clip, Clip] = Schedule(ending(), lambda clip: clip, hardware=1, window=4)
    assert one.take("nvdec") == Clip(0)
    assert one.take("nvdec") == Clip(9)
    one.done(Clip(9), "nvdec")
    assert one.take("nvdec") is None


# Helpers, on a machine on paper


def sequence(count: int, seed: int = 0, *kinds: str) -> list[Clip]:
    draw = random.Random(f"clips {seed}")
    return [Clip(k, kind=draw.choice(kinds or ("h264",)), cost=draw.uniform(0.4, 1.6)) for k in range(count)]


def compared(clips: list[Clip], **machine: Any) -> tuple[float, Machine, Machine]:
    """How many times as fast a machine is with helpers as without, and both after their run."""
    alone, helped = Machine(**machine), Machine(**machine)
    return alone.run(clips) / helped.run(clips, Helping(helped.helpers, helped.clock)), alone, helped


@pytest.mark.parametrize(
    ("machine", "adds"),
    [
        ({}, 7 / 0.4 / 54),  # 1080p H.264, which takes a core 0.4 s
        ({"helper_seconds": lambda clip, now: 0.8 * clip.cost}, 7 / 0.8 / 54),
        ({"helper_seconds": lambda clip, now: 0.13 * clip.cost}, 7 / 0.13 / 54),
        ({"rate": 163.0, "helper_seconds": lambda clip, now: 0.13 * clip.cost}, 7 / 0.13 / 163),
        ({"drag": 0.01}, (7 / 0.4 - 0.07 * 54) / 54),
        ({"in_order": False}, 7 / 0.4 / 54),
    ],
)
def test_fast_helpers_add_most_of_what_they_can(machine: dict[str, Any], adds: float) -> None:
    faster, alone, helped = compared(sequence(6000), **machine)
    assert 1 + 0.7 * adds < faster < 1 + adds
    half = len(helped.delivered) // 2
    second = [run.delivered[-1] - run.delivered[half] for run in (alone, helped)]
    assert second[0] / second[1] > 1 + 0.8 * adds, "once their number has grown"
    assert helped.twice < 10
    longest = [max(b - a for a, b in itertools.pairwise(run.delivered)) for run in (alone, helped)]
    assert longest[1] < 1.3 * longest[0], "no batch waits for a helper"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "machine",
    [
        {"helper_seconds": lambda clip, now: 3.0 * clip.cost},  # never in time
        {"helper_seconds": lambda clip, now: 10.0 * clip.cost, "drag": 0.02},
        {"helper_seconds": lambda clip, now: 0.4 * clip.cost, "drag": 0.046},  # costs what it gives
        {"helper_seconds": lambda clip, now: 0.4 * clip.cost, "drag": 0.09},  # costs twice what it gives
        {"helper_seconds": lambda clip, now: 0.4 * clip.cost, "drag": 0.2},
        {"helper_seconds": lambda clip, now: (0.2 if now < 30 else 20.0) * clip.cost},  # the user's training begins
    ],
)
def test_helpers_that_do_not_add_cost_next_to_nothing(machine: dict[str, Any], seed: int) -> None:
    faster, alone, helped = compared(sequence(5000, seed), **machine, seed=seed)
    assert faster > 0.985
    late = [ours - theirs for ours, theirs in zip(helped.delivered, alone.delivered, strict=True)]
    assert max(late) < 0.5 + 0.02 * alone.delivered[-1]
    assert helped.twice < 20


def test_a_short_epoch_loses_next_to_nothing_to_the_first_trial() -> None:
    """200 videos, as the benchmarks have them; all helpers slow, and each a burden."""
    for seed in range(5):
        faster, _, helped = compared(sequence(200, seed), helper_seconds=lambda clip, now: 1.0 * clip.cost, drag=0.02)
        assert faster > 0.98
        assert helped.most_helping <= 2


def test_no_batch_waits_for_a_helper_while_an_epoch_starts() -> None:
    clips = sequence(400)
    faster, alone, helped = compared(clips, helper_seconds=lambda clip, now: 1.0 * clip.cost)
    assert helped.delivered[:8] == alone.delivered[:8], "until the hardware's own rate is known there is no helper"
    assert all(ours < theirs + 0.02 for ours, theirs in zip(helped.delivered, alone.delivered, strict=True))
    assert faster > 1
    knowing = Helping(7, helped.clock)
    begins = [0.0]
    for _ in range(3):
        helped.run(clips, knowing)
        begins.append(helped.delivered[-1])
    assert knowing.count == 7, "what one epoch learns serves the next"
    first = [helped.delivered[50 * (epoch + 1)] - helped.delivered[50 * (epoch + 1) - 1] for epoch in range(3)]
    assert max(first) < 1.5 * alone.delivered[0]


def test_one_helper_alone_tries_a_kind() -> None:
    clips = sequence(3000, 0, "h264", "hevc", "vp9")
    at_once: dict[str, int] = {}
    tried: dict[str, float] = {}

    class Watched(Helping):
        def took(self, kind: str) -> None:
            if self.distance(kind, 1.0) is None:
                at_once[kind] = at_once.get(kind, 0) + 1
                tried.setdefault(kind, self.clock())
            super().took(kind)

    machine = Machine(helper_seconds=lambda clip, now: {"h264": 0.3, "hevc": 0.5, "vp9": 9.0}[clip.kind] * clip.cost)
    machine.run(clips, Watched(7, machine.clock))
    assert at_once["h264"] == at_once["hevc"] == 1
    assert at_once["vp9"] <= 4, "again now and then, ever more seldom"
    kinds = {clips[number].kind for number in machine.by_helpers}
    assert kinds == {"h264", "hevc"}


def test_the_look_ahead_is_bounded_and_only_as_long_as_helpers_need() -> None:
    clips = sequence(3000)
    for seconds, further, most in ((0.4, 26, 14), (0.8, 26, 18), (8.0, 26, 5), (0.05, 26, 18), (0.8, 3, 7), (0.4, 0, 4)):
        _, alone, helped = compared(clips, helper_seconds=lambda clip, now, s=seconds: s * clip.cost, further=further)
        assert alone.most_ahead == 4
        assert helped.most_ahead <= most, seconds
    machine = Machine(consumer_seconds=0.3)
    machine.run(clips[:1000], Helping(7, machine.clock))
    assert machine.most_ahead == 4, "where the consumer is the slow one nobody goes further"
    assert len(machine.by_helpers) <= 2


def test_what_only_software_decodes_comes_before_helping() -> None:
    clips = [replace(clip, decoder="cpu", kind="av1") if clip.number % 20 == 0 else clip for clip in sequence(3000)]
    machine = Machine(helper_seconds=lambda clip, now: 0.1 * clip.cost)
    learnt = Helping(7, machine.clock)
    learnt.count = 7
    machine.run(clips, learnt)
    software = [number for number in machine.by_helpers if number % 20 == 0]
    assert len(software) == 150
    assert all(later > number - 60 for number, later in itertools.pairwise(software)), "oldest first"
    assert len(machine.by_helpers) > 400


@pytest.mark.parametrize("seed", range(3))
def test_helpers_that_die_or_are_stuck_hold_up_no_batch(seed: int) -> None:
    clips = sequence(3000, seed)
    fails = {k for k in range(3000) if random.Random(k + seed).random() < 0.05}
    alone, dying, stuck = (Machine(seed=seed) for _ in range(3))
    alone.run(clips)
    dying.dies = lambda clip: clip.number in fails
    dying.run(clips, Helping(7, dying.clock))
    stuck.helper_seconds = lambda clip, now: math.inf if clip.number in fails else 0.4 * clip.cost
    stuck.run(clips, Helping(7, stuck.clock))
    for machine in (dying, stuck):
        assert not fails & set(machine.by_helpers)
        assert len(machine.delivered) == 375
        assert all(ours < 1.02 * theirs + 0.2 for ours, theirs in zip(machine.delivered, alone.delivered, strict=True))
    assert dying.delivered[-1] < 0.9 * alone.delivered[-1]


@pytest.mark.parametrize(("seconds", "faster"), [(0.1, 1.2), (0.13, 1.1), (0.16, 1.0), (0.3, 1.0)])
def test_a_consumer_gets_what_it_has_use_for(seconds: float, faster: float) -> None:
    """The hardware makes a batch in 0.148 s. Time in which the consumer is the slow one spoils no measurement."""
    clips = sequence(3000)
    alone, helped = Machine(consumer_seconds=seconds), Machine(consumer_seconds=seconds)
    learnt = Helping(7, helped.clock)
    assert alone.run(clips) / helped.run(clips, learnt) > 0.98 * faster
    assert learnt._alone == pytest.approx(54, rel=0.1)
    assert seconds < 0.2 or len(helped.by_helpers) <= 2


def test_the_bound_of_the_look_ahead_is_in_visits_and_bytes() -> None:
    clip = 3 * 16 * 224 * 224 * 2
    assert further_batches(1, clip) == 2**30 // clip == 222
    assert further_batches(8, 8 * clip) == 2**30 // (8 * clip) == 27
    assert further_batches(64, 64 * clip) == 3
    assert further_batches(512, 512 * clip) == 0, "one alone is more than 1 GiB"
    assert further_batches(4, 1000) == 256 // 4


@pytest.mark.parametrize(
    ("size", "jitter", "expected"),
    [
        (8, {}, 2**30),
        (512, {}, 4 * 512 * 3 * 16 * 224 * 224 * 2),
        (512, {"depth": 9}, None),
        (8, {"depth": 9, "max_gib": 0.25}, 2**28),
        (512, {"max_gib": 0.25}, 2**28),
    ],
    ids=["auto", "auto, large batches", "fixed", "fixed, bounded", "auto, bounded"],
)
def test_the_bytes_that_batches_may_have(size: int, jitter: dict[str, Any], expected: int | None) -> None:
    assert most_bytes(JitterConfig(**jitter), size * 3 * 16 * 224 * 224 * 2) == expected


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.3])
def test_a_depth_that_sets_itself_helps_as_well_as_a_fixed_one(seconds: float, in_order: bool) -> None:
    """Batches that helpers began far ahead of their turn must not pass for slow ones, and nothing may come to a stop."""
    clips = sequence(3000)
    fixed = Machine(consumer_seconds=seconds, in_order=in_order)
    itself = Machine(consumer_seconds=seconds, in_order=in_order, control=DepthControl(2, 32))
    assert itself.run(clips, Helping(7, itself.clock)) < 1.05 * fixed.run(clips, Helping(7, fixed.clock))
    assert itself.control is not None
    assert itself.control.depth <= 8
    assert len(itself.delivered) == 375

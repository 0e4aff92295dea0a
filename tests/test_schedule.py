"""The schedule: what only software can decode waits for it, helpers help where they are in time, and all comes to an end."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass

import pytest

from gpupipe.data.decode import Decoder, Helping, Schedule
from gpupipe.data.jitter import Closed


@dataclass(frozen=True)
class Clip:
    number: int
    decoder: Decoder = "nvdec"
    kind: str = "h264"
    cost: float = 1.0
    decoded: bool = False


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


@pytest.mark.parametrize("seed", range(6))
def test_every_clip_is_taken_once_whatever_the_threads_do(seed: int) -> None:
    draw = random.Random(seed)
    clips = [Clip(k, draw.choice(["nvdec", "nvdec", "cpu"])) for k in range(300)]
    one = schedule(clips, hardware=4, helping=Helping(2) if seed % 2 == 0 else None)
    taken: list[int] = []

    def work(decoder: Decoder, own: random.Random) -> None:
        while (clip := one.take(decoder)) is not None:
            time.sleep(own.random() / 2000)
            if decoder == "nvdec" and own.random() < 0.1:
                one.pass_on(Clip(clip.number, "cpu"))
                continue
            assert decoder == "cpu" or clip.decoder == "nvdec"
            taken.append(clip.number)
            one.done(clip, decoder, 0.001)

    threads = [
        threading.Thread(target=work, args=("nvdec" if k < 4 else "cpu", random.Random(k)), daemon=True) for k in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert sorted(taken) == list(range(300))


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

"""The jitter buffer: bounded, in order, never drops, and nobody waits for ever."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupipe.data.depth import DepthControl
from gpupipe.data.jitter import Closed, JitterBuffer, Late
from gpupipe.telemetry import Telemetry


def reserved(jitter: JitterBuffer[Any]) -> int:
    """The next number of a buffer that has room."""
    number = jitter.reserve()
    assert number is not None
    return number


def buffer(depth: int) -> JitterBuffer[Any]:
    return JitterBuffer(depth, Telemetry())


class Caller(threading.Thread):
    """Runs a function and keeps what it gave or raised."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self.result: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._work()
        except BaseException as error:
            self.error = error

    def ended(self, timeout: float = 5) -> bool:
        self.join(timeout)
        return not self.is_alive()

    def waits(self) -> bool:
        self.join(0.05)
        return self.is_alive()


@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_arrival_goes_out_in_sequence(seed: int) -> None:
    jitter = buffer(6)
    order = list(range(6))
    assert [jitter.reserve() for _ in order] == order
    random.Random(seed).shuffle(order)
    for number in order:
        jitter.put(number, f"batch {number}")
    assert jitter.occupancy == 6
    assert [jitter.take() for _ in order] == [f"batch {number}" for number in range(6)]
    assert jitter.occupancy == jitter.in_flight == 0


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_many_producers_and_one_consumer(depth: int) -> None:
    count, jitter = 300, buffer(depth)
    most = 0
    lock = threading.Lock()

    def produce() -> None:
        nonlocal most
        try:
            while True:
                number = jitter.reserve()
                if number is None:
                    time.sleep(0.0001)
                    continue
                with lock:
                    most = max(most, jitter.in_flight)
                if number >= count:
                    jitter.finish(count)
                    return
                jitter.put(number, number)
        except Closed:
            return

    producers = [Caller(produce) for _ in range(4)]
    assert [jitter.take() for _ in range(count)] == list(range(count))
    assert jitter.take() is None
    assert jitter.take() is None, "and again"
    jitter.close()
    assert all(producer.ended() for producer in producers)
    assert most <= depth


def test_without_order_a_late_batch_holds_up_no_other() -> None:
    jitter: JitterBuffer[str] = JitterBuffer(3, Telemetry(), in_order=False)
    late, second, third = (reserved(jitter) for _ in range(3))
    jitter.put(third, "third")
    assert jitter.take() == "third"
    jitter.put(second, "second")
    assert jitter.take() == "second"
    assert [reserved(jitter), reserved(jitter)] == [3, 4], "two were taken"
    assert jitter.reserve() is None
    jitter.put(4, "fifth")
    jitter.put(late, "late")
    jitter.put(3, "fourth")
    jitter.finish(5)
    assert [jitter.take() for _ in range(4)] == ["fifth", "late", "fourth", None]


def test_a_full_buffer_has_no_room_until_one_is_taken() -> None:
    told: list[int] = []
    jitter: JitterBuffer[str] = JitterBuffer(2, Telemetry(), on_room=lambda: told.append(jitter.in_flight))
    assert (jitter.reserve(), jitter.reserve(), jitter.reserve()) == (0, 1, None)
    jitter.put(0, "a")
    jitter.put(1, "b")
    assert jitter.reserve() is None, "two are ready"
    assert (jitter.occupancy, jitter.in_flight) == (2, 2)
    assert not told
    assert jitter.take() == "a"
    assert told == [1]
    assert jitter.reserve() == 2
    assert (jitter.occupancy, jitter.in_flight) == (1, 2)


def test_there_may_be_room_further_ahead_for_those_who_ask() -> None:
    jitter = buffer(2)
    assert [jitter.reserve(), jitter.reserve(), jitter.reserve(), jitter.reserve(1), jitter.reserve(1)] == [0, 1, None, 2, None]
    assert (jitter.behind, jitter.taken) == (True, 0)
    jitter.put(1, "b")
    assert jitter.behind, "the first one is not there"
    jitter.put(0, "a")
    assert not jitter.behind
    assert jitter.take() == "a"
    assert (jitter.behind, jitter.taken) == (False, 1)
    assert jitter.reserve() is None, "two are in flight that were there before"
    as_they_come: JitterBuffer[str] = JitterBuffer(2, Telemetry(), in_order=False)
    reserved(as_they_come), reserved(as_they_come)
    assert as_they_come.behind
    as_they_come.put(1, "b")
    assert not as_they_come.behind


def test_a_later_batch_waits_for_the_earlier_one() -> None:
    jitter = buffer(3)
    first, second = reserved(jitter), reserved(jitter)
    jitter.put(second, "second")
    consumer = Caller(jitter.take)
    assert consumer.waits()
    jitter.put(first, "first")
    assert consumer.ended()
    assert (consumer.result, jitter.take()) == ("first", "second")


def test_the_end_is_known_even_if_the_consumer_waits_already() -> None:
    jitter = buffer(2)
    jitter.put(reserved(jitter), "only")
    assert jitter.take() == "only"
    consumer = Caller(jitter.take)
    assert consumer.waits()
    jitter.finish(1)
    assert consumer.ended()
    assert consumer.result is None


def test_after_the_end_a_closed_buffer_still_says_end() -> None:
    """Of several consumers the first one to see the end closes the buffer; for the others it is the end too."""
    jitter = buffer(2)
    jitter.put(reserved(jitter), "only")
    jitter.finish(1)
    assert jitter.take() == "only"
    jitter.close()
    assert jitter.take() is None


def test_close_wakes_all_who_wait() -> None:
    jitter = buffer(1)
    jitter.reserve()
    callers = [Caller(jitter.take), Caller(jitter.take)]
    assert all(caller.waits() for caller in callers)
    jitter.close()
    assert all(caller.ended() for caller in callers)
    assert all(isinstance(caller.error, Closed) for caller in callers)
    for call in (jitter.reserve, jitter.take):
        with pytest.raises(Closed):
            call()


def test_a_closed_buffer_holds_nothing() -> None:
    jitter = buffer(3)
    first, late = reserved(jitter), reserved(jitter)
    jitter.put(first, "ready")
    jitter.close()
    assert jitter.occupancy == 0
    jitter.put(late, "late")  # a worker that had not heard yet
    assert jitter.occupancy == 0


def test_a_producers_error_reaches_the_consumer() -> None:
    jitter = buffer(2)
    jitter.reserve()
    consumer, producer = Caller(jitter.take), None
    assert consumer.waits()
    error = ValueError("the first one")
    jitter.fail(error)
    jitter.fail(KeyError("a later one"))
    assert consumer.ended()
    assert consumer.error is error
    producer = Caller(jitter.reserve)
    assert producer.ended()
    assert isinstance(producer.error, Closed)
    with pytest.raises(ValueError, match="the first one"):
        jitter.take()


def test_waits_are_measured() -> None:
    telemetry = Telemetry()
    jitter: JitterBuffer[str] = JitterBuffer(1, telemetry)
    consumer = Caller(jitter.take)
    assert consumer.waits()
    jitter.put(reserved(jitter), "a")
    assert consumer.ended()
    assert telemetry.snapshot()["wait_seconds"] >= 0.04
    assert telemetry.snapshot()["blocked_seconds"] == 0
    jitter.reserve()
    assert jitter.reserve() is None
    time.sleep(0.05)
    jitter.put(1, "b")
    jitter.take()
    assert jitter.reserve() == 2
    assert telemetry.snapshot()["blocked_seconds"] >= 0.04


def test_only_waits_after_the_first_batch_are_stalls() -> None:
    """The first one is always waited for; a batch that is there, or the end, is no stall."""
    telemetry = Telemetry()
    jitter: JitterBuffer[str] = JitterBuffer(4, telemetry)
    first = Caller(jitter.take)
    assert first.waits()
    jitter.put(reserved(jitter), "a")
    assert first.ended()
    assert telemetry.snapshot()["stalls"] == 0
    jitter.put(reserved(jitter), "b")
    jitter.take()
    assert telemetry.snapshot()["stalls"] == 0
    second = Caller(jitter.take)
    assert second.waits()
    jitter.put(reserved(jitter), "c")
    assert second.ended()
    assert telemetry.snapshot()["stalls"] == 1
    assert 0.04 <= telemetry.snapshot()["stall_seconds"] <= telemetry.snapshot()["wait_seconds"]
    last = Caller(jitter.take)
    assert last.waits()
    jitter.finish(3)
    assert last.ended()
    assert telemetry.snapshot()["stalls"] == 1


def test_bytes_are_bounded_too_but_one_batch_alone_has_room_whatever_its_size() -> None:
    telemetry = Telemetry()
    jitter: JitterBuffer[str] = JitterBuffer(10, telemetry, most_bytes=100)
    assert [jitter.reserve(size_bytes=size) for size in (60, 41, 40, 1)] == [0, None, 1, None]
    assert jitter.levels() == {"occupancy": 0, "in_flight": 2, "jitter_bytes": 100}
    jitter.put(0, "a")
    assert jitter.reserve(size_bytes=1) is None, "a finished batch takes as much as one under construction"
    jitter.take()
    assert jitter.reserve(size_bytes=61) is None
    jitter.put(1, "b")
    jitter.take()
    assert jitter.reserve(size_bytes=1000) == 2
    assert jitter.reserve(size_bytes=0) is None, "until it is gone"
    assert jitter.reserve(5, size_bytes=1) is None, "helpers are bound as well"
    jitter.put(2, "c")
    jitter.take()
    assert jitter.levels() == {"occupancy": 0, "in_flight": 0, "jitter_bytes": 0}
    assert telemetry.value("jitter_peak_bytes") == 1000
    JitterBuffer(10, telemetry).reserve(size_bytes=7)
    assert telemetry.value("jitter_peak_bytes") == 1000, "of all epochs"


def test_a_wait_makes_room_at_once_where_the_depth_may_grow() -> None:
    """The batch that is waited for may hold up workers which have nothing else to do meanwhile."""
    told: list[int] = []
    jitter: JitterBuffer[str] = JitterBuffer(DepthControl(2, 8), Telemetry(), lambda: told.append(jitter.reach))
    for number in range(4):
        assert reserved(jitter) == number
        jitter.put(number, "")
        jitter.take()
    assert [reserved(jitter) for _ in range(4)] == [4, 5, 6, 7]
    assert jitter.reserve() is None
    told.clear()
    consumer = Caller(jitter.take)
    assert consumer.waits()
    assert told == [9], "a quarter more than the four that it had"
    assert reserved(jitter) == 8
    jitter.put(4, "")
    assert consumer.ended()


def test_batches_that_are_begun_stay_within_reach_when_the_depth_goes_down() -> None:
    control = DepthControl(1, 8, start=8)
    jitter: JitterBuffer[str] = JitterBuffer(control, Telemetry())
    for number in range(6):
        assert reserved(jitter) == number
        jitter.put(number, "")
    control.depth = 2
    jitter.take()
    assert jitter.reach == 6, "those that are begun"
    assert jitter.reserve() is None
    for _ in range(4):
        assert jitter.reserve() is None
        jitter.take()
    assert jitter.reach == 7
    assert reserved(jitter) == 6


def test_a_consumer_that_has_waited_long_enough_hears_of_it() -> None:
    jitter = buffer(2)
    number = reserved(jitter)
    with pytest.raises(Late):
        jitter.take(timeout_seconds=0.01)
    jitter.put(number, "late")
    assert jitter.take(timeout_seconds=0.01) == "late", "nothing is lost"


STEPS = st.lists(st.tuples(st.sampled_from(["reserve", "further", "put", "take"]), st.integers(0, 60)), max_size=200)


@given(STEPS, st.integers(1, 6), st.integers(0, 6), st.one_of(st.none(), st.integers(1, 100)), st.booleans())
def test_bounds_hold_in_any_order_of_events(
    steps: list[tuple[str, int]], lowest: int, more: int, most_bytes: int | None, in_order: bool
) -> None:
    now = 0.0
    control = DepthControl(lowest, lowest + more)
    jitter: JitterBuffer[int] = JitterBuffer(control, Telemetry(), in_order=in_order, most_bytes=most_bytes, clock=lambda: now)
    sizes: dict[int, int] = {}
    at_work: list[int] = []
    for step, value in steps:
        now += value / 10
        if step == "reserve" or step == "further":
            further = value % 4 if step == "further" else None
            number = jitter.reserve(further, value)
            assert number is not None or sizes, "where there is none, one has room"
            if number is not None:
                sizes[number] = value
                at_work.append(number)
                assert number < jitter.reach + (further or 0)
                assert most_bytes is None or sum(sizes.values()) <= most_bytes or len(sizes) == 1
        elif step == "put" and at_work:
            number = at_work.pop(value % len(at_work))
            jitter.put(number, number)
        elif step == "take":
            if jitter.behind:
                jitter._misses(now)
            else:
                taken = jitter.take()
                assert taken is not None
                del sizes[taken]
        assert jitter.levels()["jitter_bytes"] == sum(sizes.values())
        assert jitter.taken < jitter.reach <= jitter.taken + max(control.highest, jitter.in_flight)
        assert lowest <= control.depth <= lowest + more

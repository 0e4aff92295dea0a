"""The jitter buffer: bounded, in order, never drops, and nobody waits for ever."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from gpupipe.data.jitter import Closed, JitterBuffer
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

"""The watch over threads: late ones are given up and replaced, and nothing that goes wrong in it passes unheard."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest

from gpupipe.data.crew import Crew, TakenAway, Worker

Names = Crew[str, str]


def crew(engines: list[str], work: Any, **callbacks: Any) -> Names:
    told: dict[str, Any] = {"successor": lambda worker: worker.engine + "'", "taken": lambda _: None, "failed": lambda _: None}
    return Crew(engines, work, limit_seconds=0.4, name="gpupipe-test", **{**told, **callbacks})


def test_a_late_thread_loses_its_work_and_its_place() -> None:
    free, done, taken, outcome = threading.Event(), threading.Event(), [], []

    def work(worker: Worker[str, str]) -> None:
        outcome.append(worker.engine)
        if worker.engine == "a":
            worker.begin("slow")
            free.wait(20)
            with pytest.raises(TakenAway):
                worker.claim()
            outcome.append("late")
        elif worker.engine == "a'":
            done.set()

    one = crew(["a", "b"], work, taken=taken.append)
    one.start()
    assert done.wait(60)
    assert taken == ["slow"]
    one.join()
    assert sorted(outcome) == ["a", "a'", "b"]
    free.set()
    time.sleep(0.2)
    assert "late" in outcome


def test_work_that_is_claimed_is_not_taken_away() -> None:
    taken: list[str] = []

    def work(worker: Worker[str, str]) -> None:
        worker.begin("quick")
        worker.claim()
        time.sleep(1.0)

    one = crew(["a"], work, taken=taken.append)
    one.start()
    one.join()
    assert not taken


@pytest.mark.parametrize("where", ["successor", "taken"])
def test_what_the_watch_fails_with_is_told(where: str) -> None:
    free, told, heard = threading.Event(), [], threading.Event()

    def fail(_: Any) -> str:
        raise OSError("no more")

    def failed(error: BaseException) -> None:
        told.append(error)
        heard.set()

    def work(worker: Worker[str, str]) -> None:
        worker.begin("slow")
        free.wait(20)

    one = crew(["a"], work, failed=failed, **{where: fail})
    one.start()
    assert heard.wait(60)
    assert str(told[0]) == "no more"
    free.set()
    one.join()


def test_joining_gives_up_on_a_stuck_thread() -> None:
    free, successors = threading.Event(), []

    def work(worker: Worker[str, str]) -> None:
        worker.begin("slow")
        free.wait(20)

    def successor(worker: Worker[str, str]) -> str:
        successors.append(worker.engine)
        return "b"

    one = crew(["a"], work, successor=successor)
    one.start()
    begin = time.monotonic()
    one.join()
    one.join()
    assert time.monotonic() - begin < 10
    assert successors == ["a"]
    free.set()


def test_the_end_waits_no_longer_than_the_works_patience() -> None:
    free, left = threading.Event(), []

    def work(worker: Worker[str, str]) -> None:
        worker.begin("foreign", patience_seconds=0.2)
        free.wait(60)

    told: dict[str, Any] = {"successor": lambda worker: "b", "taken": lambda _: None, "failed": lambda _: None}
    one: Names = Crew(["a"], work, limit_seconds=600, name="gpupipe-test", left=left.append, **told)
    one.start()
    begin = time.monotonic()
    one.join()
    assert time.monotonic() - begin < 30
    assert left == ["foreign"]
    free.set()


def test_it_may_be_ended_by_a_thread_that_holds_its_lock() -> None:
    """Garbage collection may end a crew in its own watch."""
    one = crew([], lambda worker: None)
    with one._changed:
        one.end()
    one.join()
    gc.collect()


@pytest.mark.parametrize("claimed", [True, False])
def test_patience_at_the_end_counts_for_whatever_a_thread_is_at(claimed: bool) -> None:
    """Work that is claimed, as a transform is, may hang as well; a loop that has had to wait must not wait for its end."""
    free, at_it, left, replaced = threading.Event(), threading.Event(), [], []

    def work(worker: Worker[str, str]) -> None:
        worker.begin("slow")
        if claimed:
            worker.claim()
        at_it.set()
        free.wait(20)

    told: dict[str, Any] = {"taken": lambda _: None, "failed": lambda _: None, "left": left.append}
    one = Crew(["a"], work, lambda worker: replaced.append(worker.engine) or "b", limit_seconds=60, name="gpupipe-test", **told)
    one.start()
    assert at_it.wait(20)
    begin = time.monotonic()
    one.join(0.1)
    assert time.monotonic() - begin < 10
    assert (left, replaced) == ([] if claimed else ["slow"], ["a"]), "its engine is another's no more"
    one.join(0.1)
    assert replaced == ["a"], "once"
    free.set()


def test_threads_that_end_in_time_keep_their_engines() -> None:
    replaced: list[str] = []
    one = crew(["a", "b"], lambda worker: time.sleep(0.1), successor=lambda worker: replaced.append(worker.engine) or "c")
    one.start()
    one.join(30)
    assert not replaced

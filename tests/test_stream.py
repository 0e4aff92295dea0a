"""Marks: events of the driver's own, which are used again, and never while something may still ask for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gpupipe.device import stream as streams
from gpupipe.device.stream import Mark, hand_over

Call = tuple[Any, ...]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """What the driver is asked for."""
    made: list[Call] = []

    def new_event(gpu: int) -> int:
        made.append(("new", gpu))
        return len(made)

    def wait_event(event: int, stream: int, gpu: int, *, keep_lock: bool) -> None:
        made.append(("wait", event, stream, gpu, keep_lock))

    monkeypatch.setattr(streams, "new_event", new_event)
    monkeypatch.setattr(streams, "record_event", lambda *asked: made.append(("record", *asked)))
    monkeypatch.setattr(streams, "wait_event", wait_event)
    monkeypatch.setattr(streams, "_spare", type(streams._spare)(list))
    return made


def stream(handle: int, gpu: int = 0) -> Any:
    return SimpleNamespace(cuda_stream=handle, device_index=gpu)


def test_an_event_is_used_again_once_its_mark_is_gone(calls: list[Call]) -> None:
    first, second = Mark(stream(7)), Mark(stream(7))
    assert calls == [("new", 0), ("record", 1, 7, 0), ("new", 0), ("record", 3, 7, 0)]
    del first
    third = Mark(stream(8))
    fourth = Mark(stream(9, gpu=1))
    assert calls[4:] == [("record", 1, 8, 0), ("new", 1), ("record", 6, 9, 1)], "each GPU has events of its own"
    del second, third, fourth


def test_who_waits_for_a_mark_keeps_the_interpreter_lock_on_streams_of_our_own_alone(calls: list[Call]) -> None:
    mark = Mark(stream(7))
    mark.hold_back(stream(8))
    hand_over([], [mark], stream(0))
    assert calls[2:] == [("wait", 1, 8, 0, True), ("wait", 1, 0, 0, False)]


def test_a_mark_that_could_not_be_recorded_leaves_no_event_that_others_take(
    calls: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*asked: int) -> None:
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setattr(streams, "record_event", fails)
    with pytest.raises(RuntimeError, match="ILLEGAL_ADDRESS"):
        Mark(stream(7))
    assert not streams._spare[0]

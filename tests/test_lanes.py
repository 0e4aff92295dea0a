"""Lanes: lent to one at a time, warm for the next, never more kept than allowed."""

from __future__ import annotations

import gc
import os
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpupipe import free_decoders
from gpupipe.data.decode import DecodeEngine, Fallbacks, engine, lanes
from gpupipe.data.decode.lanes import give_back, take
from gpupipe.errors import DeviceMemoryError
from gpupipe.telemetry import Telemetry
from gpupipe.types import PlaneFormat, Planes

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


PLANES = Planes(torch.zeros(1, 6, 4, dtype=torch.uint8), PlaneFormat(4, 4, 2, 2, interleaved=True))


class FakeLane:
    """A lane that needs no GPU."""

    def __init__(self, device: torch.device) -> None:
        self.stream = SimpleNamespace(device_index=device.index or 0)
        self.store = SimpleNamespace(clear=self._clear)
        self.cleared = self.closed = 0
        self.failures = 0
        self.open = 0
        self.process = os.getpid()

    def _clear(self) -> None:
        self.cleared += 1

    def nvdec(self, keep: int) -> SimpleNamespace:
        return SimpleNamespace(created=0, decode=self._decode)

    def free_decoders(self) -> int:
        count, self.open = self.open, 0
        return count

    def _decode(self, *_: object) -> Planes:
        if self.failures:
            self.failures -= 1
            raise DeviceMemoryError("no memory", fix="free some")
        return PLANES

    def close(self) -> None:
        self.closed += 1


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "Lane", FakeLane)
    monkeypatch.setattr(lanes, "_idle", defaultdict(lanes.deque))
    monkeypatch.setattr(lanes, "_parents", [])


def make_engine(device: torch.device = FIRST) -> DecodeEngine:
    return DecodeEngine(device, mode="auto", keep=2, fallbacks=Fallbacks(), telemetry=Telemetry())


def test_a_lane_given_back_is_the_next_ones_on_its_own_gpu_alone() -> None:
    lane = take(FIRST)
    give_back(lane)
    assert lane.store is not None
    assert lane.cleared == 1, "an idle lane holds no frame memory"  # type: ignore[attr-defined]
    assert take(SECOND) is not lane
    assert take(torch.device("cuda")) is lane
    assert take(FIRST) is not lane, "lent to one at a time"


def test_only_so_many_are_kept() -> None:
    lent = [take(FIRST) for _ in range(lanes._KEPT + 3)]
    for lane in lent:
        give_back(lane)
    assert [lane.closed for lane in lent] == [1, 1, 1] + [0] * lanes._KEPT  # type: ignore[attr-defined]
    assert free_decoders() == lanes._KEPT
    assert all(lane.closed == 1 for lane in lent)  # type: ignore[attr-defined]
    assert free_decoders() == 0


@pytest.mark.parametrize("leave", ["close", "drop"])
def test_an_engine_leaves_its_lane_to_the_next(leave: str) -> None:
    first = make_engine()
    stream = first.stream
    assert stream is first.stream
    if leave == "close":
        first.close()
        first.close()
    else:
        del first
        gc.collect()
    second = make_engine()
    assert second.stream is stream
    assert make_engine().stream is not stream


def test_an_engine_is_usable_after_its_end() -> None:
    one = make_engine()
    stream = one.stream
    one.close()
    other = make_engine()
    assert other.stream is stream
    assert one.stream is not stream


def test_idle_decoders_make_room_for_a_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "choose", lambda *_: engine.Choice("nvdec", None))
    index = SimpleNamespace(info=SimpleNamespace(path="a.mp4"))
    plan = SimpleNamespace(packets=1, frames=[0], packet_bytes=lambda _: 5)
    idle, mine = take(FIRST), take(FIRST)
    give_back(idle)
    give_back(mine)
    mine.failures = 2  # type: ignore[attr-defined]
    one = make_engine()
    with pytest.raises(DeviceMemoryError):
        one.decode(index, plan)  # type: ignore[arg-type]
    assert idle.closed == 1, "freed before the second try"  # type: ignore[attr-defined]
    give_back(take(SECOND))
    mine.failures = 1  # type: ignore[attr-defined]
    assert one.decode(index, plan) == (PLANES, "nvdec")  # type: ignore[arg-type]
    mine.failures = 1  # type: ignore[attr-defined]
    with pytest.raises(DeviceMemoryError):  # nothing idle is left, so that a second try would be in vain
        one.decode(index, plan)  # type: ignore[arg-type]
    assert mine.failures == 0  # type: ignore[attr-defined]
    mine.failures, mine.open = 1, 2  # type: ignore[attr-defined]
    assert one.decode(index, plan) == (PLANES, "nvdec"), "its own for other sizes made room"  # type: ignore[arg-type]
    assert mine.open == 0  # type: ignore[attr-defined]
    emptied: list[int] = []
    for name, value in {"memory_reserved": 2 << 30, "memory_allocated": 1 << 30}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    mine.failures = 1  # type: ignore[attr-defined]
    assert one.decode(index, plan) == (PLANES, "nvdec"), "so did what torch kept"  # type: ignore[arg-type]
    assert emptied == [1]


def test_a_forked_child_leaves_its_parents_lanes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    idle, lent = take(FIRST), take(FIRST)
    give_back(idle)
    child = os.fork()
    if child == 0:
        give_back(lent)
        own = take(FIRST)
        freed = free_decoders()
        fine = own not in (idle, lent) and freed == 0 and not idle.closed and not lent.closed  # type: ignore[attr-defined]
        os._exit(0 if fine else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert take(FIRST) is idle


def test_an_engine_that_decodes_in_a_process_takes_no_open_session_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "Lane", FakeLane)
    idle = take(FIRST)
    give_back(idle)
    process: Any = SimpleNamespace(close=lambda: None)
    helper = DecodeEngine(FIRST, mode="auto", keep=2, fallbacks=Fallbacks(), telemetry=Telemetry(), process=process)
    assert helper.stream is not idle.stream
    helper.close()
    assert make_engine().stream is idle.stream, "nor leaves its own in their place"


def test_the_cpu_has_no_lane() -> None:
    assert make_engine(torch.device("cpu")).stream is None

"""Memory set aside and reported: what is asked of torch's allocator, and what its figures come to; on a stand-in."""

from __future__ import annotations

import gc
import logging
import re
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from gpupipe.config import MemoryConfig
from gpupipe.config.ranges import amount_bytes
from gpupipe.device import usage as usage_room
from gpupipe.device.usage import Usage, usage
from gpupipe.errors import ConfigError, DeviceMemoryError
from gpupipe.train import Ema, memory_report, reserve_memory
from gpupipe.train.memory import pool as pool_room
from gpupipe.train.memory import report as report_room
from gpupipe.train.memory.pool import CudaAllocator, set_aside
from gpupipe.train.memory.report import report_of
from gpupipe.train.memory.tensors import python_tensors

GB, MIB = 10**9, 2**20
CUDA = torch.device("cuda", 0)


class Simulated:
    """A GPU of 100 GB on which torch holds ``reserved`` and others ``outside``; ``idle`` of what torch holds is cached."""

    def __init__(
        self, *, reserved: int = 0, idle: int = 0, outside: int = GB, splits_all: bool = True, hidden: int = 0
    ) -> None:
        self.reserved, self.idle, self.outside, self.hidden = reserved, idle, outside, hidden
        self.share = 1.0
        self.splits_all = splits_all
        self.calls: list[Any] = []

    def usage(self) -> Usage:
        return Usage(100 * GB, self.reserved + self.outside, self.reserved, int(self.share * 100 * GB))

    def set_ceiling(self, share: float) -> None:
        self.share = share
        self.calls.append(("ceiling", round(share, 4)))

    def take_and_cache(self, size_bytes: int) -> None:
        self.calls.append(("take", size_bytes))
        room = min(self.share * 100 * GB, 100 * GB - self.outside - self.hidden) - self.reserved
        if size_bytes > room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.reserved += size_bytes

    def free(self) -> None:
        self.reserved -= self.idle
        self.idle = 0


def test_room_is_left_beyond_what_is_in_use_outside() -> None:
    device = Simulated(outside=2 * GB)
    made = set_aside(MemoryConfig(reserve=0.5, room="5GB"), CUDA, device)
    assert device.calls[0] == ("ceiling", 0.93), "100 less 2 in use and 5 to come; set before anything is taken"
    assert (made.ceiling_bytes, made.outside_bytes, made.room_bytes) == (93 * GB, 2 * GB, 5 * GB)
    assert 50 * GB - 2 * MIB < made.held_bytes <= 50 * GB
    assert device.usage().reachable == 93 * GB, "what planners may count on"
    assert "50.00 GB set aside on cuda:0, at most 93.00 GB" in str(made)


def test_what_torch_holds_counts_but_what_it_has_cached_is_given_back_first() -> None:
    """Else the allocation would come out of that cache, and nothing would be set aside."""
    device = Simulated(reserved=30 * GB, idle=20 * GB)
    made = set_aside(MemoryConfig(reserve="60GB"), CUDA, device)
    ((_, size),) = [call for call in device.calls if call[0] == "take"]
    assert 50 * GB - 2 * MIB < size <= 50 * GB
    assert size % (2 * MIB) == 0
    assert made.held_bytes == 10 * GB + size


@pytest.mark.parametrize(("reserve", "reserved"), [(None, 0), ("5GB", 8 * GB)])
def test_nothing_is_taken_where_nothing_is_missing(reserve: str | None, reserved: int) -> None:
    device = Simulated(reserved=reserved)
    set_aside(MemoryConfig(reserve=reserve), CUDA, device)
    assert device.calls == [("ceiling", 0.94)], "the ceiling holds all the same"


@pytest.mark.parametrize(
    ("settings", "device", "says"),
    [
        ({"reserve": 0.97}, {}, r"reserve=0.97 is 97.0 GB, but of 100.0 GB 1.0 GB are in use outside of torch, 5.0 GB are to"),
        ({"reserve": "95GB"}, {"outside": 4 * GB}, "reserve at most 91.0 GB"),
        ({"room": "70GB"}, {"outside": 31 * GB}, "room='70GB' is 70.0 GB, which is not there"),
        ({"room": 0.5}, {"reserved": 60 * GB}, "60.0 GB in torch"),
        ({"reserve": 0.5}, {"splits_all": False}, "max_split_size_mb"),
    ],
)
def test_what_does_not_fit_the_device_is_said_before_anything_is_done(
    settings: dict[str, Any], device: dict[str, Any], says: str
) -> None:
    simulated = Simulated(**device)
    with pytest.raises(ConfigError, match=says):
        set_aside(MemoryConfig(**settings), CUDA, simulated)
    assert simulated.calls == []


@pytest.mark.parametrize(("bound", "splits"), [(-1, True), (0, True), (200 * GB, True), (512 * MIB, False)])
def test_what_torch_says_of_blocks_that_are_not_cut(bound: int, splits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"max_split_size": bound})
    monkeypatch.setattr(pool_room, "usage", lambda device: Usage(100 * GB, 0, 0, 100 * GB))
    assert CudaAllocator(CUDA).splits_all is splits


def test_memory_that_another_process_took_meanwhile_leaves_no_ceiling_behind() -> None:
    device = Simulated(hidden=60 * GB)
    with pytest.raises(DeviceMemoryError, match=r"50\.0 GB more are not free on cuda:0"):
        set_aside(MemoryConfig(reserve=0.5), CUDA, device)
    assert device.share == 1.0


def test_on_the_cpu_nothing_is_set_aside_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="gpupipe"):
        made = reserve_memory("20GB", "cpu")
    assert made.held_bytes == 0
    assert "no memory set aside on cpu" in caplog.text
    made.release()
    assert "left to torch" in str(reserve_memory(None, "cpu"))
    with pytest.raises(ConfigError, match="or an amount with its unit such as '20GB'"):
        reserve_memory(20.0, "cpu")


@pytest.mark.parametrize(
    ("amount", "size"),
    [("20GB", 20 * GB), ("1.5 GiB", 3 * 2**29), ("7mb", 7 * 10**6), (0.25, 25), ("0.25", 25)],
)
def test_amounts(amount: Any, size: int) -> None:
    assert amount_bytes(MemoryConfig(reserve=amount).reserve or 0.0, 100) == size


@pytest.mark.parametrize("amount", [0, -1, 1.01, 20, "20", "GB", "0GB", "1e3GB", "-1GB", "20 parsecs", [1], float("nan")])
def test_what_is_no_amount_is_refused(amount: Any) -> None:
    with pytest.raises(ConfigError, match=r"MemoryConfig\.room"):
        MemoryConfig(room=amount)


def block(size: int, *, used: bool) -> dict[str, Any]:
    return {"size": size, "state": "active_allocated" if used else "inactive"}


def segment(*blocks: dict[str, Any], pool: tuple[int, int] = (0, 0)) -> dict[str, Any]:
    return {"device": 0, "segment_pool_id": pool, "total_size": sum(each["size"] for each in blocks), "blocks": list(blocks)}


STATS = {
    "allocated_bytes.all.current": 60,
    "allocated_bytes.all.peak": 90,
    "reserved_bytes.all.current": 160,
    "reserved_bytes.all.peak": 170,
    "inactive_split_bytes.all.current": 35,
    "num_alloc_retries": 2,
}


def test_a_gpu_s_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_room, "usage", lambda device: Usage(1000, 400, 160, 900))
    segments = [
        segment(block(50, used=True), block(20, used=False), block(10, used=True), block(15, used=False)),
        segment(block(25, used=False)),
        segment(block(40, used=False), pool=(0, 1)),
    ]
    found = report_of(CUDA, STATS, segments, {})
    assert (found.largest_free, found.stuck, found.graphs) == (25, 35, 40), "a graph's pool is no help to a tensor"
    assert found.fragmentation == pytest.approx(1 - 25 / 60)
    assert found.outside == 240
    assert (found.allocated, found.peak_allocated, found.reserved, found.peak_reserved) == (60, 90, 160, 170)
    flat = found.as_dict()
    assert flat["memory/outside"] == 240
    assert "memory/peak_used" not in flat
    lines = str(found).splitlines()
    assert lines[0] == "memory of cuda:0"
    assert any(line.startswith("fragmentation of the cache") and line.endswith("58%") for line in lines)


def test_an_empty_cache_is_not_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_room, "usage", lambda device: Usage(1000, 400, 160, 900))
    assert report_of(CUDA, {}, [segment(block(5, used=True))], {}).fragmentation == 0.0


def test_a_device_may_be_torch_s_own() -> None:
    assert reserve_memory(0.5, torch.device("cpu")).device.type == "cpu"


def test_kinds_on_the_cpu() -> None:
    """Each piece of memory counts once, and the rest is known as such."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64, affine=False))
    model.append(nn.Linear(64, 64, bias=False))
    model[2].weight = model[0].weight  # type: ignore[union-attr]
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3, 64)).sum().backward()
    optimizer.step()
    gc.collect()
    before = memory_report("cpu", model=model)
    batch = torch.ones(1000)
    found = memory_report("cpu", model=model, optimizer=optimizer, batch=[batch, batch[5:], "text"])
    size = 4 * 64 * 64
    assert found.kinds["parameters"] == found.kinds["gradients"] == size
    assert found.kinds["optimizer state"] == 2 * size + 4
    assert found.kinds["buffers"] == 2 * 4 * 64 + 8
    assert found.kinds["batch"] == 4000
    assert found.allocated == sum(found.kinds.values())
    assert found.allocated - before.allocated == 4000
    assert found.peak_used is not None
    assert found.peak_used >= found.used > 0, "of other tests there may be tensors whose pages nobody has touched"
    assert memory_report(torch.device("cpu"), batch={"video": batch}, mask=batch[:1]).kinds["batch"] == 4000, (
        "a mapping's values"
    )
    for options in ({"batch": 5}, {"model": "small"}, {"optimizer": model}, {"batch": {"video": ["a.mp4"]}}, {"modle": model}):
        with pytest.raises(ConfigError, match=f"{next(iter(options))} is "):
            memory_report("cpu", **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"memory_report\(model=model\)"):
        memory_report(model)  # type: ignore[arg-type]
    assert found.fragmentation is None
    assert {"memory/kind/batch", "memory/peak_used"} <= set(found.as_dict())
    assert "GB" in str(found)
    assert re.search(r"buffers +0\.001 MB", str(found)), "0.000 GB told nothing"
    nested = {"video": [batch, {"mask": batch[:9].clone()}], "paths": ["a.mp4"]}
    deep = memory_report("cpu", optimizer=[optimizer], averages=Ema(model), batch=nested, teacher=model, none=[]).kinds
    assert deep["optimizer state"] == 2 * size + 4
    assert (deep["averages"], deep["batch"], deep["none"]) == (size, 4036, 0)
    assert deep["teacher"] == size + 2 * 4 * 64 + 8


@pytest.mark.parametrize(("limit", "total"), [("123456789\n", 123456789), ("max\n", None), (None, None)])
def test_a_container_s_bound_is_what_there_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str | None, total: int | None
) -> None:
    file = tmp_path / "memory.max"
    if limit is not None:
        file.write_text(limit)
    monkeypatch.setattr(usage_room, "_CGROUP_LIMIT", file)
    assert usage(torch.device("cpu")).total == (total or psutil.virtual_memory().total)


def test_a_view_of_which_torch_will_not_say_where_it_is_from_is_counted_all_the_same() -> None:
    base = torch.zeros(1000, requires_grad=True).clone()
    with torch.no_grad():
        view = base[:500]
    base.mul_(2)
    with pytest.raises(RuntimeError, match="created in no_grad mode"):
        _ = view.is_leaf
    assert any(one is view for one in python_tensors(torch.device("cpu")))

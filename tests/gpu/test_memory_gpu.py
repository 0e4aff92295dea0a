"""A GPU's memory: set aside and kept below a ceiling, reported, watched, used again in stream order, filled to a budget."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from gpupipe.train import BufferPool, LeakWatch, largest_batch, memory_report, reserve_memory

pytestmark = pytest.mark.gpu

GB, MIB = 10**9, 2**20


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    yield
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    torch.cuda.empty_cache()


def test_tensors_are_cut_from_what_was_set_aside_and_the_rest_is_out_of_reach() -> None:
    total = torch.cuda.mem_get_info()[1]
    made = reserve_memory({"reserve": "4GB", "room": "2GB"}, "cuda")
    held = torch.cuda.memory_reserved()
    assert abs(held - 4 * GB) <= 32 * MIB
    assert made.held_bytes == held
    tensors = [torch.empty(size * MIB, dtype=torch.uint8, device="cuda") for size in (1000, 3, 700, 1500)]
    assert torch.cuda.memory_reserved() == held, "nothing was asked of the driver"
    del tensors
    assert made.ceiling_bytes <= total - 2 * GB
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(made.ceiling_bytes + 256 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.mem_get_info()[0] >= 2 * GB, "the room is there"
    made.release()
    assert torch.cuda.get_per_process_memory_fraction() == 1.0
    assert torch.cuda.memory_reserved() < held


def test_a_report_tells_pieces_from_what_is_whole() -> None:
    whole = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    del whole
    before = memory_report("cuda")
    assert before.largest_free is not None
    assert before.largest_free >= 256 * MIB
    pieces = [torch.empty(8 * MIB, dtype=torch.uint8, device="cuda") for _ in range(32)]
    del pieces[::2]
    after = memory_report("cuda", pieces=pieces)
    assert after.fragmentation is not None
    assert after.fragmentation > 0.8
    assert after.stuck is not None
    assert after.stuck >= 128 * MIB
    assert after.kinds["pieces"] == 128 * MIB
    assert after.peak_allocated is not None
    assert after.peak_allocated >= 256 * MIB
    assert after.outside is not None
    assert after.outside > 0, "the context at least"


def test_a_leak_is_named_with_the_line_that_made_it_and_the_host_never_waits() -> None:
    kept: list[torch.Tensor] = []
    watch = LeakWatch({"warmup_steps": 4, "window_steps": 5, "windows": 3, "least_growth": "8MB"}, "cuda")
    weight = torch.ones(256, 256, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(60):
        weight @ weight
        kept.append(torch.zeros(512, 512, device="cuda"))
        if watch.after():
            break
    torch.cuda.set_sync_debug_mode("default")
    assert watch.leak is not None
    assert watch.leak.bytes_a_step == pytest.approx(MIB, rel=0.1)
    assert "tensors of 512x512 float32" in watch.leak.tensors[0]
    assert "held by kept in" in watch.leak.tensors[0]
    assert "test_memory_gpu.py" in watch.leak.lines[0]
    assert not torch._C._cuda_isHistoryEnabled()


def test_what_comes_and_goes_is_no_leak() -> None:
    watch = LeakWatch({"warmup_steps": 4, "window_steps": 5, "windows": 3, "least_growth": "1MB"}, "cuda")
    held = []
    for step in range(100):
        held.append(torch.zeros(1 << 20, device="cuda"))
        if step % 7 == 6:
            held.clear()
        assert watch.after() is None


def test_memory_is_written_again_only_behind_those_who_read_it() -> None:
    buffers, side = BufferPool("cuda"), torch.cuda.Stream()
    source = buffers.take((1 << 22,)).fill_(1.0)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        copy = source * 1
        buffers.give_back(source)
    place = source.data_ptr()
    del source
    again = buffers.take((1 << 22,))
    assert again.data_ptr() == place
    again.fill_(2.0)
    torch.cuda.synchronize()
    assert bool((copy == 1).all())


@pytest.mark.parametrize("bounded", [False, True], ids=["by its figures", "by running out"])
def test_the_largest_batch_fits_and_a_larger_one_does_not(bounded: bool) -> None:
    """By the budget; or by a ceiling below it, at which steps fail."""
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda()

    def step(tokens: int) -> None:
        model(torch.randn(tokens, 1024, device="cuda")).square().mean().backward()

    step(64)
    if bounded:
        made = reserve_memory({"room": "1GB"}, "cuda")
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2 * GB) / total)
        assert made.ceiling_bytes < total
    budget = 100.0 if bounded else torch.cuda.memory_allocated() / 1e9 + 2
    plan = largest_batch(step, (256, 512, 1024), budget=budget, multiple=64, zero_grad=model.zero_grad, device="cuda")
    assert plan.size % 64 == 0
    if bounded:
        assert None in [probe.peak_bytes for probe in plan.probes]
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step(plan.size)
    model.zero_grad()
    assert torch.cuda.max_memory_allocated() <= budget * 1e9
    assert plan.size > 10_000, "some 50 KB a token, of 2 GB"

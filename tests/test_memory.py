"""Memory in slabs: the bound holds, pieces do not overlap, and what cannot be had is None or an error."""

from __future__ import annotations

import itertools
import threading
import weakref

import pytest
import torch

from gpupipe.device import memory
from gpupipe.device.memory import Slabs
from gpupipe.device.stream import stage
from gpupipe.errors import DeviceMemoryError

CPU = torch.device("cpu")


def test_pieces_are_apart_aligned_and_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SLAB_BYTES", 4096)
    slabs = Slabs(CPU, "pinned", 10_000)
    pieces = []
    while (piece := slabs.take(700, None)) is not None:
        pieces.append(piece)
        assert slabs.held_bytes <= 10_000
    assert len(pieces) == 4 + 4 + 2, "1024 bytes apart in slabs of 4096, 4096 and 1808"
    places = sorted((piece.data_ptr(), piece.numel()) for piece in pieces)
    assert all(at + size <= after for (at, size), (after, _) in itertools.pairwise(places))
    for number, piece in enumerate(pieces):
        piece.fill_(number)
    assert [set(piece.tolist()) for piece in pieces] == [{number} for number in range(10)]


def test_a_small_piece_finds_room_where_a_large_one_did_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SLAB_BYTES", 4096)
    slabs = Slabs(CPU, "device", 6000)
    assert slabs.take(3000, None) is not None
    assert not slabs.has_room(3001)
    assert slabs.take(3001, None) is None
    assert slabs.has_room(1000)
    assert slabs.take(1000, None) is not None
    assert slabs.held_bytes == 4096, "in the first slab"


@pytest.mark.parametrize(("size", "limit", "takes"), [(10, 5000, 4096), (4097, 9000, 8192), (3000, 4000, None), (10, 0, None)])
def test_pinned_slabs_are_powers_of_two(size: int, limit: int, takes: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's allocator of pinned memory takes them: anything else would hold more than was asked for."""
    monkeypatch.setattr(memory, "SLAB_BYTES", 4096)
    slabs = Slabs(torch.device("cuda"), "pinned", limit)
    assert slabs._next_size(size) == takes


def test_closing_frees_and_nothing_more_is_given() -> None:
    slabs = Slabs(CPU, "device", 1 << 20)
    piece = slabs.take(100, None)
    assert piece is not None
    whole = weakref.ref(slabs._slabs[0].memory)
    del piece
    slabs.close()
    assert whole() is None
    assert slabs.take(1, None) is None


def test_many_threads_share_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SLAB_BYTES", 64 << 10)
    slabs = Slabs(CPU, "device", 1 << 20)
    taken: list[torch.Tensor] = []

    def work() -> None:
        while (piece := slabs.take(512, None)) is not None:
            taken.append(piece)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({piece.data_ptr() for piece in taken}) == len(taken) == (1 << 20) // 512


def test_memory_that_cannot_be_pinned_is_no_fault_of_cuda() -> None:
    """A fault would ask for a new process; too little memory to pin does not."""
    with pytest.raises(DeviceMemoryError, match="machine is out of memory"), stage("cache"):
        raise type("AcceleratorError", (RuntimeError,), {})("CUDA error: out of memory")

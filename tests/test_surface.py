"""Memory of one stream's own: used again, grown as needed, and given back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpupipe.data.decode import surface
from gpupipe.data.decode.surface import FrameStore
from gpupipe.types import PlaneFormat

FORMAT = PlaneFormat(64, 32, 32, 16, interleaved=True)


@pytest.fixture
def store() -> FrameStore:
    stream: Any = SimpleNamespace(device=torch.device("cpu"), cuda_stream=7)
    return FrameStore(stream)


def test_scratch_is_the_same_memory_until_it_is_too_small(store: FrameStore) -> None:
    first = store.scratch(1000)
    assert store.scratch(300) is store.scratch(1000) is first
    larger = store.scratch(2000)
    assert larger.numel() >= 2000
    store.reserve(40, FORMAT)
    assert store.scratch(2000) is larger, "frames that need more room leave it alone"
    store.clear()
    assert store._scratch is None


def test_much_scratch_is_not_kept(store: FrameStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surface, "_MOST_SCRATCH_BYTES", 1000)
    assert store.scratch(1001).numel() == 1001
    assert store._scratch is None


def test_the_frames_of_a_call_are_copied_together(store: FrameStore, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(surface, "context_of", lambda stream: 3)
    monkeypatch.setattr(surface, "copy_rows", lambda *args, **kwargs: calls.append((args, kwargs)))
    store.reserve(4, FORMAT)
    store.copy_surfaces([(2, 1000), (0, 5000)], 64)
    here, frame = store.planes(4, FORMAT).data.data_ptr(), 48 * surface.PITCH_BYTES
    assert calls == [(([(here + 2 * frame, 1000), (here, 5000)], surface.PITCH_BYTES, 64, 64, 48), {"stream": 7, "context": 3})]

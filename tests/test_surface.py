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


def test_the_frames_of_a_call_are_copied_together(store: FrameStore, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(surface, "context_of", lambda stream: 3)
    monkeypatch.setattr(surface, "copy_rows", lambda *args, **kwargs: calls.append((args, kwargs)))
    store.reserve(4, FORMAT)
    store.copy_surfaces([(2, 1000), (0, 5000)], 64)
    here, frame = store.planes(4, FORMAT).data.data_ptr(), 48 * surface.PITCH_BYTES
    assert calls == [(([(here + 2 * frame, 1000), (here, 5000)], surface.PITCH_BYTES, 64, 64, 48), {"stream": 7, "context": 3})]

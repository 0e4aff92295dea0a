"""What the recorder of CUDA graphs leaves behind when a capture fails, on a torch whose GPU is played."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from gpupipe.device import stream as streams
from gpupipe.train.graphs import recorder
from gpupipe.train.graphs.recorder import CudaRecorder, NotCaptured


class Played:
    """A GPU with one stream, and torch's graphs on it as far as captures go."""

    def __init__(self) -> None:
        self.current = "default"
        self.status = "none"
        self.unended = 0
        """Captures that torch has begun and not ended: its allocator and generator wait for them."""

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def begin(self, stream: int) -> None:
        assert self.status == "none"
        self.status = "active"

    def graph(self, keep_graph: bool) -> Any:
        gpu = self

        class Graph:
            def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
                assert capture_error_mode == "thread_local"
                assert gpu.current != "default"
                gpu.begin(0)
                gpu.unended += 1

            def capture_end(self) -> None:
                status, gpu.status = gpu.status, "none"
                if status != "active":
                    raise RuntimeError("operation failed due to a previous error during capture")
                gpu.unended -= 1

            def instantiate(self) -> None:
                assert gpu.status == "none"

            def raw_cuda_graph(self) -> int:
                return 1

        return Graph()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Played:
    played = Played()
    stream = type("Stream", (), {"cuda_stream": 7})()
    played_parts: dict[str, Any] = {
        "ExternalStream": lambda handle, device: stream,
        "graph_pool_handle": lambda: (0, 1),
        "CUDAGraph": played.graph,
        "stream": played.stream,
        "synchronize": lambda device: None,
        "empty_cache": lambda: None,
        "memory_reserved": lambda device: 0,
    }
    for name, value in played_parts.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(recorder, "begin_capture", played.begin)
    monkeypatch.setattr(recorder, "graph_nodes", lambda graph: 3)
    monkeypatch.setattr(streams, "new_stream", lambda gpu: 7)
    monkeypatch.setattr(streams, "_idle", streams.defaultdict(list))
    return played


def test_what_spoils_a_capture_is_named_and_torch_gets_an_end_of_it(gpu: Played) -> None:
    def asks() -> None:
        gpu.status = "invalidated"
        raise RuntimeError("operation not permitted when stream is capturing")

    record = CudaRecorder(torch.device("cpu")).record
    with pytest.raises(NotCaptured, match="not permitted") as caught:
        record(asks)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert (gpu.current, gpu.status, gpu.unended) == ("default", "none", 0)
    assert gc.isenabled()
    assert record(lambda: None).launches == 3, "the next one is as if nothing had been"


def test_a_capture_that_is_spoilt_without_an_error_is_none(gpu: Played) -> None:
    def swallows() -> None:
        gpu.status = "invalidated"

    with pytest.raises(NotCaptured, match="previous error during capture"):
        CudaRecorder(torch.device("cpu")).record(swallows)
    assert (gpu.current, gpu.status, gpu.unended) == ("default", "none", 0)


def test_an_error_of_the_function_itself_ends_the_capture(gpu: Played) -> None:
    def fails() -> None:
        raise ValueError("no such layer")

    with pytest.raises(NotCaptured, match="no such layer"):
        CudaRecorder(torch.device("cpu")).record(fails)

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        CudaRecorder(torch.device("cpu")).record(interrupted)
    assert (gpu.current, gpu.status, gpu.unended) == ("default", "none", 0)
    assert gc.isenabled()

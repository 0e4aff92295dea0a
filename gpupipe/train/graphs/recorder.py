"""Recording work on a GPU as a CUDA graph, beside threads that go on using the GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Protocol

import torch

from gpupipe.device.driver import graph_nodes


class NotCaptured(Exception):
    """The work cannot be recorded; its cause is what went wrong in it."""


class Recording(Protocol):
    """Work that can be done again, on the same memory."""

    launches: int
    """What one replay stands for: kernels, copies and the like; 0 where that is not known."""

    def replay(self) -> None:
        """Does the work, on the current stream."""
        ...


class Recorder(Protocol):
    """Records work of one device."""

    def record(self, run: Callable[[], None]) -> Recording:
        """Records what ``run`` asks of the device, and does not do it.

        Raises:
            NotCaptured: when that is not possible; nothing has been done then, or only part of what ``run`` does on the host.
        """
        ...

    @property
    def pool_bytes(self) -> int:
        """Memory that the recordings keep for themselves."""
        ...

    def release(self) -> None:
        """Lets go of that memory, as far as no recording needs it."""
        ...


class CudaRecorder:
    """CUDA graphs on one device, in one pool of memory.

    Work of other threads may go on meanwhile: what a loader does on its own streams neither spoils a capture nor gets into it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
        self._reserved = 0

    def record(self, run: Callable[[], None]) -> Recording:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        generator = torch.cuda.default_generators[self._device.index or 0]
        random = generator.clone_state()
        cause: list[BaseException] = []

        def guarded() -> None:
            try:
                run()
            except BaseException as error:  # ending a capture that failed raises an error that says less
                cause.append(error)
                raise

        before = torch.cuda.memory_reserved(self._device)
        collecting = gc.isenabled()
        gc.collect()
        gc.disable()  # a graph that is freed amid a capture spoils it
        try:
            torch.clear_autocast_cache()  # weights that were cast before lie in memory that is not the graph's
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                guarded()
        except BaseException as error:
            generator.graphsafe_set_state(random)  # it still counts on a capture to end
            self._pool = torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
            reason = cause[0] if cause else error
            if not isinstance(reason, Exception):
                raise reason from None
            raise NotCaptured(str(reason)) from reason
        finally:
            torch.clear_autocast_cache()
            if collecting:
                gc.enable()
        graph.instantiate()
        self._reserved += max(0, torch.cuda.memory_reserved(self._device) - before)
        return _CudaRecording(graph, graph_nodes(graph.raw_cuda_graph()))

    @property
    def pool_bytes(self) -> int:
        return self._reserved

    def release(self) -> None:
        self._pool, self._reserved = torch.cuda.graph_pool_handle(), 0  # type: ignore[no-untyped-call]


class _CudaRecording:
    def __init__(self, graph: torch.cuda.CUDAGraph, launches: int) -> None:
        self._graph = graph
        self.launches = launches

    def replay(self) -> None:
        self._graph.replay()

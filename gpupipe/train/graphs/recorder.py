"""Recording work on a GPU as a CUDA graph, beside threads that go on using the GPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch

from gpupipe.device.driver import begin_capture, graph_nodes
from gpupipe.device.stream import own_stream


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
    Hence a stream that is not of torch's pool: its turn may come to one that a loader has.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = own_stream(device, self)
        self._pool = torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
        self._mark = torch.zeros((), device=device)
        self._reserved = 0
        self._alive: weakref.WeakSet[_CudaRecording] = weakref.WeakSet()

    def record(self, run: Callable[[], None]) -> Recording:
        if not self._alive:  # torch takes no capture into a pool whose last graph is gone, as one that failed is
            self.release()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        collecting = gc.isenabled()
        gc.collect()
        gc.disable()  # a graph that is freed amid a capture spoils it
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # what the rest has left over may be the graph's
        before = torch.cuda.memory_reserved(self._device)
        torch.clear_autocast_cache()  # weights that were cast before lie in memory that is not the graph's
        try:
            with torch.cuda.stream(self._stream):
                self._capture(graph, run)
            graph.instantiate()
        except Exception as error:
            raise NotCaptured(str(error)) from error
        finally:
            torch.clear_autocast_cache()
            if collecting:
                gc.enable()
        self._reserved += max(0, torch.cuda.memory_reserved(self._device) - before)
        recording = _CudaRecording(graph, graph_nodes(graph.raw_cuda_graph()))
        self._alive.add(recording)
        return recording

    def _capture(self, graph: torch.cuda.CUDAGraph, run: Callable[[], None]) -> None:
        """Not by ``torch.cuda.graph``, which leaves much behind where a capture fails: its stream as the current one, and what
        :meth:`_end` is for."""
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        cause: BaseException | None = None
        try:
            run()
        except BaseException as error:  # ending a capture that failed raises an error that says less
            cause = error
        try:
            graph.capture_end()
        except RuntimeError as error:
            cause = cause or error
            self._end(graph)
        if cause is not None:
            raise cause

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        """Gives torch a capture to end in the place of one that was spoilt.

        Till it has ended one, torch 2.11 keeps all memory that several streams have used, a loader's batches for example, and
        has no graph replayed, for its allocator and its generator wait. Later ones do not, and say that nothing is to be ended.
        """
        begin_capture(self._stream.cuda_stream)
        with suppress(RuntimeError):  # it may be the first to hear of an error that nobody has asked for
            self._mark.zero_()
        with suppress(RuntimeError):
            graph.capture_end()

    @property
    def pool_bytes(self) -> int:
        return self._reserved

    def release(self) -> None:
        self._pool, self._reserved = torch.cuda.graph_pool_handle(), 0  # type: ignore[no-untyped-call]
        self._alive.clear()


class _CudaRecording:
    def __init__(self, graph: torch.cuda.CUDAGraph, launches: int) -> None:
        self._graph = graph
        self.launches = launches

    def replay(self) -> None:
        self._graph.replay()

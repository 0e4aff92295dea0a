"""The subjects of bench_loader_train.py: loaders that a training loop takes its batches from."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import shutil
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path

import torch
from loader_cases import Case, Draw, finish
from loader_subjects import Gpupipe, Maker, Threaded, gpupipe, pyav_clip, pynvvideocodec, torchcodec, torchcodec_clip
from torch.utils.data import DataLoader, Dataset, IterableDataset

from gpupipe.device.inventory import cpu_quota

THREADS = 14
"""Of NVDEC sessions in one process: two for each of seven engines, which served these libraries best in bench_loader.py."""
PREFETCH = 2
"""Batches that each worker of a DataLoader prepares ahead."""
LIBRARIES = ("torch.utils.data", "av", "torchcodec.decoders")
"""Of a DataLoader's workers, which take seconds to import."""
KEPT = 8
"""Batches that headspace plays over and over."""


class Headspace:
    """The case's first batches, made once and kept on the device: how fast the loop would be if data were free."""

    def __init__(self, case: Case, draws: Sequence[Draw], device: torch.device) -> None:
        source = Gpupipe(case, draws[: KEPT * case.batch], device, {})
        try:
            self._kept = list(source.batches())
        finally:
            source.close()

    def batches(self) -> Iterator[torch.Tensor]:
        return itertools.cycle(self._kept)

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self._kept.clear()


class Squares(Dataset[torch.Tensor]):
    """Visit n as (T, 3, side, side) uint8: the central square of its frames, so that workers hand over no more than is used."""

    def __init__(self, draws: Sequence[Draw], decode: Callable[[Draw], torch.Tensor]) -> None:
        self._draws, self._decode = draws, decode

    def __len__(self) -> int:
        return len(self._draws)

    def __getitem__(self, number: int) -> torch.Tensor:
        frames = self._decode(self._draws[number])
        side = min(frames.shape[-2:])
        top, left = (frames.shape[-2] - side) // 2, (frames.shape[-1] - side) // 2
        return frames[..., top : top + side, left : left + side].contiguous()


class Workers:
    """A DataLoader with a worker process a core, decoding in software; batches are pinned, uploaded and resized on the GPU.

    Upload and resize have a stream of their own, so that they run beside the step that the GPU is still at.

    Workers are forked from a process that has only imported their libraries, and not from this one, whose threads (of CUDA, of
    the profiler after the first case, of libraries that have decoded here) may hold locks that a copy of it waits on for ever.
    They start as fast, for the imports are done once.
    """

    def __init__(self, case: Case, draws: Sequence[Draw], device: torch.device, decode: Callable[[Draw], torch.Tensor]) -> None:
        self.case, self.device = case, device
        workers = cpu_quota()
        squares = Squares(draws, decode)
        one = squares[0]
        _ask_for_shared_memory(case.batch * one.nbytes * workers * PREFETCH)
        clean = multiprocessing.get_context("forkserver")
        clean.set_forkserver_preload([name for name in LIBRARIES if name in sys.modules])
        self.loader = DataLoader(
            squares, batch_size=case.batch, num_workers=workers, prefetch_factor=PREFETCH, drop_last=True,
            pin_memory=device.type == "cuda", multiprocessing_context=clean,
        )  # fmt: skip
        self._going: Generator[torch.Tensor, None, None] | None = None

    def batches(self) -> Iterator[torch.Tensor]:
        self._going = self._batches()
        return self._going

    def _batches(self) -> Generator[torch.Tensor, None, None]:
        stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        for frames in self.loader:
            with torch.cuda.stream(stream):
                made = finish(frames.flatten(0, 1), self.case, self.device)  # (3, B * T, size, size)
                made = made.view(3, self.case.batch, self.case.frames, *made.shape[2:]).transpose(0, 1).contiguous()
            if stream is not None:
                now = torch.cuda.current_stream(self.device)
                now.wait_stream(stream)
                made.record_stream(now)  # type: ignore[no-untyped-call]
            yield made

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        if self._going is not None:
            self._going.close()  # with it goes the DataLoader's iterator, which ends its workers


def _ask_for_shared_memory(needed: int) -> None:
    """Raises RuntimeError where /dev/shm has less room than workers fill: they would be killed for it, one by one."""
    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else needed
    if free < needed:
        raise RuntimeError(f"/dev/shm has {free >> 20} MiB free, the DataLoader's workers fill {needed >> 20}: enlarge it")


class InThreads(Threaded):
    """A library that decodes on NVDEC, in threads behind a DataLoader of no worker: processes would take turns on the GPU.

    Args:
        plain: the subject as bench_loader.py has it.
        own_streams: each thread works on a stream of its own; else on the default stream, which the training loop leaves alone.
    """

    def __init__(self, plain: Threaded, *, own_streams: bool) -> None:
        plain.close()
        super().__init__(plain.case, plain.draws, plain.device, THREADS, plain.decode)
        self._own_streams = own_streams
        self._local = threading.local()
        self._loop = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

    def _clip(self, visit: Draw) -> torch.Tensor:
        if self._loop is None:
            return super()._clip(visit)
        stream = getattr(self._local, "stream", None)
        if stream is None:
            new = torch.cuda.Stream if self._own_streams else torch.cuda.default_stream
            stream = self._local.stream = new(self.device)
        with torch.cuda.stream(stream):
            made = super()._clip(visit)
        made.record_stream(self._loop)  # type: ignore[no-untyped-call]
        stream.synchronize()  # this thread waits, so that the training loop need not
        return made

    def batches(self) -> Iterator[torch.Tensor]:
        return iter(DataLoader(_Stream(super().batches), batch_size=None, num_workers=0))


class _Stream(IterableDataset[torch.Tensor]):
    def __init__(self, batches: Callable[[], Iterator[torch.Tensor]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self._batches()


def gpupipe_indexed(case: Case, draws: Sequence[Draw], device: torch.device) -> Gpupipe:
    """gpupipe in a later epoch: links to one file go under one name, so that its index is there from the first visit on."""
    names: dict[int, str] = {}
    visits = [Draw(names.setdefault(Path(visit.path).stat().st_ino, visit.path), visit.start) for visit in draws]
    return Gpupipe(case, visits, device, {})


def torchcodec_workers(case: Case, draws: Sequence[Draw], device: torch.device) -> Workers:
    return Workers(case, draws, device, functools.partial(torchcodec_clip, case, "cpu", fair_seek(case, draws[0])))


def torchcodec_cuda(case: Case, draws: Sequence[Draw], device: torch.device) -> InThreads:
    plain = torchcodec(case, draws, device, THREADS, str(device), fair_seek(case, draws[0]))
    return InThreads(plain, own_streams=True)


def fair_seek(case: Case, visit: Draw) -> str:
    """torchcodec's ``approximate`` mode, which does not scan the file, where it finds the right frames; else ``exact``."""
    quick, right = (torchcodec_clip(case, "cpu", mode, visit) for mode in ("approximate", "exact"))
    return "approximate" if torch.equal(quick, right) else "exact"


def pynvvideocodec_threads(case: Case, draws: Sequence[Draw], device: torch.device) -> InThreads:
    return InThreads(pynvvideocodec(case, draws, device, THREADS), own_streams=False)


def pyav_workers(case: Case, draws: Sequence[Draw], device: torch.device) -> Workers:
    return Workers(case, draws, device, functools.partial(pyav_clip, case))


SUBJECTS: dict[str, Maker] = {
    "headspace": Headspace,
    "gpupipe": gpupipe(),
    "gpupipe-indexed": gpupipe_indexed,
    "torchcodec-dataloader": torchcodec_workers,
    "torchcodec-dataloader-cuda": torchcodec_cuda,
    "pynvvideocodec-dataloader": pynvvideocodec_threads,
    "pyav-dataloader": pyav_workers,
}

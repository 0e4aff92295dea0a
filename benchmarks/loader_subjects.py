"""The subjects of bench_loader.py: each turns a list of visits into finished batches on the device."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import dali_subjects
import torch
from loader_cases import Case, Draw, decode_cpu, finish, in_batches, indices
from torch.utils.dlpack import from_dlpack


class Session(Protocol):
    """One subject, set up for one case. Setting it up is part of the measured time, as is every file that it opens."""

    def batches(self) -> Iterator[torch.Tensor]:
        """Goes through the visits in order: (batch, 3, T, size, size) bfloat16 on the device."""
        ...

    def stats(self) -> dict[str, float]:
        """The subject's own counters."""
        ...

    def close(self) -> None: ...


class Gpupipe:
    """One VideoLoader over all visits; ``decode`` and ``cache`` are fields of its DecodeConfig and CacheConfig."""

    def __init__(
        self,
        case: Case,
        draws: Sequence[Draw],
        device: torch.device,
        decode: dict[str, Any],
        cache: dict[str, Any] | None = None,
    ) -> None:
        from gpupipe import VideoLoader

        self.loader = VideoLoader(
            [{"path": visit.path, "start_frame": visit.start} for visit in draws],
            clip={"frames": case.frames, "stride": case.stride},
            transform={"size": case.size, "crop": "center", "hflip": 0.0, "dtype": "bfloat16"},
            batch=case.batch,
            device=str(device),
            decode=decode,
            cache=cache or {},
            shuffle=False,
            on_bad_file="raise",
        )

    def batches(self) -> Iterator[torch.Tensor]:
        for batch in self.loader:
            yield batch.video

    def stats(self) -> dict[str, float]:
        return dict(self.loader.stats())

    def close(self) -> None:
        self.loader.close()


Decode = Callable[[Draw], torch.Tensor]


class Threaded:
    """A decoder library in the hands of a careful user: a pool of threads, each visit a decode and the torch transform.

    ``decode`` gives a visit's frames as (T, 3, H, W) uint8 RGB. Two batches more than the threads need are in flight.
    """

    def __init__(self, case: Case, draws: Sequence[Draw], device: torch.device, threads: int, decode: Decode) -> None:
        self.case, self.draws, self.device, self.decode = case, draws, device, decode
        self.in_flight = threads + 2 * case.batch
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="bench")

    def _clip(self, visit: Draw) -> torch.Tensor:
        return finish(self.decode(visit), self.case, self.device)

    def batches(self) -> Iterator[torch.Tensor]:
        whole = [visit for group in in_batches(self.draws, self.case.batch) for visit in group]
        waiting = iter(whole)
        futures: deque[Future[torch.Tensor]] = deque()
        for _ in range(len(whole) // self.case.batch):
            for visit in itertools.islice(waiting, max(0, self.in_flight - len(futures))):
                futures.append(self.pool.submit(self._clip, visit))
            yield torch.stack([futures.popleft().result() for _ in range(self.case.batch)])

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)


def torchcodec(case: Case, draws: Sequence[Draw], device: torch.device, threads: int, where: str, seek: str) -> Threaded:
    """A new VideoDecoder a visit; on CUDA the library keeps NVDEC sessions of its own from one to the next."""
    return Threaded(case, draws, device, threads, functools.partial(torchcodec_clip, case, where, seek))


def torchcodec_clip(case: Case, where: str, seek: str, visit: Draw) -> torch.Tensor:
    """(T, 3, H, W) uint8 RGB of a visit, on the device ``where``."""
    from torchcodec.decoders import VideoDecoder

    decoder = VideoDecoder(visit.path, device=where, seek_mode=seek)
    stop = visit.start + (case.frames - 1) * case.stride + 1
    frames: torch.Tensor = decoder.get_frames_in_range(visit.start, stop, case.stride).data
    return frames


def pynvvideocodec(case: Case, draws: Sequence[Draw], device: torch.device, threads: int) -> Threaded:
    """A SimpleDecoder a thread, pointed at the next file by its own ``reconfigure_decoder``; RGB from the library."""
    import PyNvVideoCodec as nvc

    local = threading.local()

    def decode(visit: Draw) -> torch.Tensor:
        decoder: Any = getattr(local, "decoder", None)
        if decoder is None:
            torch.cuda.set_device(device)
            decoder = local.decoder = nvc.SimpleDecoder(
                visit.path, gpu_id=device.index or 0, use_device_memory=True, output_color_type=nvc.OutputColorType.RGBP
            )
        else:
            decoder.reconfigure_decoder(visit.path)
        frames = decoder.get_batch_frames_by_index(indices(case, visit.start))
        if len(frames) != case.frames:
            raise RuntimeError(f"{len(frames)} frames came for {case.frames} asked, from {visit.path} at {visit.start}")
        return torch.stack([from_dlpack(frame) for frame in frames])  # a copy: the decoder reuses its surfaces

    return Threaded(case, draws, device, threads, decode)


def pyav(case: Case, draws: Sequence[Draw], device: torch.device, threads: int) -> Threaded:
    return Threaded(case, draws, device, threads, functools.partial(pyav_clip, case))


def pyav_clip(case: Case, visit: Draw) -> torch.Tensor:
    """(T, 3, H, W) uint8 RGB of a visit."""
    return decode_cpu(visit.path, indices(case, visit.start))


def decord(case: Case, draws: Sequence[Draw], device: torch.device, threads: int) -> Threaded:
    """A new VideoReader of decord2 a visit, one decoding thread in each."""
    import decord as library

    def decode(visit: Draw) -> torch.Tensor:
        reader = library.VideoReader(visit.path, ctx=library.cpu(0), num_threads=1)
        return torch.from_numpy(reader.get_batch(indices(case, visit.start)).asnumpy()).permute(0, 3, 1, 2)

    return Threaded(case, draws, device, threads, decode)


Maker = Callable[[Case, Sequence[Draw], torch.device], Session]


def gpupipe(**decode: Any) -> Maker:
    """A subject: a VideoLoader with these fields of DecodeConfig."""
    return lambda case, draws, device: Gpupipe(case, draws, device, decode)


SUBJECTS: dict[str, Maker] = {
    "gpupipe": gpupipe(),
    "torchcodec-cuda-7t": lambda c, d, dev: torchcodec(c, d, dev, 7, str(dev), "exact"),
    "torchcodec-cuda-14t": lambda c, d, dev: torchcodec(c, d, dev, 14, str(dev), "exact"),
    "torchcodec-cuda-14t-approximate": lambda c, d, dev: torchcodec(c, d, dev, 14, str(dev), "approximate"),
    "torchcodec-cpu-16t": lambda c, d, dev: torchcodec(c, d, dev, 16, "cpu", "exact"),
    "pynvvideocodec-simple-14t": lambda c, d, dev: pynvvideocodec(c, d, dev, 14),
    "dali-decoders-video": dali_subjects.decoders_video,
    "dali-readers-video": dali_subjects.readers_video,
    "dali-experimental-readers-video": dali_subjects.experimental_readers_video,
    "decord2-cpu-16t": lambda c, d, dev: decord(c, d, dev, 16),
    "pyav-16t": lambda c, d, dev: pyav(c, d, dev, 16),
}


def engine_rate(paths: Sequence[str], gpu: int, seconds: float = 2.0, threads: int = 7) -> float:
    """Frames a second that the decode engines reach on these files read from end to end, with nothing done to the frames."""
    import PyNvVideoCodec as nvc

    counts = [0] * threads
    start_together = threading.Barrier(threads + 1)

    def work(which: int) -> None:
        decoder: Any = None
        for turn in itertools.count(which):
            demuxer = nvc.CreateDemuxer(filename=paths[turn % len(paths)])
            if decoder is None:
                decoder = nvc.CreateDecoder(gpuid=gpu, codec=demuxer.GetNvCodecId(), usedevicememory=True)
                start_together.wait()
            for packet in demuxer:
                counts[which] += len(decoder.Decode(packet))
                if time.perf_counter() > deadline[0]:
                    return

    deadline = [float("inf")]
    pool = [threading.Thread(target=work, args=(which,), name=f"bench-engine-{which}") for which in range(threads)]
    for thread in pool:
        thread.start()
    start_together.wait(timeout=60)
    begin = time.perf_counter()
    deadline[0] = begin + seconds
    for thread in pool:
        thread.join()
    return sum(counts) / (time.perf_counter() - begin)

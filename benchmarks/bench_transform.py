"""Clip transforms alone: from decoded planes in device memory to finished bf16 clips, a batch of 8 clips of 16 frames.

    python benchmarks/bench_transform.py                             # on the GPU; writes results/transform--<gpu>.json
    python benchmarks/bench_transform.py --cases nv12-1080p-224-train --subjects gpupipe torchvision-v2
    python benchmarks/bench_transform.py --quick --out /tmp/results  # seconds, on the CPU: shows that it works

Every subject gets the same planes and the same drawn parameters (crop, flip, colours), and owes the same batch: 8 clips, bf16,
NCTHW, in device memory. Its first clip is compared with gpupipe's float reference on the CPU.

``gpu_ms_per_clip`` is device time by events around all batches of a case. The device first gets a kernel that only waits, for
longer than the caller's thread takes to enqueue the batches; so what is timed is the device's work, not the thread's. There are
as many batches as it takes to hold several times the L2 cache, so that no input comes from there. ``host_ms_per_clip`` is what
the caller's thread spends on a clip of one batch, results not waited for; for subjects that work on the CPU it is all of their
time, the upload of the clip included. All of this is the same for every subject; each has made every batch three times before.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from common import RESULTS, Row, failed, summarise, write_results

from gpupipe.config import TransformConfig
from gpupipe.data.transform import ClipInput, ClipTransform, TransformParams
from gpupipe.types import PlaneFormat, Planes, VideoInfo

CLIPS, FRAMES = 8, 16
PITCH_BYTES = 512
SIZES = {"tiny": (96, 64), "256p": (456, 256), "1080p": (1920, 1080)}
DEVICE_METRIC, HOST_METRIC = "gpu_ms_per_clip", "host_ms_per_clip"
COLD_BYTES = 256 << 20
"""Planes of a case's batches on a GPU, together, at least: five times the L2 cache of an H200."""
WARM_UPS = 3
CYCLES_A_SECOND = 2e9
"""Of a GPU, at most."""
COPY_BYTES = 512 << 20
"""Size of the copy whose rate the limit is worked out from."""


@dataclass(frozen=True)
class Case:
    """``FORMAT-SIZE-OUTPUT-KIND``: planes of a format and size, and which preset makes which output of them."""

    name: str
    bits: int
    width: int
    height: int
    config: TransformConfig


def case_of(name: str) -> Case:
    """Raises: ValueError: when it is no case's name."""
    parts = name.split("-")
    if len(parts) != 4 or parts[0] not in ("nv12", "p010") or parts[1] not in SIZES or parts[3] not in ("train", "eval"):
        raise ValueError(f"{name!r} is not FORMAT-SIZE-OUTPUT-KIND: nv12 or p010, {', '.join(SIZES)}, a number, train or eval")
    size = int(parts[2])
    config = TransformConfig(preset=f"kinetics_{parts[3]}", size=(size, size))
    return Case(name, 10 if parts[0] == "p010" else 8, *SIZES[parts[1]], config)


@dataclass(frozen=True)
class Clip:
    """A clip to make: its planes, and what was drawn for it."""

    planes: Planes
    info: VideoInfo
    params: TransformParams


def make_clips(case: Case, device: torch.device) -> list[Clip]:
    """Slowly changing pictures with some noise, as video is; each clip has its own draw."""
    rng = np.random.default_rng(0)
    form = PlaneFormat(
        case.width, case.height, case.width // 2, case.height // 2, case.bits, 6 if case.bits > 8 else 0, interleaved=True
    )
    pitch = -(-form.row_samples * form.sample_bytes // PITCH_BYTES) * PITCH_BYTES // form.sample_bytes
    rows, columns = np.arange(form.rows)[:, None], np.arange(pitch)[None]
    info = VideoInfo(
        path="made up", container="none", codec="none", pix_fmt="none", width=case.width, height=case.height, frames=FRAMES,
        time_base=Fraction(1, 30), fps=30.0, start_seconds=0.0, duration_seconds=FRAMES / 30, bit_depth=case.bits,
        color_matrix="bt709", color_range="limited",
    )  # fmt: skip
    transform = ClipTransform(case.config, FRAMES)
    clips = []
    for number in range(CLIPS):
        frames = []
        for k in range(FRAMES):
            wave = np.sin((rows + 3 * k) / 37) * np.cos((columns + 50 * number) / 53)
            codes = (0.5 + 0.2 * wave + 0.03 * rng.random((form.rows, pitch))) * 2**case.bits
            frames.append((codes.astype(np.int64) << form.shift).astype(np.uint8 if case.bits == 8 else np.uint16))
        data = torch.from_numpy(np.stack(frames)).to(device)
        clips.append(Clip(Planes(data, form), info, transform.draw(info, np.random.default_rng(number))))
    return clips


Make = Callable[[Sequence[Clip], torch.Tensor], None]
"""Makes clips into a batch (8, 3, T, H, W) bf16."""


def gpupipe(case: Case) -> Make:
    """A batch in one call."""
    transform = ClipTransform(case.config, FRAMES)

    def make(clips: Sequence[Clip], out: torch.Tensor) -> None:
        transform.apply_batch(
            [ClipInput(c.planes, c.info, c.params, range(FRAMES), slot) for c, slot in zip(clips, out, strict=True)]
        )

    return make


def rgb_of(y: torch.Tensor, u: torch.Tensor, v: torch.Tensor, step: float) -> torch.Tensor:
    """(T, 3, H, W) float RGB in [0, 1] of BT.709 limited range, chroma repeated: the cheapest way that is in use.

    ``step`` is the distance of two codes of 8 bits in the samples' own.
    """
    luma = (y.to(torch.float32) / step - 16) / 219
    cb, cr = (F.interpolate(((p.to(torch.float32) / step - 128) / 224)[:, None], scale_factor=2.0)[:, 0] for p in (u, v))
    return torch.stack((luma + 1.5748 * cr, luma - 0.18733 * cb - 0.46813 * cr, luma + 1.8556 * cb), 1).clamp_(0, 1)


def torchvision(case: Case, *, compiled: bool) -> Make:
    """torchvision.transforms.v2's own functions with the parameters that were drawn, on RGB made by torch.

    Compiled, each order of colour changes, with or without a flip, is a graph of its own; sizes and factors are not.
    """
    from torchvision.transforms.v2 import functional as V

    changes = {"brightness": V.adjust_brightness, "contrast": V.adjust_contrast, "saturation": V.adjust_saturation}
    changes["hue"] = V.adjust_hue
    mean, std, size = list(case.config.mean), list(case.config.std), list(case.config.size)

    step = float(2 ** (case.bits - 8) << (6 if case.bits > 8 else 0))

    def chain(
        planes: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        crop: Sequence[int],
        hflip: bool,
        names: Sequence[str],
        factors: Sequence[float],
    ) -> torch.Tensor:
        rgb = V.resized_crop(rgb_of(*planes, step), *crop, size, antialias=True)
        rgb = V.horizontal_flip(rgb) if hflip else rgb
        for name, factor in zip(names, factors, strict=True):
            rgb = changes[name](rgb, factor)
        finished: torch.Tensor = V.normalize(rgb, mean, std).to(torch.bfloat16)
        return finished.transpose(0, 1)

    run = chain
    if compiled:
        torch._dynamo.config.recompile_limit = 64  # a graph more than the limit would be run as it is
        run = torch.compile(chain, dynamic=True)

    def make(clips: Sequence[Clip], out: torch.Tensor) -> None:
        for clip, slot in zip(clips, out, strict=True):
            planes, params = clip.planes, clip.params
            crop = [round(value) for value in params.crop]
            names, factors = [op.name for op in params.color], [op.value for op in params.color]
            slot.copy_(run((planes.y, planes.u, planes.v), crop, params.hflip, names, factors))

    return make


def opencv(case: Case, *, threads: int) -> Make:
    """OpenCV on the CPU, frame by frame from host memory: colour conversion, crop, INTER_AREA, flip, colours, normalisation."""
    import cv2

    cv2.setNumThreads(1)
    height, width = case.config.size
    mean, std = (np.array(values, np.float32) for values in (case.config.mean, case.config.std))
    grey = np.array([0.2989, 0.587, 0.114], np.float32)

    def colours(rgb: np.ndarray, params: TransformParams) -> np.ndarray:
        for op in params.color:
            if op.name == "hue":
                hsv = cv2.cvtColor(rgb, cv2.COLOR_RGB2HSV)
                hsv[..., 0] = (hsv[..., 0] + 360 * op.value) % 360
                rgb = cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB)
                continue
            luma: np.ndarray = (rgb @ grey)[..., None]
            other = {"brightness": 0 * luma, "contrast": luma.mean(keepdims=True), "saturation": luma}[op.name]
            rgb = np.clip(op.value * rgb + (1 - op.value) * other, 0, 1).astype(np.float32)
        return rgb

    def frame(clip: Clip, number: int) -> np.ndarray:
        form = clip.planes.format
        nv12 = clip.planes.data[number, :, : form.width].numpy()
        rgb = cv2.cvtColor(np.ascontiguousarray(nv12), cv2.COLOR_YUV2RGB_NV12)
        top, left, rows, columns = (round(value) for value in clip.params.crop)
        small = cv2.resize(rgb[top : top + rows, left : left + columns], (width, height), interpolation=cv2.INTER_AREA)
        small = small[:, ::-1] if clip.params.hflip else small
        return (colours(small.astype(np.float32) / 255, clip.params) - mean) / std

    def make(clips: Sequence[Clip], out: torch.Tensor) -> None:
        jobs = [(clip, number) for clip in clips for number in range(FRAMES)]
        with ThreadPoolExecutor(threads) as pool:
            frames = list(pool.map(lambda job: frame(*job), jobs)) if threads > 1 else [frame(*job) for job in jobs]
        whole = torch.from_numpy(np.stack(frames)).view(len(clips), FRAMES, height, width, 3)
        out.copy_(whole.permute(0, 4, 1, 2, 3).to(torch.bfloat16))

    return make


SUBJECTS: dict[str, Callable[[Case], Make]] = {
    "gpupipe": gpupipe,
    "torchvision-v2": partial(torchvision, compiled=False),
    "torchvision-v2-compile": partial(torchvision, compiled=True),
    "opencv-1t": partial(opencv, threads=1),
    "opencv-16t": partial(opencv, threads=16),
}
CASES = [
    "nv12-1080p-224-eval", "nv12-1080p-224-train", "nv12-256p-224-train", "p010-1080p-224-eval", "nv12-1080p-512-train",
]  # fmt: skip
NEAR = 0.25
"""Mean difference from the reference, in standard deviations, that other ways of scaling chroma and rounding stay within."""


@dataclass(frozen=True)
class Batch:
    """Clips, and (8, 3, T, H, W) bf16 that they are made into."""

    clips: Sequence[Clip]
    out: torch.Tensor


def measure(make: Make, batches: Sequence[Batch], runs: int, budget: float, *, on_host: bool) -> dict[str, list[float]]:
    """Milliseconds a clip by metric; device time only where there is a device that does the work."""
    device = batches[0].out.device
    for _ in range(WARM_UPS):
        for batch in batches:
            make(batch.clips, batch.out)
        wait(device)
    values: dict[str, list[float]] = {HOST_METRIC: []}
    began = time.perf_counter()
    while len(values[HOST_METRIC]) < runs and (time.perf_counter() - began < budget or len(values[HOST_METRIC]) < 3):
        batch = batches[len(values[HOST_METRIC]) % len(batches)]
        wait(device)
        begin = time.perf_counter()
        make(batch.clips, batch.out)
        spent = time.perf_counter() - begin
        values[HOST_METRIC].append(1000 * spent / len(batch.clips))
        if device.type == "cuda" and not on_host:
            wait(device)
            values.setdefault(DEVICE_METRIC, []).append(device_time(make, batches, 2 * spent * len(batches)))
    return values


def device_time(make: Make, batches: Sequence[Batch], enqueuing: float) -> float:
    """Milliseconds of the device a clip, where the batches are enqueued within so many seconds."""
    begin, end = timer(), timer()
    torch.cuda._sleep(int((enqueuing + 0.001) * CYCLES_A_SECOND))  # type: ignore[no-untyped-call]
    begin.record()
    for batch in batches:
        make(batch.clips, batch.out)
    end.record()
    end.synchronize()
    elapsed: float = begin.elapsed_time(end)
    return elapsed / sum(len(batch.clips) for batch in batches)


def timer() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def reference(case: Case, clip: Clip) -> torch.Tensor:
    """(3, T, H, W) by the float reference on the CPU."""
    transform = ClipTransform(case.config.model_copy(update={"dtype": "float32"}), FRAMES)
    out = torch.empty(transform.clip_shape)
    planes = Planes(clip.planes.data.cpu(), clip.planes.format)
    transform.apply(planes, clip.info, clip.params, range(FRAMES), out)
    return out


def copy_of(clips: Sequence[Clip], case: Case, source: torch.device, target: torch.device) -> Batch:
    """A batch of the same clips with planes of its own."""
    planes = [Planes(clip.planes.data.to(source, copy=True), clip.planes.format) for clip in clips]
    out = torch.empty((CLIPS, 3, FRAMES, *case.config.size), dtype=torch.bfloat16, device=target)
    return Batch([Clip(p, clip.info, clip.params) for p, clip in zip(planes, clips, strict=True)], out)


def rows_of(case: Case, subjects: Sequence[str], device: torch.device, runs: int, budget: float) -> list[Row]:
    clips = make_clips(case, device)
    held = sum(clip.planes.data.nbytes for clip in clips)
    copies = -(-COLD_BYTES // held) if device.type == "cuda" else 1
    expected = reference(case, clips[0])
    rows = []
    for subject in subjects:
        on_host = subject.startswith("opencv")
        try:
            if on_host and case.bits > 8:
                raise ValueError("OpenCV converts no P010")
            batches = [copy_of(clips, case, torch.device("cpu") if on_host else device, device) for _ in range(copies)]
            values = measure(SUBJECTS[subject](case), batches, runs, budget, on_host=on_host)
            off = float((batches[-1].out[0].float().cpu() - expected).abs().mean())
            if off > NEAR:
                raise RuntimeError(f"wrong output: {off:.2f} off the reference in the mean")
            rows += [summarise(case.name, subject, metric, some, "lower") for metric, some in values.items()]
        except Exception as fault:  # whatever a peer raises is its result, told in its row
            rows.append(failed(case.name, subject, DEVICE_METRIC, f"{type(fault).__name__}: {fault}", "lower"))
    if device.type == "cuda":
        rows.append(summarise(case.name, "limit", DEVICE_METRIC, limits(clips, case), "lower"))
    for row in rows:
        shown = f"{row.value:9.4f}  ({row.low:.4f} to {row.high:.4f})" if row.value is not None else f"failed: {row.error}"
        print(f"{row.case:22} {row.subject:24} {row.metric:17} {shown}", flush=True)
    return rows


def limits(clips: Sequence[Clip], case: Case) -> list[float]:
    """Milliseconds that the bytes of a clip need: each crop read once and each clip written once, at the rate of a copy."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=clips[0].planes.data.device)
    target = torch.empty_like(source)
    rates = []
    for _ in range(5):
        begin, end = timer(), timer()
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        rates.append(2 * COPY_BYTES / begin.elapsed_time(end))
    height, width = case.config.size
    read = statistics.mean(1.5 * c.params.crop[2] * c.params.crop[3] * c.planes.format.sample_bytes for c in clips)
    return [FRAMES * (read + 2 * 3 * height * width) / rate for rate in rates[1:]]


def _case_name(name: str) -> str:
    try:
        return case_of(name).name
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main() -> None:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--cases", nargs="+", type=_case_name, default=CASES)
    command.add_argument("--subjects", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))
    command.add_argument("--device", default="cuda:0")
    command.add_argument("--runs", type=int, default=30)
    command.add_argument("--budget", type=float, default=5.0, help="seconds after which a slow subject stops early")
    command.add_argument("--out", type=Path, default=RESULTS)
    command.add_argument("--quick", action="store_true", help="a tiny case on the CPU, to see that everything runs")
    options = command.parse_args()
    if options.quick:
        options.cases, options.device, options.runs = ["nv12-tiny-32-train", "nv12-tiny-32-eval"], "cpu", 3
        options.subjects = ["gpupipe"]
    from gpupipe.observe.measure import machine_facts

    device = torch.device(options.device)
    cases = [case_of(name) for name in options.cases]
    rows = [row for case in cases for row in rows_of(case, options.subjects, device, options.runs, options.budget)]
    facts = machine_facts()
    if device.type == "cpu":
        facts["gpu"] = None
    print(write_results("transform", rows, facts, options.out))


if __name__ == "__main__":
    main()

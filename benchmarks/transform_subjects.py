"""The subjects of bench_transform.py: each makes the clips of a case into one batch, with the parameters that were drawn."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from transform_cases import FRAMES, Case, Clip
from transform_dali import Dali

from gpupipe.data.transform import ClipInput, ClipTransform, TransformParams
from gpupipe.device.inventory import load

Make = Callable[[Sequence[Clip], torch.Tensor], None]
"""Makes clips into a batch (8, 3, T, H, W) bf16."""
Pixels = NDArray[Any]
"""(H, W, 3) RGB of one frame."""
Frame = Callable[[Clip, int], Pixels]
"""Makes one frame of a clip: (height, width, 3) float32, normalised."""


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
    V: Any = load("torchvision.transforms.v2.functional")
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


def kornia(case: Case) -> Make:
    """kornia's own functions, those of its RandomResizedCrop, ColorJitter and Normalize, a clip's frames being its batch.

    RGB is made by torch, as for torchvision: kornia's YUV is that of PAL in full range, and it has none for BT.709. Its
    antialias is a Gaussian before a bilinear resize, not a wider filter: the result differs a little.
    """
    load("kornia")
    enhance: Any = load("kornia.enhance")
    geometry: Any = load("kornia.geometry.transform")
    changes = {
        "brightness": enhance.adjust_brightness_accumulative,
        "contrast": enhance.adjust_contrast_with_mean_subtraction,
        "saturation": enhance.adjust_saturation_with_gray_subtraction,
        "hue": lambda rgb, turns: enhance.adjust_hue(rgb, 2 * math.pi * turns),
    }
    step = float(2 ** (case.bits - 8) << (6 if case.bits > 8 else 0))

    @functools.cache
    def scale(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor(case.config.mean, device=device), torch.tensor(case.config.std, device=device)

    def make(clips: Sequence[Clip], out: torch.Tensor) -> None:
        for clip, slot in zip(clips, out, strict=True):
            planes, params = clip.planes, clip.params
            top, left, rows, columns = (round(value) for value in params.crop)
            rgb = rgb_of(planes.y, planes.u, planes.v, step)[..., top : top + rows, left : left + columns]
            rgb = geometry.resize(rgb, case.config.size, antialias=True)
            rgb = geometry.hflip(rgb) if params.hflip else rgb
            for op in params.color:
                rgb = changes[op.name](rgb, op.value)
            slot.copy_(enhance.normalize(rgb, *scale(rgb.device)).transpose(0, 1))

    return make


def frame_by_frame(case: Case, frame: Frame, threads: int) -> Make:
    """On the CPU: all frames of a batch by so many threads, then the batch to the device as one."""
    height, width = case.config.size

    def make(clips: Sequence[Clip], out: torch.Tensor) -> None:
        jobs = [(clip, number) for clip in clips for number in range(FRAMES)]
        with ThreadPoolExecutor(threads) as pool:
            frames = list(pool.map(lambda job: frame(*job), jobs)) if threads > 1 else [frame(*job) for job in jobs]
        whole = torch.from_numpy(np.stack(frames)).view(len(clips), FRAMES, height, width, 3)
        out.copy_(whole.permute(0, 4, 1, 2, 3).to(torch.bfloat16))

    return make


def rgb_by_opencv(case: Case) -> Frame:
    """Frames of the source as 8-bit RGB, by the only matrix that OpenCV has, BT.601.

    Raises:
        ValueError: for P010, which OpenCV does not convert.
    """
    cv2: Any = load("cv2")
    if case.bits > 8:
        raise ValueError("OpenCV converts no P010")
    cv2.setNumThreads(1)

    def rgb(clip: Clip, number: int) -> Pixels:
        nv12 = clip.planes.data[number, :, : clip.planes.format.width].numpy()
        converted: Pixels = cv2.cvtColor(np.ascontiguousarray(nv12), cv2.COLOR_YUV2RGB_NV12)
        return converted

    return rgb


def opencv(case: Case, *, threads: int) -> Make:
    """OpenCV on the CPU, frame by frame from host memory: colour conversion, crop, INTER_AREA, flip, colours, normalisation."""
    cv2: Any = load("cv2")
    source = rgb_by_opencv(case)
    height, width = case.config.size
    mean, std = (np.array(values, np.float32) for values in (case.config.mean, case.config.std))
    grey = np.array([0.2989, 0.587, 0.114], np.float32)

    def colours(rgb: Pixels, params: TransformParams) -> Pixels:
        for op in params.color:
            if op.name == "hue":
                hsv = cv2.cvtColor(rgb, cv2.COLOR_RGB2HSV)
                hsv[..., 0] = (hsv[..., 0] + 360 * op.value) % 360
                rgb = cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB)
                continue
            luma: Pixels = (rgb @ grey)[..., None]
            other = {"brightness": 0 * luma, "contrast": luma.mean(keepdims=True), "saturation": luma}[op.name]
            rgb = np.clip(op.value * rgb + (1 - op.value) * other, 0, 1).astype(np.float32)
        return rgb

    def frame(clip: Clip, number: int) -> Pixels:
        top, left, rows, columns = (round(value) for value in clip.params.crop)
        crop = source(clip, number)[top : top + rows, left : left + columns]
        small = cv2.resize(crop, (width, height), interpolation=cv2.INTER_AREA)
        small = small[:, ::-1] if clip.params.hflip else small
        finished: Pixels = (colours(small.astype(np.float32) / 255, clip.params) - mean) / std
        return finished

    return frame_by_frame(case, frame, threads)


def albumentations(case: Case, *, threads: int) -> Make:
    """albumentations' own transforms, frame by frame from host memory, on RGB made by OpenCV: all in 8 bits up to Normalize."""
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # else its import asks a server for its newest version
    A: Any = load("albumentations")
    source = rgb_by_opencv(case)
    crop = A.RandomResizedCrop(size=case.config.size, area_for_downscale="image")
    flip, jitter = A.HorizontalFlip(), A.ColorJitter()
    normalize = A.Normalize(mean=case.config.mean, std=case.config.std)
    numbers = {"brightness": 0, "contrast": 1, "saturation": 2, "hue": 3}

    def frame(clip: Clip, number: int) -> Pixels:
        params = clip.params
        top, left, rows, columns = (round(value) for value in params.crop)
        rgb = crop.apply(source(clip, number), crop_coords=(left, top, left + columns, top + rows))
        rgb = flip.apply(rgb) if params.hflip else rgb
        if params.color:
            factors = {"brightness": 1.0, "contrast": 1.0, "saturation": 1.0, "hue": 0.0}
            factors.update({op.name: op.value for op in params.color})
            rgb = jitter.apply(rgb, **factors, order=[numbers[op.name] for op in params.color])
        finished: Pixels = normalize.apply(rgb)
        return finished

    return frame_by_frame(case, frame, threads)


@dataclass(frozen=True)
class Subject:
    """What is measured."""

    prepare: Callable[[Case, torch.device], Make]
    package: str = "torch"
    """Which it needs."""
    on_host: bool = False
    """Whether it works on the CPU, from planes in host memory."""
    eager: bool = False
    """Whether all that it does are operations of torch, so that their bytes can be counted."""
    quick: bool = True
    """Whether ``--quick`` runs it, where its package is there."""


def _of(prepare: Callable[[Case], Make]) -> Callable[[Case, torch.device], Make]:
    return lambda case, _: prepare(case)


SUBJECTS: dict[str, Subject] = {
    "gpupipe": Subject(_of(gpupipe)),
    "torchvision-v2": Subject(_of(partial(torchvision, compiled=False)), "torchvision", eager=True),
    "torchvision-v2-compile": Subject(_of(partial(torchvision, compiled=True)), "torchvision", quick=False),
    "kornia": Subject(_of(kornia), "kornia", eager=True),
    "dali": Subject(Dali, "nvidia.dali.experimental.dynamic"),
    "opencv-1t": Subject(_of(partial(opencv, threads=1)), "cv2", on_host=True),
    "opencv-16t": Subject(_of(partial(opencv, threads=16)), "cv2", on_host=True),
    "albumentations-1t": Subject(_of(partial(albumentations, threads=1)), "albumentations", on_host=True),
    "albumentations-16t": Subject(_of(partial(albumentations, threads=16)), "albumentations", on_host=True),
}

"""Made-up decoded planes, and what a transform of them must give, worked out the long way in float64."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from gpupipe.config import TransformConfig
from gpupipe.data.transform import ClipInput, ClipTransform, TransformParams, affine
from gpupipe.data.transform.color import rgb_from_codes
from gpupipe.data.transform.params import ColorOp
from gpupipe.types import PlaneFormat, Planes, VideoInfo

SUBSAMPLING = {"420": (2, 2), "422": (1, 2), "444": (1, 1), "440": (2, 1), "411": (1, 4)}
"""Luma rows and columns of one chroma sample."""


def make_info(width: int, height: int, **facts: Any) -> VideoInfo:
    return VideoInfo(
        path="made up", container="none", codec="none", pix_fmt="none", width=width, height=height, frames=1,
        time_base=Fraction(1, 30), fps=30.0, start_seconds=0.0, duration_seconds=1.0, **facts,
    )  # fmt: skip


def make_format(
    width: int, height: int, chroma: str = "420", *, bits: int = 8, p016: bool = False, nv: bool = False
) -> PlaneFormat:
    down, across = SUBSAMPLING[chroma]
    return PlaneFormat(
        width, height, -(-width // across), -(-height // down), bits, 16 - bits if p016 else 0, interleaved=nv or p016
    )


def make_planes(form: PlaneFormat, frames: int = 2, *, seed: int = 0, device: str = "cpu", smooth: bool = False) -> Planes:
    """Random codes over the whole range (the hardest picture for a resize), or with ``smooth`` a legal, slowly changing one.

    The pitch is a multiple of 32 bytes; what lies between the row's end and the pitch is random too, so that reading it shows.
    """
    rng = np.random.default_rng(seed)
    pitch = -(-form.row_samples // 32) * 32
    data = rng.integers(0, 2**form.bits, (frames, form.rows, pitch))
    if smooth:
        wave = np.sin(np.arange(form.rows)[:, None] / 17) * np.cos(np.arange(pitch)[None] / 23)
        data = ((0.5 + 0.2 * wave + 0.02 * rng.random(data.shape)) * 2**form.bits).astype(np.int64)
    word = torch.from_numpy((data << form.shift).astype(np.uint8 if form.bits == 8 else np.uint16))
    return Planes(word.to(device), form)


def random_params(rng: np.random.Generator, display_size: tuple[int, int]) -> TransformParams:
    """A box of whole pixels that is cut out first, or a fractional one whose filter may read the whole frame."""
    lengths = [int(rng.integers(1, extent + 1)) for extent in display_size]
    starts = [int(rng.integers(extent - length + 1)) for extent, length in zip(display_size, lengths, strict=True)]
    hflip = bool(rng.integers(2))
    if rng.integers(2):
        return TransformParams((*map(float, starts), *map(float, lengths)), (*starts, *lengths), hflip)
    return TransformParams((*map(float, starts), *(n * rng.uniform(0.3, 1) for n in lengths)), (0, 0, *display_size), hflip)


def random_case(seed: int, *, largest: int = 90, frames: int = 3) -> tuple[Planes, VideoInfo, TransformParams, TransformConfig]:
    """One combination of sample format, size, rotation, colour, box and output."""
    rng = np.random.default_rng(seed)

    def pick(*options: Any) -> Any:
        return options[rng.integers(len(options))]

    width, height = (int(n) for n in rng.integers(1, largest, 2))
    bits, interleaved, chroma = pick(8, 8, 10, 12), bool(rng.integers(2)), pick(*SUBSAMPLING)
    form = make_format(width, height, chroma, bits=bits, nv=interleaved, p016=interleaved and bits > 8)
    info = make_info(
        width, height, rotation=pick(0, 90, 180, 270), color_matrix=pick("bt601", "bt709", "bt2020", "rgb", None),
        color_range=pick("limited", "full", None), chroma_location=pick("left", "center", "topleft"), bit_depth=bits,
    )  # fmt: skip
    config = TransformConfig(
        size=(int(rng.integers(1, 50)), int(rng.integers(1, 50))), antialias=pick(True, True, False),
        dtype=pick("float32", "float32", "float16", "bfloat16", "uint8"), layout=pick("NCTHW", "NTCHW"),
    )  # fmt: skip
    return make_planes(form, frames, seed=seed), info, random_params(rng, info.display_size), config


def batch_of(count: int, config: TransformConfig, *, colors: bool, device: str = "cpu") -> list[ClipInput]:
    """Clips of all sizes and formats for one transform of three frames."""
    clips, transform = [], ClipTransform(config, 3)
    for seed in range(count):
        rng = np.random.default_rng(seed)
        planes, info, params, _ = random_case(seed)
        color = tuple(drawn_ops(rng)) if colors else ()
        out = torch.full(transform.clip_shape, 77, dtype=transform.dtype, device=device)
        planes = Planes(planes.data.to(device), planes.format)
        clips.append(ClipInput(planes, info, replace(params, color=color), [int(f) for f in rng.integers(3, size=3)], out))
    return clips


def moved_case(seed: int) -> tuple[Planes, VideoInfo, TransformParams, TransformConfig]:
    """One combination like those of :func:`random_case`, turned and sheared or with another filter than bilinear."""
    planes, info, params, config = random_case(seed)
    rng = np.random.default_rng([seed, 1])
    filter = str(rng.choice(["nearest", "bilinear", "bicubic"]))
    config = config.model_copy(update={"interpolation": filter, "fill": tuple(rng.random(3).tolist())})
    if filter == "bilinear" or rng.integers(2):
        angle, scale = float(rng.uniform(-180, 180)), float(np.exp(rng.uniform(-1.5, 1.5)))
        shear, shift = (float(a) for a in rng.uniform(-40, 40, 2)), (float(a) for a in rng.uniform(-9, 9, 2))
        turn = affine.inverse(config.size, angle=angle, translate=tuple(shift), scale=scale, shear=tuple(shear))  # type: ignore[arg-type]
        params = replace(params, affine=turn, vflip=bool(rng.integers(2)))
    return planes, info, params, config


def reference(clip: ClipInput, config: TransformConfig) -> torch.Tensor:
    """(T, 3, H, W) float64: the clip by the reference; for uint8 not yet rounded."""
    transform = ClipTransform(config, len(clip.blend or clip.frame_map))
    out = torch.zeros(transform.clip_shape, dtype=torch.float64)
    planes = Planes(clip.planes.data.cpu(), clip.planes.format)
    transform.apply_batch([replace(clip, planes=planes, out=out)])
    return out.transpose(0, 1) if config.layout == "NCTHW" else out


def drawn_ops(rng: np.random.Generator) -> list[ColorOp]:
    values = {
        "brightness": rng.uniform(0, 2), "saturation": rng.uniform(0, 2), "contrast": rng.uniform(0, 2),
        "hue": rng.uniform(-0.5, 0.5), "grayscale": 0.0, "channel_drop": float(rng.integers(3)),
        "posterize": float(rng.integers(1, 8)), "solarize": rng.uniform(0.2, 0.9),
    }  # fmt: skip
    names = rng.permutation(list(values))[: rng.integers(0, 6)]
    return [ColorOp(str(name), float(values[str(name)])) for name in names]  # type: ignore[arg-type]


def steep(ops: Sequence[ColorOp]) -> bool:
    """Whether a rounding error may move a pixel over a step."""
    return any(op.name in ("posterize", "solarize") for op in ops)


def run(
    config: TransformConfig, planes: Planes, info: VideoInfo, params: TransformParams, frame_map: Sequence[int]
) -> torch.Tensor:
    """The clip in its layout."""
    transform = ClipTransform(config, len(frame_map))
    out = torch.full(transform.clip_shape, 77, dtype=transform.dtype, device=planes.data.device)
    transform.apply(planes, info, params, frame_map, out)
    return out


def rgb_exact(planes: Planes, info: VideoInfo, **untagged: str) -> torch.Tensor:
    """(N, 3, H, W) float64 RGB of the displayed size, not clamped: chroma brought to full size, then the matrix."""
    form = planes.format

    def full_size(plane: torch.Tensor) -> np.ndarray:
        values = plane.numpy().astype(np.float64)
        for axis, size in ((1, form.height), (2, form.width)):
            count = values.shape[axis]
            if count == size:
                continue
            factor = next(f for f in (1, 2, 4) if -(-size // f) == count)
            cosited = info.chroma_location == "topleft" or (info.chroma_location == "left" and axis == 2)
            places = np.arange(count) * factor + (0 if cosited else (factor - 1) / 2)
            weights = np.array([np.interp(np.arange(size), places, unit) for unit in np.eye(count)])
            values = np.moveaxis(np.tensordot(values, weights, axes=(axis, 0)), -1, axis)
        return values

    yuv = np.stack([full_size(planes.y), full_size(planes.u), full_size(planes.v)], axis=1)
    matrix = rgb_from_codes(info, form, **untagged)
    rgb = np.einsum("rc,nchw->nrhw", matrix[:, :3], yuv) + matrix[:, 3][:, None, None]
    return torch.rot90(torch.from_numpy(rgb), -info.rotation // 90, (2, 3))


def resize_exact(rgb: torch.Tensor, params: TransformParams, size: tuple[int, int], *, antialias: bool) -> torch.Tensor:
    """Cut to ``bounds``, then PyTorch's resize for boxes that fill them, else the definition written out for each output.

    PyTorch 2.13 mixes up rows when it resizes to a width of 1 with antialias on the CPU (the transposed picture comes out
    otherwise), so that width is written out too.
    """
    top, left, height, width = params.bounds
    inner = rgb[:, :, top : top + height, left : left + width]
    if params.crop == tuple(map(float, params.bounds)) and size[1] > 1:
        return torch.nn.functional.interpolate(inner, size=size, mode="bilinear", antialias=antialias, align_corners=False)
    weights = []
    for k in (0, 1):
        scale = params.crop[k + 2] / size[k]
        support = max(scale, 1.0) if antialias else 1.0
        matrix = np.zeros((size[k], params.bounds[k + 2]))
        for i, x in itertools.product(range(size[k]), range(params.bounds[k + 2])):
            centre = params.crop[k] - params.bounds[k] + scale * (i + 0.5)
            matrix[i, x] = max(0.0, 1 - abs(x + 0.5 - centre) / support)
        weights.append(torch.from_numpy(matrix / matrix.sum(axis=1, keepdims=True)))
    return torch.einsum("ih,nchw,jw->ncij", weights[0], inner, weights[1])


def clip_exact(
    planes: Planes, info: VideoInfo, params: TransformParams, config: TransformConfig, frame_map: Sequence[int]
) -> torch.Tensor:
    """(T, 3, H, W) float64, what every implementation must approach; for uint8 not yet rounded."""
    untagged = {"untagged_matrix": config.untagged_matrix, "untagged_range": config.untagged_range}
    rgb = resize_exact(rgb_exact(planes, info, **untagged), params, config.size, antialias=config.antialias).clamp(0, 1)
    if config.dtype == "uint8":
        rgb = rgb * 255
    else:
        mean, std = (torch.tensor(c, dtype=torch.float64)[:, None, None] for c in (config.mean, config.std))
        rgb = (rgb - mean) / std
    return (rgb.flip(3) if params.hflip else rgb)[list(frame_map)]


def tolerance(config: TransformConfig, unit: float) -> float:
    """How far a clip of ``config`` may be off when RGB in [0, 1] may be off by ``unit``, rounding to its dtype included."""
    if config.dtype == "uint8":
        return 0.5 + 255 * unit
    largest = max(max(abs(0 - m), abs(1 - m)) / s for m, s in zip(config.mean, config.std, strict=True))
    relative = {"float32": 2.0**-22, "float16": 2.0**-11, "bfloat16": 2.0**-8}[config.dtype]
    return unit / min(config.std) + largest * relative


def assert_clip(clip: torch.Tensor, expected: torch.Tensor, config: TransformConfig, unit: float) -> None:
    """``clip`` in its layout, ``expected`` as (T, 3, H, W)."""
    actual = clip.transpose(0, 1) if config.layout == "NCTHW" else clip
    assert actual.shape == expected.shape
    worst = float((actual.cpu().double() - expected.cpu().double()).abs().max())
    assert worst <= tolerance(config, unit), f"off by {worst}, allowed {tolerance(config, unit)}"

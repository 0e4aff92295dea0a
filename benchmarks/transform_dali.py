"""DALI's operators as a subject of bench_transform.py: called one by one (DALI's dynamic mode) on a stream that is given.

A pipeline of DALI has streams of its own, and begins on planes that it need not copy without a look at the stream that they are
of: its work could not be timed like that of the others. Its operators are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transform_cases import Case, Clip

from gpupipe.data.transform.color import rgb_from_codes
from gpupipe.device.inventory import load

THREADS = 4
"""That DALI may use on the host; its operators on the GPU need next to none."""
WHITE = 255.0
NEUTRAL = {"brightness": 1.0, "contrast": 1.0, "saturation": 1.0, "hue": 0.0}


class Dali:
    """A batch by a handful of operators, each of which makes all clips at once.

    DALI has no operator for NV12: luma and chroma are cropped and resized as pictures of one and two channels, joined, and made
    RGB by ``coord_transform``. That is less work than RGB of the whole frame would be. DALI takes no rows with padding: it gets
    copies of the planes without it, which are made once and are no part of its time.

    ``color_twist`` does hue, saturation, contrast and brightness in this order, whatever order was drawn; contrast turns about
    mid-grey, not about the frame's mean, and hue is a rotation in YIQ: as much work, but not the same colours. RGB has 8 bits,
    and so have resized NV12 planes.

    Raises:
        DeviceError: when DALI, or nvtx, which its operators need, cannot be imported.
    """

    def __init__(self, case: Case, device: torch.device) -> None:
        load("nvidia.dali")
        load("nvtx")
        self._ops: Any = load("nvidia.dali.experimental.dynamic")
        self._types: Any = load("nvidia.dali.types")
        self._case = case
        self._resized_dtype = self._types.UINT8 if case.bits == 8 else self._types.FLOAT
        # dlpack knows no stream 0, so that torch's default stream would not do.
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        options: dict[str, Any] = {"num_threads": THREADS}
        if self._stream is not None:
            options |= {"device_id": self._stream.device_index, "cuda_stream": self._stream}
        self._context: Any = self._ops.EvalContext(**options)
        self._planes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, clips: Sequence[Clip], out: torch.Tensor) -> None:
        stream = self._stream
        luma, chroma = self._unpadded(clips)
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        # In this mode an operator is called by this thread and has enqueued its kernels when it returns.
        with nullcontext() if stream is None else torch.cuda.stream(stream), self._context, self._ops.EvalMode.sync_cpu:
            out.copy_(self._made(luma, chroma, clips).torch())
        if stream is not None:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def _unpadded(self, clips: Sequence[Clip]) -> tuple[torch.Tensor, torch.Tensor]:
        """Luma (N, T, H, W, 1) and chroma (N, T, H / 2, W / 2, 2) of clips, copied when they come for the first time."""
        key = clips[0].planes.data.data_ptr()
        if key not in self._planes:
            luma = _stacked([clip.planes.y for clip in clips], 0)[..., None]
            chroma = _stacked([_stacked([clip.planes.u, clip.planes.v], -1) for clip in clips], 0)
            self._planes[key] = luma, chroma
        return self._planes[key]

    def _made(self, luma: torch.Tensor, chroma: torch.Tensor, clips: Sequence[Clip]) -> Any:
        """The batch (N, 3, T, H, W) float16, DALI having no bfloat16."""
        ops, types, config = self._ops, self._types, self._case.config
        crops = np.array([clip.params.crop for clip in clips], np.float32)
        start, end = crops[:, :2].copy(), crops[:, :2] + crops[:, 2:]
        joined = ops.cat(self._resized(luma, start, end), self._resized(chroma, start / 2, end / 2), axis_name="C")
        matrix = WHITE * rgb_from_codes(clips[0].info, clips[0].planes.format)
        rgb = ops.coord_transform(
            joined, M=matrix[:, :3].astype(np.float32), T=matrix[:, 3].tolist(), dtype=self._resized_dtype
        )
        if self._resized_dtype != types.UINT8:
            rgb = ops.cast(rgb, dtype=types.UINT8)
        if any(clip.params.color for clip in clips):
            drawn = [NEUTRAL | {op.name: op.value for op in clip.params.color} for clip in clips]
            factors = {name: np.array([each[name] for each in drawn], np.float32) for name in NEUTRAL}
            factors["hue"] *= 360
            rgb = ops.color_twist(rgb, **{name: ops.as_batch(values) for name, values in factors.items()})
        return ops.crop_mirror_normalize(
            rgb, mirror=ops.as_batch(np.array([clip.params.hflip for clip in clips], np.int32)),
            mean=[WHITE * value for value in config.mean], std=[WHITE * value for value in config.std],
            dtype=types.FLOAT16, output_layout="CFHW",
        )  # fmt: skip

    def _resized(self, plane: torch.Tensor, start: NDArray[Any], end: NDArray[Any]) -> Any:
        ops, types = self._ops, self._types
        return ops.resize(
            ops.as_batch(plane, layout="FHWC"), size=list(self._case.config.size),
            roi_start=ops.as_batch(start), roi_end=ops.as_batch(end), antialias=True, interp_type=types.INTERP_LINEAR,
            dtype=self._resized_dtype,
        )  # fmt: skip


def _stacked(planes: list[torch.Tensor], axis: int) -> torch.Tensor:
    """Contiguous. torch moves uint16 about, but need not have every operation for it."""
    kind = planes[0].dtype
    same = torch.int16 if kind == torch.uint16 else kind
    return torch.stack([plane.view(same) for plane in planes], axis).view(kind)

"""From decoded planes to clips: draw the parameters, fold them, and write the result straight into the batch.

``params`` draws, ``geometry`` says which samples make an output pixel, ``color`` what their codes mean; ``reference`` applies
that in torch on the CPU and ``kernel`` in one CUDA launch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gpupipe.config import TransformConfig
from gpupipe.data.transform import kernel, reference, resize
from gpupipe.data.transform import params as drawing
from gpupipe.data.transform.color import rgb_from_codes
from gpupipe.data.transform.geometry import Geometry, geometry
from gpupipe.data.transform.params import TransformParams
from gpupipe.data.transform.reference import Color
from gpupipe.errors import GraphError
from gpupipe.types import Planes, VideoInfo

__all__ = ["ClipTransform", "TransformParams", "to_rgb"]

_CHANNELS = 3


class ClipTransform:
    """Makes clips of one shape, as a :class:`TransformConfig` asks, out of decoded frames.

    Args:
        config: crop, size, flip, normalisation, dtype and layout.
        frames: T, the frames of a clip.

    Attributes:
        clip_shape: (3, T, H, W) for layout ``NCTHW``, (T, 3, H, W) for ``NTCHW``.
        dtype: the clip's torch dtype.
    """

    def __init__(self, config: TransformConfig, frames: int) -> None:
        self.config = config
        self.frames = frames
        height, width = config.size
        channels_first = config.layout == "NCTHW"
        self.clip_shape: tuple[int, ...] = (
            (_CHANNELS, frames, height, width) if channels_first else (frames, _CHANNELS, height, width)
        )
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        if self.dtype == torch.uint8:
            self._gain, self._bias = np.full(_CHANNELS, 255.0), np.zeros(_CHANNELS)
        else:
            self._gain = 1 / np.array(config.std)
            self._bias = -np.array(config.mean) / np.array(config.std)

    def compile(self) -> None:
        """Makes the CUDA kernel for 8-bit video ready ahead of the first clip.

        Raises:
            DeviceError: when it cannot be compiled here.
        """
        kernel.compile_for(1, self.dtype)
        resize.compile_for(1, self.dtype)

    def draw(self, info: VideoInfo, rng: np.random.Generator) -> TransformParams:
        """Draws one clip's crop and flip; generators in equal states give equal parameters."""
        return drawing.draw(self.config, info.display_size, rng)

    def apply(
        self, planes: Planes, info: VideoInfo, params: TransformParams, frame_map: Sequence[int], out: torch.Tensor
    ) -> None:
        """Writes one clip into ``out``, on ``out``'s device; on CUDA by a kernel on the current stream.

        Args:
            planes: decoded frames of the video, on ``out``'s device.
            info: the video's size, rotation and colour.
            params: what :meth:`draw` gave.
            frame_map: T positions into ``planes``, repeats and any order allowed.
            out: a slot of the batch, ``clip_shape`` of ``dtype``; every element is written.

        Raises:
            GraphError: when ``out``, ``frame_map``, ``params`` or ``planes`` do not fit this transform or each other.
        """
        if tuple(out.shape) != self.clip_shape or out.dtype != self.dtype:
            raise GraphError(
                f"the transform makes {self.dtype} clips of shape {self.clip_shape}, out is {out.dtype} {tuple(out.shape)}",
                path=info.path,
            )
        if len(frame_map) != self.frames:
            raise GraphError(f"frame_map names {len(frame_map)} frames, the clip has {self.frames}", path=info.path)
        config = self.config
        matrix = rgb_from_codes(
            info, planes.format, untagged_matrix=config.untagged_matrix, untagged_range=config.untagged_range
        )
        color = Color(matrix.astype(np.float32), self._gain.astype(np.float32), self._bias.astype(np.float32))
        sampling = geometry(info, planes.format, params, config.size, antialias=config.antialias)
        _run(planes, info, sampling, color, frame_map, out.transpose(0, 1) if config.layout == "NCTHW" else out)


def to_rgb(planes: Planes, info: VideoInfo, *, untagged_matrix: str = "auto", untagged_range: str = "limited") -> torch.Tensor:
    """All frames of ``planes`` as (N, 3, H, W) uint8 RGB of the displayed size, on the planes' device.

    Display rotation is applied, pixel aspect is not; deep samples are scaled to 8 bits without tone mapping. Values are rounded
    to nearest. ``untagged_matrix`` and ``untagged_range`` mean what they mean in :class:`TransformConfig`.
    """
    matrix = rgb_from_codes(info, planes.format, untagged_matrix=untagged_matrix, untagged_range=untagged_range)
    color = Color(matrix.astype(np.float32), np.full(3, 255, np.float32), np.zeros(3, np.float32))
    size = info.display_size
    out = torch.empty((len(planes), _CHANNELS, *size), dtype=torch.uint8, device=planes.data.device)
    _run(planes, info, geometry(info, planes.format, drawing.whole(size), size), color, range(len(planes)), out)
    return out


def _run(
    planes: Planes, info: VideoInfo, sampling: Geometry, color: Color, frame_map: Sequence[int], out: torch.Tensor
) -> None:
    """``out`` is (T, 3, H, W) of any strides."""
    wrong = [f for f in frame_map if not 0 <= f < len(planes)]
    if wrong:
        raise GraphError(f"frame_map asks for frame {wrong[0]} of {len(planes)} decoded frames", path=info.path)
    word = torch.uint8 if planes.format.sample_bytes == 1 else torch.uint16
    if planes.data.dtype != word:
        raise GraphError(f"{planes.format.bits}-bit planes must be {word}, not {planes.data.dtype}", path=info.path)
    if planes.data.device != out.device:
        raise GraphError(f"planes are on {planes.data.device}, the clip on {out.device}", path=info.path)
    if out.is_cuda and resize.serves(sampling):
        resize.transform([resize.Clip(planes, sampling, color, frame_map, out)])
    elif out.is_cuda:
        kernel.transform(planes, sampling, color, frame_map, out)
    elif out.device.type == "cpu":
        reference.transform(planes, sampling, color, frame_map, out)
    else:
        raise GraphError(f"clips are made on CPU and CUDA devices, not on {out.device}", path=info.path)

"""From decoded planes to clips: draw the parameters, fold them, and write the result straight into the batch.

``draw`` draws ``params``, ``geometry`` says which samples make an output pixel, ``color`` what their codes mean; ``reference``
applies that in torch on the CPU, ``affine`` turns and shears, ``adjust`` changes colours and blurs. On CUDA ``fuse`` makes the
clips of a batch together by ``resize``, ``move``, ``finish`` and ``gaussian``. What these do not serve is made clip by clip:
sampled by the same kernels, then changed by ``levels``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from gpupipe.config import TransformConfig
from gpupipe.data.stop import Stop, never
from gpupipe.data.transform import draw as drawing
from gpupipe.data.transform import finish, fuse, gaussian, levels, move, resize, targets
from gpupipe.data.transform.adjust import adjust, blur, fold
from gpupipe.data.transform.fuse import ClipInput, Fuser, Scratch
from gpupipe.data.transform.params import Box, Size, TransformParams, check, whole
from gpupipe.data.transform.picture import CHANNELS, UNIT, Picture, store
from gpupipe.errors import GraphError
from gpupipe.types import Planes, VideoInfo

__all__ = ["ClipInput", "ClipTransform", "TransformParams", "to_rgb"]


class ClipTransform:
    """Makes clips of one shape, as a :class:`TransformConfig` asks, out of decoded frames.

    Args:
        config: everything from the crop to the layout.
        frames: T, the frames of a clip.

    Attributes:
        clip_shape: (3, T, H, W) for layout ``NCTHW``, (T, 3, H, W) for ``NTCHW``.
        time_axis: the axis of T among these.
        dtype: the clip's torch dtype.
        memory_format: how the elements of a batch of such clips lie.
    """

    def __init__(self, config: TransformConfig, frames: int) -> None:
        self.config = config
        self.frames = frames
        height, width = config.size
        channels_first = config.layout == "NCTHW"
        self.clip_shape: tuple[int, ...] = (
            (CHANNELS, frames, height, width) if channels_first else (frames, CHANNELS, height, width)
        )
        self.time_axis = 1 if channels_first else 0
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.memory_format: torch.memory_format = getattr(torch, config.memory_format)
        if self.dtype == torch.uint8:
            self._scale = np.full(CHANNELS, 255.0), np.zeros(CHANNELS)
        else:
            self._scale = 1 / np.array(config.std), -np.array(config.mean) / np.array(config.std)
        self._fuser = Fuser(config, self._scale, self.dtype)

    def compile(self) -> None:
        """Makes the CUDA kernel for 8-bit video ready ahead of the first clip.

        Raises:
            DeviceError: when it cannot be compiled here.
        """
        config = self.config
        stretches = config.interpolation == "bilinear"
        if config.color_jitter or config.auto_augment or config.grayscale or config.channel_drop:
            finish.compile_for(self.dtype)
        if config.blur:
            gaussian.compile_for(self.dtype)
        if config.auto_augment:
            levels.compile_for()
        if config.affine or config.auto_augment or not stretches:
            for textured in (True, False):
                move.compile_for(1, self.dtype, textured=textured)
        if stretches:
            resize.compile_for(1, self.dtype)

    def draw(
        self, info: VideoInfo, rng: np.random.Generator, clip: int = 0, *, displayed: Size | None = None
    ) -> TransformParams:
        """Draws one clip's parameters; generators in equal states give equal ones.

        Args:
            info: of the frames that are to be transformed.
            rng: where the draws come from.
            clip: its number among those of one visit to the video: it says which part ``crop="three"`` shows.
            displayed: (height, width) of the video's displayed frames, where ``info`` may be of others.
        """
        params = drawing.draw_clip(self.config, info.display_size, rng, self.frames, view=clip % self.config.crops)
        return params if displayed in (None, info.display_size) else replace(params, displayed=displayed)

    def apply(
        self,
        planes: Planes,
        info: VideoInfo,
        params: TransformParams,
        frame_map: Sequence[int],
        out: torch.Tensor,
        blend: Sequence[float] = (),
    ) -> None:
        """Writes one clip into ``out``: :meth:`apply_batch` with one clip, whose fields the arguments are."""
        self.apply_batch([ClipInput(planes, info, params, frame_map, out, blend)])

    def apply_batch(self, clips: Sequence[ClipInput], stop: Stop = never, scratch: Scratch | None = None) -> None:
        """Writes clips into their slots, which are on one device; on CUDA on the current stream.

        There, clips that are cut, resized bilinearly, turned by quarters and flipped share one launch, changes of colour that
        look at one pixel included; so do those that are moved otherwise or have another filter. One more follows for those with
        contrast, and one for those that are blurred. A launch has room for eight clips and 512 frames. Blended clips and those
        with other changes of colour are made one by one. A clip's bits do not depend on what else is in the batch.

        Args:
            clips: what to make, and where.
            stop: asked amid long work on the CPU.
            scratch: gives memory of the device to work in: so many bytes, uint8, that nothing else uses until the next call but
                on the current stream. None: torch's allocator does.

        Raises:
            Stopped: when ``stop()`` turned true.
            GraphError: when a clip's ``out``, ``frame_map``, ``params`` or ``planes`` do not fit this transform or each other.
        """
        for clip in clips:
            self._check(clip)
        left = self._fuser.make(clips, scratch) if clips and fuse.takes(clips[0].out) else clips
        if left:
            with torch.no_grad(), torch.autocast(device_type=left[0].out.device.type, enabled=False):
                for clip in left:
                    self._apply(clip, stop)
        if self.config.erasing is not None:
            with torch.no_grad():
                for clip in clips:
                    self._erase(clip)

    def _check(self, clip: ClipInput) -> None:
        out, info, frame_map = clip.out, clip.info, clip.frame_map
        dtypes = (self.dtype,) if fuse.takes(out) else (self.dtype, torch.float64)
        if out.shape != self.clip_shape or out.dtype not in dtypes:
            raise GraphError(
                f"the transform makes {self.dtype} clips of shape {self.clip_shape}, out is {out.dtype} {tuple(out.shape)}",
                path=info.path,
            )
        if len(clip.blend) not in (0, self.frames):
            raise GraphError(f"blend has {len(clip.blend)} shares, the clip has {self.frames} frames", path=info.path)
        if len(frame_map) != self.frames * (2 if clip.blend else 1):
            raise GraphError(f"frame_map names {len(frame_map)} frames, the clip has {self.frames}", path=info.path)
        if clip.params.frames and len(clip.params.frames) != self.frames:
            raise GraphError(f"params are of {len(clip.params.frames)} frames, the clip has {self.frames}", path=info.path)
        check(clip.params, self.config, info.path)
        count = len(clip.planes)
        if min(frame_map) < 0 or max(frame_map) >= count:
            wrong = next(f for f in frame_map if not 0 <= f < count)
            raise GraphError(f"frame_map asks for frame {wrong} of {count} decoded frames", path=info.path)
        if out.device.type not in ("cpu", "cuda"):
            raise GraphError(f"clips are made on CPU and CUDA devices, not on {out.device}", path=info.path)

    def _apply(self, clip: ClipInput, stop: Stop) -> None:
        """Makes one clip, whatever its parameters; all but what is erased."""
        params, frame_map, blend = clip.params, clip.frame_map, clip.blend
        out = self._frames_first(clip.out)
        if not params.frames:
            self._make(clip.planes, clip.info, params, frame_map, out, blend, stop)
        for t, each in enumerate(params.frames):
            frames = frame_map[t :: self.frames]
            self._make(clip.planes, clip.info, each, frames, out[t : t + 1], blend[t : t + 1], stop)

    def _frames_first(self, out: torch.Tensor) -> torch.Tensor:
        """(T, 3, H, W), a view."""
        return out.transpose(0, 1) if self.config.layout == "NCTHW" else out

    def _erase(self, clip: ClipInput) -> None:
        erasing, out = self.config.erasing, self._frames_first(clip.out)
        for t, params in enumerate(clip.params.frames or (clip.params,)):
            if params.erase is not None and erasing is not None:
                _erase(out[t : t + 1] if clip.params.frames else out, params.erase, erasing.value, params.noise)

    def masks(self, values: torch.Tensor, params: TransformParams, *, fill: float = 0) -> torch.Tensor:
        """Masks of the displayed frames as the clip shows them, by the nearest pixel.

        Here and in :meth:`points`, :meth:`boxes` and :meth:`flow`: places are (x, y) in pixels, pixel k covers k to k + 1.
        Parameters of a clip serve all its frames at once: leading dimensions may be any. With ``draws="frame"`` each frame has
        its own, and the first dimension of ``values`` is T. Where ``before`` changes the size, ``values`` are of the frames
        that it gives.

        Args:
            values: (..., H, W) of any dtype, H and W those of the frames.
            params: what was drawn, ``batch.params[k]``.
            fill: stands where the clip shows what lies outside of the frame.

        Returns:
            (..., height, width) of the transform's ``size``, dtype and device as given.

        Raises:
            GraphError: for values that are no tensor, or of frames that ``params`` do not fit.
        """
        return targets.masks(values, params, self.config.size, fill=fill)

    def points(self, values: torch.Tensor, params: TransformParams, *, frame: Size | None = None) -> torch.Tensor:
        """Places in the displayed frames as places in the clip.

        Args:
            values: (..., 2) floating point: x, y.
            params: what was drawn.
            frame: (height, width) of the frames that the places are in. Needed where ``before`` changes the size: what it does
                to the pixels is not known here, so move the places likewise and give its frames' size.

        Returns:
            (..., 2), dtype and device as given; places that the crop cut off lie outside of the clip.

        Raises:
            GraphError: as :meth:`masks`.
        """
        return targets.points(values, params, self.config.size, frame=frame)

    def boxes(self, values: torch.Tensor, params: TransformParams, *, frame: Size | None = None) -> torch.Tensor:
        """Boxes in the displayed frames as boxes in the clip: upright ones around what was turned, cut at the clip's edges.

        Args:
            values: (..., 4) floating point: x1, y1, x2, y2 of two corners, the right and lower edge exclusive (a box over the
                whole frame is 0, 0, W, H).
            params: what was drawn.
            frame: as for :meth:`points`.

        Returns:
            (..., 4): x1, y1, x2, y2, dtype and device as given. A box that the clip does not show has no area: drop those with
            x1 == x2 or y1 == y2.

        Raises:
            GraphError: as :meth:`masks`.
        """
        return targets.boxes(values, params, self.config.size, frame=frame)

    def flow(self, values: torch.Tensor, params: TransformParams) -> torch.Tensor:
        """Optical flow of the displayed frames as that of the clip: resampled, and each vector turned and scaled.

        Args:
            values: (..., 2, H, W) floating point: along x, along y, in pixels.
            params: what was drawn.

        Returns:
            (..., 2, height, width) of the transform's ``size``; 0 outside of the frame.

        Raises:
            GraphError: as :meth:`masks`.
        """
        return targets.flow(values, params, self.config.size)

    def _make(
        self,
        planes: Planes,
        info: VideoInfo,
        params: TransformParams,
        frame_map: Sequence[int],
        out: torch.Tensor,
        blend: Sequence[float],
        stop: Stop,
    ) -> None:
        """``out`` is (T, 3, H, W) of any strides."""
        config = self.config
        tags = config.untagged_matrix, config.untagged_range
        picture = Picture(planes, info, *tags, config.interpolation, config.antialias, stop)
        folded, ops = (np.eye(CHANNELS), params.color) if config.clamp else fold(params.color)
        if ops or params.blur or blend:
            dtype = torch.float64 if out.dtype == torch.float64 else torch.float32
            rgb = torch.empty(out.shape, dtype=dtype, device=out.device)
            clamp = config.clamp and not blend
            picture.write(params, frame_map[: len(rgb)], rgb, folded, config.fill, UNIT, clamp=clamp)
            if blend:
                following = torch.empty_like(rgb)
                picture.write(params, frame_map[len(rgb) :], following, folded, config.fill, UNIT, clamp=False)
                for t, share in enumerate(blend):
                    rgb[t].lerp_(following[t], share)
                rgb = rgb.clamp_(0, 1) if config.clamp else rgb
            numbers = tuple(np.concatenate(self._scale).tolist())
            sigma, kernel_size = (params.blur, config.blur.kernel_size) if config.blur is not None else (0.0, 1)
            if fuse.takes(rgb):
                rgb, left = levels.change(rgb, ops, clamp=config.clamp, wholly=sigma > 0)
                if sigma:
                    gaussian.blur(rgb, kernel_size, sigma, numbers, out)
                else:
                    finish.finish(rgb, left, numbers, out, clamp=config.clamp)
                return
            rgb = adjust(rgb, ops, clamp=config.clamp)
            store(blur(rgb, kernel_size, sigma) if sigma else rgb, self._scale, out)
        else:
            clamp = config.clamp or self.dtype == torch.uint8
            picture.write(params, frame_map, out, folded, config.fill, self._scale, clamp=clamp)


def _erase(out: torch.Tensor, box: Box, value: tuple[float, ...] | str, seed: int) -> None:
    """Fills a box of (T, 3, H, W) with a value for each channel, or with noise that is the same on every device."""
    top, left, height, width = box
    place = out[:, :, top : top + height, left : left + width]
    if isinstance(value, str):
        noise = np.random.default_rng(seed).standard_normal((CHANNELS, height, width), np.float32)
        place.copy_(torch.from_numpy(noise))
        return
    for channel, each in enumerate(value):
        place[:, channel] = each


def to_rgb(planes: Planes, info: VideoInfo, *, untagged_matrix: str = "auto", untagged_range: str = "limited") -> torch.Tensor:
    """All frames of ``planes`` as (N, 3, H, W) uint8 RGB of the displayed size, on the planes' device.

    Display rotation is applied, pixel aspect is not; deep samples are scaled to 8 bits without tone mapping. Values are rounded
    to nearest. ``untagged_matrix`` and ``untagged_range`` mean what they mean in :class:`TransformConfig`.
    """
    size = info.display_size
    out = torch.empty((len(planes), CHANNELS, *size), dtype=torch.uint8, device=planes.data.device)
    scale = np.full(CHANNELS, 255.0), np.zeros(CHANNELS)
    picture = Picture(planes, info, untagged_matrix, untagged_range)
    picture.write(whole(size), range(len(planes)), out, np.eye(CHANNELS), (0.0, 0.0, 0.0), scale)
    return out

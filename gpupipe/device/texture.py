"""Texture objects over frames in pitched memory, kept by address: a texture is a descriptor, it owns no memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING, Any

from gpupipe.device.inventory import load

if TYPE_CHECKING:
    import torch

TEXEL = 4
"""Samples of a texel: one fetch gives four neighbours of a row."""
PITCH_BYTES = 32
"""Row pitches of linear 2-D textures are multiples of this (cudaDevAttrTexturePitchAlignment on all GPUs since sm_70)."""
BASE_BYTES = 512
"""Textures start at multiples of this (cudaDevAttrTextureAlignment)."""
MAX_ROWS = 65000
"""Most rows of one linear 2-D texture (cudaDevAttrMaxTexture2DLinearHeight)."""
_KEPT = 1024
"""Texture objects kept. Destroying one does not wait for kernels that read it, so the rare clean-up first waits for the streams
on which they were used last; not for the whole GPU, on which another thread may be capturing a graph."""

_lock = threading.Lock()
_textures: OrderedDict[tuple[int, ...], tuple[Any, torch.cuda.Stream]] = OrderedDict()


def can_be_textured(frames: torch.Tensor) -> bool:
    """Whether frames (N, rows, pitch) of 8- or 16-bit samples can be read through one texture: where they start, how far apart
    their rows are, and how many rows there are allow it."""
    item = frames.element_size()
    return (
        frames.is_contiguous()
        and frames.shape[2] * item % PITCH_BYTES == 0
        and frames.data_ptr() % BASE_BYTES == 0
        and frames.shape[0] * frames.shape[1] <= MAX_ROWS
    )


def texture_of(frames: torch.Tensor) -> int:
    """Handle (``cudaTextureObject_t``) of frames (N, rows, pitch) on a CUDA device that :func:`can_be_textured`, for use on the
    current stream.

    All rows one below the other, ``TEXEL`` samples a texel: one channel of 32 bits for 8-bit samples, two for 16-bit ones.
    Point filter, unnormalised coordinates, clamped at the edges.
    """
    import torch

    count, rows, pitch = frames.shape
    key = (frames.device.index, frames.data_ptr(), count * rows, pitch * frames.element_size(), frames.element_size())
    with _lock:
        if key not in _textures and len(_textures) >= _KEPT:
            _forget_oldest()
        texture = _textures[key][0] if key in _textures else _make(*key)
        _textures[key] = texture, torch.cuda.current_stream(frames.device)
        _textures.move_to_end(key)
        return int(texture.ptr)


def _forget_oldest() -> None:
    oldest = list(islice(_textures, _KEPT // 2))
    for stream in {_textures[key][1] for key in oldest}:
        stream.synchronize()
    for key in oldest:
        del _textures[key]


def _make(gpu: int, address: int, rows: int, pitch_bytes: int, sample_bytes: int) -> Any:
    cupy = load("cupy")
    texture, runtime = cupy.cuda.texture, cupy.cuda.runtime
    width = pitch_bytes // (TEXEL * sample_bytes)
    with cupy.cuda.Device(gpu):
        memory = cupy.cuda.UnownedMemory(address, rows * pitch_bytes, None, gpu)
        view = cupy.ndarray((rows, pitch_bytes // 4), cupy.uint32, cupy.cuda.MemoryPointer(memory, 0))
        channels = texture.ChannelFormatDescriptor(32, 32 * (sample_bytes - 1), 0, 0, runtime.cudaChannelFormatKindUnsigned)
        resource = texture.ResourceDescriptor(
            runtime.cudaResourceTypePitch2D, arr=view, chDesc=channels, width=width, height=rows, pitchInBytes=pitch_bytes
        )
        sampling = texture.TextureDescriptor(
            (runtime.cudaAddressModeClamp,) * 2, runtime.cudaFilterModePoint, runtime.cudaReadModeElementType
        )
        return texture.TextureObject(resource, sampling)

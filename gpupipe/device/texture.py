"""Texture objects over pitched memory, kept by address: a texture is a descriptor, it owns no memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from gpupipe.device.inventory import load

if TYPE_CHECKING:
    import torch

PITCH_BYTES = 32
"""Row pitches of linear 2-D textures are multiples of this (cudaDevAttrTexturePitchAlignment on all GPUs since sm_70)."""
BASE_BYTES = 512
"""Textures start at multiples of this (cudaDevAttrTextureAlignment)."""
MAX_ROWS = 65000
"""Most rows of one linear 2-D texture (cudaDevAttrMaxTexture2DLinearHeight)."""
_KEPT = 1024
"""Texture objects kept. Destroying one does not wait for kernels that read it, so the rare clean-up synchronises first."""

_lock = threading.Lock()
_textures: OrderedDict[tuple[int, ...], Any] = OrderedDict()


class PitchedBuffer:
    """A CUDA tensor of rows of one pitch, whose parts can be read through textures.

    Args:
        data: (rows, pitch) uint8 or uint16, contiguous, on a CUDA device, starting at a multiple of ``BASE_BYTES``, the pitch
            a multiple of ``PITCH_BYTES``.
    """

    def __init__(self, data: torch.Tensor) -> None:
        assert data.is_cuda, data.device
        assert data.ndim == 2, data.shape
        assert data.is_contiguous(), data.stride()
        assert data.shape[1] * data.element_size() % PITCH_BYTES == 0, data.shape
        assert data.data_ptr() % BASE_BYTES == 0, hex(data.data_ptr())
        self.data = data

    @classmethod
    def of(cls, frames: torch.Tensor) -> PitchedBuffer:
        """The buffer that frames (N, rows, pitch) form together."""
        return cls(frames.flatten(0, 1))

    def texture(self, first_row: int, rows: int, width: int) -> int:
        """Handle (``cudaTextureObject_t``) of a view of ``width`` samples from ``first_row`` on.

        One channel of 8 or 16 bits, point filter, unnormalised coordinates, clamped at the view's edges, read as integers.
        ``first_row`` times the pitch must be a multiple of ``BASE_BYTES``.
        """
        data = self.data
        sample_bytes = data.element_size()
        pitch_bytes = data.shape[1] * sample_bytes
        address = data.data_ptr() + first_row * pitch_bytes
        assert 0 < rows <= MAX_ROWS, rows
        assert first_row + rows <= data.shape[0], (first_row, rows, data.shape)
        assert address % BASE_BYTES == 0, (first_row, pitch_bytes)
        key = (data.device.index, address, rows, width, pitch_bytes, sample_bytes)
        with _lock:
            if key not in _textures:
                if len(_textures) >= _KEPT:
                    _forget_oldest()
                _textures[key] = _make(*key)
            _textures.move_to_end(key)
            return int(_textures[key].ptr)


def _forget_oldest() -> None:
    import torch

    for gpu in {key[0] for key in _textures}:
        torch.cuda.synchronize(gpu)
    for _ in range(_KEPT // 2):
        _textures.popitem(last=False)


def _make(gpu: int, address: int, rows: int, width: int, pitch_bytes: int, sample_bytes: int) -> Any:
    cupy = load("cupy")
    texture, runtime = cupy.cuda.texture, cupy.cuda.runtime
    with cupy.cuda.Device(gpu):
        memory = cupy.cuda.UnownedMemory(address, rows * pitch_bytes, None, gpu)
        dtype = cupy.uint8 if sample_bytes == 1 else cupy.uint16
        view = cupy.ndarray((rows, pitch_bytes // sample_bytes), dtype, cupy.cuda.MemoryPointer(memory, 0))
        channels = texture.ChannelFormatDescriptor(8 * sample_bytes, 0, 0, 0, runtime.cudaChannelFormatKindUnsigned)
        resource = texture.ResourceDescriptor(
            runtime.cudaResourceTypePitch2D, arr=view, chDesc=channels, width=width, height=rows, pitchInBytes=pitch_bytes
        )
        sampling = texture.TextureDescriptor(
            (runtime.cudaAddressModeClamp,) * 2, runtime.cudaFilterModePoint, runtime.cudaReadModeElementType
        )
        return texture.TextureObject(resource, sampling)

"""Packets as NVDEC's parser wants them: one behind the other, in memory that is used again."""

from __future__ import annotations

import numpy as np

from gpupipe.data.scan.bitstream.nal import put_start_codes, to_annexb

_FIRST_BYTES = 1 << 20


class Bitstream:
    """The bytes of one call: packets of H.264 and HEVC in Annex B form, of other codecs as they are.

    Attributes:
        size_bytes: how many bytes it holds.
        address: where they lie, until the next packet is put in.
    """

    def __init__(self) -> None:
        self.size_bytes = 0
        self._allocate(_FIRST_BYTES)

    def _allocate(self, size_bytes: int) -> None:
        self._memory = bytearray(size_bytes)
        self._view = memoryview(self._memory)  # through it bytes are copied once
        self.address = np.frombuffer(self._memory, np.uint8).ctypes.data

    @property
    def memory(self) -> memoryview:
        """The bytes it holds."""
        return self._view[: self.size_bytes]

    def clear(self) -> None:
        self.size_bytes = 0

    def put(self, data: bytes | memoryview, length_size: int = 0) -> None:
        """Puts a packet behind the others, with start codes in place of its length fields.

        Args:
            length_size: bytes of a NAL length field, 0 without.

        Raises:
            ValueError: when a length field points past the packet's end.
        """
        if length_size not in (0, 4):
            data, length_size = to_annexb(bytes(data), length_size), 0
        begin = self.size_bytes
        end = begin + len(data)
        if end > len(self._memory):
            held = self._view[:begin]
            self._allocate(2 * end)
            self._view[:begin] = held
        self._view[begin:end] = data
        if length_size:
            put_start_codes(self._memory, begin, end)
        self.size_bytes = end

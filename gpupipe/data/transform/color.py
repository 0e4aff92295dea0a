"""From sample codes to RGB: everything linear in one 3x4 matrix, worked out in float64."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from gpupipe.types import PlaneFormat, VideoInfo

LUMA_WEIGHTS = {
    "bt601": (0.299, 0.114),
    "bt709": (0.2126, 0.0722),
    "bt2020": (0.2627, 0.0593),
}
"""(Kr, Kb): shares of red and blue in luma. ITU-R BT.601-7 section 2.5.1, BT.709-6 item 3.2, BT.2020-2 table 4 (non-constant
luminance); Kg is the rest. SMPTE 170M and BT.470 BG share BT.601's."""


def matrix_name(info: VideoInfo, untagged: str) -> str:
    """The stream's matrix, or for an untagged stream the one asked for.

    ``auto`` is BT.709 where the shorter side has 720 pixels or more, else BT.601: HD is mastered in BT.709 and SD in BT.601,
    and the shorter side is the number of lines whichever way a phone was held.
    """
    if info.color_matrix is not None:
        return info.color_matrix
    if untagged != "auto":
        return untagged
    return "bt709" if min(info.width, info.height) >= 720 else "bt601"


def rgb_from_codes(
    info: VideoInfo, planes: PlaneFormat, *, untagged_matrix: str = "auto", untagged_range: str = "limited"
) -> NDArray[np.float64]:
    """(3, 4) matrix M: (R, G, B) = M[:, :3] @ (y, u, v) + M[:, 3], for codes as stored and R, G, B in [0, 1] for legal colours.

    Quantisation follows BT.709-6 item 4.6 and BT.2020-2 table 5: black and white at 16 and 235, chroma 128 ± 112, times
    2^(bits - 8). Full range is that of ITU-T H.273 (equations 26 to 31): 0 to 2^bits - 1, chroma centred at 2^(bits - 1).
    A matrix ``rgb`` is H.273's identity (MatrixCoefficients 0): the planes hold G, B and R, all with luma's range.
    """
    full = (info.color_range or untagged_range) == "full"
    return _matrix(matrix_name(info, untagged_matrix), full, planes.bits, planes.shift)


@functools.cache
def _matrix(name: str, full: bool, bits: int, shift: int) -> NDArray[np.float64]:
    step = 2.0 ** (bits - 8)
    black, luma_span, chroma_span = (0.0, 256 * step - 1, 256 * step - 1) if full else (16 * step, 219 * step, 224 * step)
    grey = 128 * step
    if name == "rgb":
        linear = np.array([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]) / luma_span
        offset = np.full(3, -black / luma_span)
    else:
        red, blue = LUMA_WEIGHTS[name]
        green = 1 - red - blue
        # Y = Kr R + Kg G + Kb B, Cb = (B - Y) / (2 - 2 Kb), Cr = (R - Y) / (2 - 2 Kr), solved for R, G and B.
        from_cb, from_cr = 2 * (1 - blue), 2 * (1 - red)
        from_ycc = np.array(
            [[1, 0, from_cr], [1, -blue * from_cb / green, -red * from_cr / green], [1, from_cb, 0]], dtype=np.float64
        )
        linear = from_ycc / np.array([luma_span, chroma_span, chroma_span])
        offset = -linear @ np.array([black, grey, grey])
    matrix: NDArray[np.float64] = np.concatenate([linear * 2.0**-shift, offset[:, None]], axis=1)
    matrix.flags.writeable = False
    return matrix

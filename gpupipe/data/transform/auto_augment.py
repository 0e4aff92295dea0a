"""RandAugment and TrivialAugment Wide for video: one draw a clip, from torchvision's tables of operations and magnitudes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np

from gpupipe.config import AutoAugmentConfig
from gpupipe.data.transform.affine import inverse
from gpupipe.data.transform.params import ColorName, ColorOp, Matrix, Size

Move = Literal["shear_x", "shear_y", "translate_x", "translate_y", "rotate"]

_MOVES: dict[Move, Callable[[Size, float], Matrix]] = {
    # Shears are by their slope, about the top left corner, as in AutoAugment's own code.
    "shear_x": lambda size, m: inverse(size, shear=(math.degrees(math.atan(m)), 0.0), corner=True),
    "shear_y": lambda size, m: inverse(size, shear=(0.0, math.degrees(math.atan(m))), corner=True),
    "translate_x": lambda size, m: inverse(size, translate=(int(m), 0)),
    "translate_y": lambda size, m: inverse(size, translate=(0, int(m))),
    "rotate": lambda size, m: inverse(size, angle=-m),  # torchvision's rotate turns the other way round than its affine
}
_COLORS: tuple[ColorName, ...] = (
    "brightness", "saturation", "contrast", "sharpness", "posterize", "solarize", "autocontrast", "equalize",
)  # fmt: skip
_FACTORS = ("brightness", "saturation", "contrast", "sharpness")
OPERATIONS = ("identity", *_MOVES, *_COLORS)


def auto_augment(config: AutoAugmentConfig, size: Size, rng: np.random.Generator) -> tuple[list[Matrix], list[ColorOp]]:
    """Draws operations; (moves, changes of colour) of an output of ``size``, each in the order drawn.

    Every operation is equally likely, signed magnitudes are negative with probability 1/2.
    """
    moves: list[Matrix] = []
    colors: list[ColorOp] = []
    trivial = config.policy == "trivialaugment"
    for _ in range(1 if trivial else config.num_ops):
        name = OPERATIONS[rng.integers(len(OPERATIONS))]
        level = int(rng.integers(config.num_magnitude_bins)) if trivial else config.magnitude
        amount = magnitude(name, level, config, size)
        sign = -1.0 if rng.random() <= 0.5 else 1.0
        if name in _MOVES:
            moves.append(_MOVES[name](size, sign * amount))  # type: ignore[index]
        elif name in _FACTORS:
            colors.append(ColorOp(name, 1 + sign * amount))  # type: ignore[arg-type]
        elif name != "identity":
            colors.append(ColorOp(name, amount))  # type: ignore[arg-type]
    return moves, colors


def magnitude(name: str, level: int, config: AutoAugmentConfig, size: Size) -> float:
    """Strength of an operation at ``level`` of ``config.num_magnitude_bins``; 0 where it has none.

    The tables are those of torchvision's RandAugment and TrivialAugmentWide: pixels for translations, degrees for rotations,
    slopes for shears, distance from 1 for factors, bits for posterize, a threshold in [0, 1] for solarize.
    """
    wide = config.policy == "trivialaugment"
    share = level / (config.num_magnitude_bins - 1)
    if name in _FACTORS:
        return share * (0.99 if wide else 0.9)
    if name in ("shear_x", "shear_y"):
        return share * (0.99 if wide else 0.3)
    if name in ("translate_x", "translate_y"):
        return share * (32.0 if wide else 150 / 331 * size[name == "translate_x"])
    if name == "rotate":
        return share * (135.0 if wide else 30.0)
    if name == "posterize":
        return float(round(8 - share * (6 if wide else 4)))
    return 1 - share if name == "solarize" else 0.0

"""What was drawn for a clip, as data: it can be read, kept as JSON, and applied again, to pixels and to what goes with them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, TypeAdapter, ValidationError

from gpupipe.config import TransformConfig
from gpupipe.errors import ConfigError, GraphError

Size = tuple[int, int]
"""(height, width)"""
Box = tuple[int, int, int, int]
"""(top, left, height, width)"""
Matrix = tuple[float, float, float, float, float, float]
"""Rows of a 2x3 matrix, over (x, y, 1)."""

ColorName = Literal[
    "brightness", "contrast", "saturation", "hue", "grayscale", "channel_drop", "sharpness", "posterize", "solarize",
    "autocontrast", "equalize",
]  # fmt: skip


_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
"""How the JSON of parameters is read."""


@dataclass(frozen=True, slots=True)
class ColorOp:
    """One change of colour, named as torchvision's functions.

    Attributes:
        name: which one.
        value: factor of brightness, contrast, saturation and sharpness; turn of the hue in whole turns; number of the channel
            that is dropped; bits that are kept; threshold in [0, 1]. 0 where there is nothing to choose.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: ColorName
    value: float = 0.0


_CHOICES: dict[str, range] = {"channel_drop": range(3), "posterize": range(9)}
"""Whole numbers that the value of an operation is one of."""


@dataclass(frozen=True, slots=True)
class TransformParams:
    """One box of the displayed frame, stretched over the output, for every frame of the clip, and what else is done to it.

    Attributes:
        crop: (top, left, height, width) of the box in display pixels (after rotation); pixel k covers k to k + 1.
        bounds: (top, left, height, width), whole display pixels: what the resize filter may read. The box itself for a crop
            that is cut out first and then resized; the whole frame for a frame that is resized first and then cut.
        hflip: whether the output is mirrored left to right.
        vflip: whether the output is mirrored top to bottom.
        affine: the place in the output before the move, from the place after it, both in output pixels; None: no move. Where
            there is one, the filter may read the whole frame.
        color: changes of colour, in the order in which they are done.
        blur: standard deviation of the Gaussian in output pixels; 0: none.
        erase: (top, left, height, width) in output pixels of the box that is erased.
        noise: seed of the noise that fills that box, where it is noise.
        frame: (height, width) of the frames that ``crop`` lies in: the displayed ones, or those that ``before`` gave; None in
            parameters that were made by hand, which fit any frame that holds ``bounds``.
        displayed: (height, width) of the displayed frames, where ``before`` gave frames of another size; else None.
        frames: with ``draws="frame"``, the parameters of each frame; the fields above are then those of the first.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    crop: tuple[float, float, float, float]
    bounds: Box
    hflip: bool = False
    vflip: bool = False
    affine: Matrix | None = None
    color: tuple[ColorOp, ...] = ()
    blur: float = 0.0
    erase: Box | None = None
    noise: int = 0
    frame: Size | None = None
    displayed: Size | None = None
    frames: tuple[TransformParams, ...] = ()

    def matrix(self, size: Size) -> NDArray[np.float64]:
        """(3, 3): the place (x, y, 1) in the displayed frame of a place in an output of ``size`` (height, width); in pixels,
        with pixel k from k to k + 1 on both sides. Where ``before`` changes the size, in the frames that it gives."""
        (top, left, height, width), (rows, columns) = self.crop, size
        across, down = width / columns, height / rows
        place = np.array(
            [
                [-across, 0, left + width] if self.hflip else [across, 0, left],
                [0, -down, top + height] if self.vflip else [0, down, top],
                [0, 0, 1],
            ],
            dtype=np.float64,
        )
        return place if self.affine is None else place @ np.array([*self.affine, 0, 0, 1]).reshape(3, 3)

    def to_json(self) -> str:
        """These parameters as one line of JSON; :meth:`from_json` gives equal ones."""
        return _adapter().dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> TransformParams:
        """What :meth:`to_json` wrote.

        Raises:
            ConfigError: when it is not that; the field is named.
        """
        try:
            return _adapter().validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the text"
            raise ConfigError(f"these are no transform parameters: {where}: {first['msg']}", fix="see to_json") from None


def check(params: TransformParams, config: TransformConfig, path: str) -> None:
    """Looks whether parameters, perhaps another transform's, can be applied by this one. Whether the crop lies in the frame
    is seen where samples are looked for.

    Raises:
        GraphError: when they cannot; it says what does not fit.
    """
    for each in params.frames or (params,):
        wrong = _unfit(each, config)
        if wrong is not None:
            raise GraphError(
                f"params do not fit this transform: {wrong}",
                fix="apply them with the config they were drawn by",
                path=path,
            )


def _unfit(params: TransformParams, config: TransformConfig) -> str | None:
    numbers = (*params.crop, *(params.affine or ()), params.blur, *(op.value for op in params.color))
    if not all(map(math.isfinite, numbers)):
        return "a number in them is not finite"
    if params.blur and config.blur is None:
        return f"they blur by {params.blur:g}, and blur=None has no kernel_size"
    if params.blur < 0:
        return f"blur {params.blur:g} is negative"
    if params.erase is not None and config.erasing is None:
        return f"they erase {params.erase}, and erasing=None has no value for that"
    if params.erase is not None and min(params.erase) < 0:
        return f"erase {params.erase} is no box"
    known = get_args(ColorName)
    for op in params.color:
        if op.name not in known:
            return f"there is no change of colour {op.name!r}"
        if op.value not in _CHOICES.get(op.name, (op.value,)):
            return f"{op.name} has no choice {op.value:g}"
    return None


def _adapter() -> TypeAdapter[TransformParams]:
    return TypeAdapter(TransformParams)


def whole(display_size: Size, *, hflip: bool = False) -> TransformParams:
    """The whole frame of ``display_size`` (height, width)."""
    height, width = display_size
    return TransformParams((0.0, 0.0, float(height), float(width)), (0, 0, height, width), hflip)

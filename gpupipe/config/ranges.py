"""Kinds of values that several fields share, and the short forms in which people write them."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _around_one(value: Any) -> Any:
    """b means [max(0, 1 - b), 1 + b], as in torchvision's ColorJitter."""
    if _number(value):
        if value < 0:
            raise ValueError("must not be negative")
        return (max(0.0, 1.0 - value), 1.0 + value)
    return value


def _around_zero(value: Any) -> Any:
    """d means [-d, d]."""
    if _number(value):
        if value < 0:
            raise ValueError("must not be negative")
        return (-value, value)
    return value


def _shears(value: Any) -> Any:
    """s means [-s, s] along x, as in torchvision's RandomAffine; two numbers are the range along x, four both ranges."""
    value = _around_zero(value)
    return (*value, 0.0, 0.0) if isinstance(value, list | tuple) and len(value) == 2 else value


def _twice(value: Any) -> Any:
    return (value, value) if _number(value) else value


def _three_times(value: Any) -> Any:
    return (value, value, value) if _number(value) else value


_AMOUNT = r"\s*(\d+(?:\.\d+)?)\s*([KMGT])(i?)B\s*"


def _amount(value: Any) -> Any:
    """A share as a number, an amount with its unit as it is written."""
    if isinstance(value, str) and re.fullmatch(r"0?\.\d+|1(\.0+)?", value.strip()):  # as options of a command are given
        value = float(value)
    if _number(value) and 0 < value <= 1:
        return float(value)
    if isinstance(value, str) and (match := re.fullmatch(_AMOUNT, value, re.IGNORECASE)) and float(match[1]) > 0:
        return value.strip()
    raise ValueError("must be a share of the device's memory, above 0 and at most 1, or an amount with its unit such as '20GB'")


def amount_bytes(amount: float | str, total_bytes: int) -> int:
    """Bytes of an :data:`Amount`, of ``total_bytes`` in all. KB to TB are powers of 1000, KiB to TiB of 1024."""
    if isinstance(amount, float):
        return int(amount * total_bytes)
    match = re.fullmatch(_AMOUNT, amount, re.IGNORECASE)
    assert match is not None, amount
    return int(float(match[1]) * (1024 if match[3] else 1000) ** ("KMGT".index(match[2].upper()) + 1))


def gigabytes(value: Any) -> Any:
    """An amount with its unit as GB (10^9 bytes); anything else as it is."""
    if isinstance(value, str) and re.fullmatch(_AMOUNT, value, re.IGNORECASE):
        return amount_bytes(value, 0) / 1e9
    return value


def ascending(name: str, value: tuple[float, ...] | None) -> None:
    """Raises ValueError unless ``value`` is (low, high) with low <= high."""
    if value is not None and value[0] > value[1]:
        raise ValueError(f"{name} must be (low, high), got ({value[0]}, {value[1]})")


Share = Annotated[float, Field(ge=0, le=1)]
"""A probability, or a part of a whole."""
Alpha = Annotated[float, Field(ge=0, le=1e4)]
"""Of a Beta distribution; 0: off."""
Zoom = Annotated[float, Field(ge=0.01, le=100)]
Deviation = Annotated[float, Field(ge=1e-6, le=1e6)]
"""What the difference from the mean is divided by."""
Part = Annotated[float, Field(gt=0, le=1)]
Amount = Annotated[float | str, BeforeValidator(_amount, json_schema_input_type=Part | str)]
"""Of memory: a share of the device's, or an amount with its unit, ``"20GB"`` or ``"16 GiB"``; see :func:`amount_bytes`."""
AmountText = Annotated[str, Field(pattern=r"^\s*(\d*[1-9]\d*(\.\d+)?|\d+\.\d*[1-9]\d*)\s*[KMGTkmgt]i?[Bb]\s*$")]
"""An amount with its unit, for a schema."""
Ratio = Annotated[float, Field(ge=1e-4, le=1e4)]

Factor = Annotated[float, Field(ge=0, le=1000)]
FactorRange = Annotated[
    tuple[Factor, Factor], BeforeValidator(_around_one, json_schema_input_type=Factor | tuple[Factor, Factor])
]
"""Range of a factor; one number b means [max(0, 1 - b), 1 + b]."""
Turn = Annotated[float, Field(ge=-0.5, le=0.5)]
HueRange = Annotated[tuple[Turn, Turn], BeforeValidator(_around_zero, json_schema_input_type=Turn | tuple[Turn, Turn])]
"""Range of a turn of the hue, in whole turns; one number h means [-h, h]."""
Degrees = Annotated[float, Field(ge=-360, le=360)]
DegreeRange = Annotated[
    tuple[Degrees, Degrees], BeforeValidator(_around_zero, json_schema_input_type=Degrees | tuple[Degrees, Degrees])
]
"""Range of an angle in degrees; one number d means [-d, d]."""
Shear = Annotated[float, Field(ge=-89, le=89)]
ShearRange = Annotated[
    tuple[Shear, Shear, Shear, Shear],
    BeforeValidator(_shears, json_schema_input_type=Shear | tuple[Shear, Shear] | tuple[Shear, Shear, Shear, Shear]),
]
"""Ranges of the shears along x and y in degrees, (low x, high x, low y, high y)."""
Sigma = Annotated[float, Field(ge=1e-3, le=1e4)]
SigmaRange = Annotated[tuple[Sigma, Sigma], BeforeValidator(_twice, json_schema_input_type=Sigma | tuple[Sigma, Sigma])]
Speed = Annotated[float, Field(ge=1 / 64, le=64)]
SpeedRange = Annotated[tuple[Speed, Speed], BeforeValidator(_twice, json_schema_input_type=Speed | tuple[Speed, Speed])]
Color = Annotated[
    tuple[Share, Share, Share], BeforeValidator(_three_times, json_schema_input_type=Share | tuple[Share, Share, Share])
]
"""R, G and B in [0, 1]; one number means a grey."""
Spread = Annotated[
    tuple[Deviation, Deviation, Deviation],
    BeforeValidator(_three_times, json_schema_input_type=Deviation | tuple[Deviation, Deviation, Deviation]),
]
"""Positive values for R, G and B; one number stands for all three."""
Values = Annotated[
    tuple[float, float, float], BeforeValidator(_three_times, json_schema_input_type=float | tuple[float, float, float])
]
"""One value for each channel; one number stands for all three."""

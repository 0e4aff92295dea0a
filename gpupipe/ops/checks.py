"""One clear error for a tensor that does not fit, naming the argument, what came and what fits."""

from __future__ import annotations

import torch

from gpupipe.errors import ConfigError, ShapeError

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def said(x: object) -> str:
    """A tensor as an error names it."""
    if not isinstance(x, torch.Tensor):
        return f"{type(x).__name__} {x!r}"
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)} on {x.device}"


def refuse(name: str, x: object, fits: str) -> ShapeError:
    """The error to raise for an argument."""
    return ShapeError(f"{name} is {said(x)}", fix=f"{name} must be {fits}")


def floating(name: str, x: object, *, like: torch.Tensor | None = None) -> None:
    """A tensor of a floating type, on the device of ``like``.

    Raises:
        ShapeError: otherwise.
    """
    if not isinstance(x, torch.Tensor) or x.dtype not in FLOATS:
        raise refuse(name, x, "a tensor of float32, bfloat16, float16 or float64")
    if like is not None and x.device != like.device:
        raise refuse(name, x, f"on {like.device}, where the first argument is")


def vector(name: str, x: torch.Tensor | None, size: int, like: torch.Tensor, *, of: str = "column") -> None:
    """A tensor (size,), or None.

    Raises:
        ShapeError: otherwise.
    """
    if x is None:
        return
    floating(name, x, like=like)
    if x.shape != (size,):
        raise refuse(name, x, f"a tensor ({size},), one value a {of} of the first argument {tuple(like.shape)}")


def same_shape(name: str, x: torch.Tensor, like: torch.Tensor, other: str = "x") -> None:
    """A tensor of the same shape and device as ``like``.

    Raises:
        ShapeError: otherwise.
    """
    floating(name, x, like=like)
    if x.shape != like.shape:
        raise refuse(name, x, f"{tuple(like.shape)}, as {other} is")


def share(p: float) -> None:
    """A share to drop.

    Raises:
        ConfigError: when it is none.
    """
    if not isinstance(p, int | float) or not 0 <= p <= 1:
        raise ConfigError(f"p is {p!r}", fix="p is the share to drop, from 0 to 1")


def epsilon(eps: float) -> float:
    """What is added before a root, as a float: a launch must not mistake 0 for 0.0.

    Raises:
        ConfigError: when it is no number from 0 on.
    """
    if not isinstance(eps, int | float) or not eps >= 0:
        raise ConfigError(f"eps is {eps!r}", fix="eps is a number from 0 on, such as 1e-6")
    return float(eps)

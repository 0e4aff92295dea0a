"""An optimizer's step that is left out where gradients are not finite: on the device by those that can, else by the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


def divides(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer leaves out steps on the device, and divides gradients as it goes: torch's fused ones. Of these
    one may have got settings that are not, with the state of another."""
    if not _scales(optimizer):
        return False
    return all(group.get("fused", True) for group in optimizer.param_groups) and not _begins(optimizer)


def _scales(optimizer: torch.optim.Optimizer) -> bool:
    """What GradScaler goes by: it waits for the host with those of which this is not true."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _begins(optimizer: torch.optim.Optimizer) -> bool:
    """Whether torch's SGD is to make its momentum in the next step: out of memory as it comes, which a step that is left out on
    the device does not fill."""
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    first = [next((value for value in group["params"] if value.grad is not None), None) for group in optimizer.param_groups]
    return any(
        group["momentum"] and value is not None and optimizer.state.get(value, {}).get("momentum_buffer") is None
        for group, value in zip(optimizer.param_groups, first, strict=True)
    )


@contextmanager
def known_to_the_host(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within the block GradScaler waits for whether gradients are finite, where an optimizer cannot leave out its step."""
    if not _scales(optimizer) or divides(optimizer):
        yield
        return
    own: Any = optimizer
    own._step_supports_amp_scaling = False
    try:
        yield
    finally:
        own._step_supports_amp_scaling = True


def step_if_finite(optimizer: torch.optim.Optimizer, norm: torch.Tensor, divisor: torch.Tensor | None = None) -> None:
    """A step, unless the norm of its gradients is not finite. Fused optimizers see to that on the device.

    Args:
        divisor: of the gradients; for an optimizer that :func:`divides`.
    """
    if not divides(optimizer):
        if bool(norm.isfinite()):
            optimizer.step()
        return
    fused: Any = optimizer  # as GradScaler hands these two over
    fused.grad_scale, fused.found_inf = divisor, (~norm.isfinite()).float()
    try:
        optimizer.step()
    finally:
        del fused.grad_scale, fused.found_inf


def share_what_was_found(scaler: torch.amp.GradScaler, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Gradients of one optimizer that are not finite have all of them leave the step out."""
    if len(optimizers) == 1:
        return
    found = [value for each in optimizers for value in scaler._found_inf_per_device(each).values()]
    device = found[0].device
    worst = torch.stack([value.to(device, non_blocking=True) for value in found]).amax(0)
    for value in found:
        value.copy_(worst, non_blocking=True)

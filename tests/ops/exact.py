"""How close to float64 a fused op must come: no further off than twice what torch's own ops are in the same type."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from gpupipe.device.jit import interpreted

Values = Mapping[str, torch.Tensor]


def results(function: Callable[..., object], inputs: Values, weights: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Outputs of a call and the gradients of all inputs, for a loss that weighs every output element.

    ``weights``: one tensor an output, of its shape.
    """
    leaves = {name: value.detach().clone().requires_grad_() for name, value in inputs.items()}
    made = function(**leaves)
    outputs = list(made) if isinstance(made, tuple) else [made]
    loss = sum((out.to(torch.float64) * weight).sum() for out, weight in zip(outputs, weights, strict=True))
    loss.backward()  # type: ignore[union-attr]
    found = {f"out{number}": out.detach() for number, out in enumerate(outputs)}
    for name, leaf in leaves.items():
        assert leaf.grad is not None, f"no gradient of {name}"
        assert leaf.grad.dtype == leaf.dtype
        found[f"d{name}"] = leaf.grad
    return found


def cast(inputs: Values, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: value.to(dtype) for name, value in inputs.items()}


def hold(
    fused: Callable[..., object], eager: Callable[..., object], inputs: Values, weights: list[torch.Tensor], dtype: torch.dtype
) -> None:
    """Compares a fused op with eager torch in ``dtype`` and with float64 of the same inputs, outputs and gradients.

    The bound is twice eager's largest error, and never under 4 ulps of the largest value (eager may be right by luck). Triton's
    interpreter cuts bfloat16 off where a GPU rounds: there a whole ulp of each value more is allowed.
    """
    narrow = cast(inputs, dtype)
    found = results(fused, narrow, weights)
    plain = results(eager, narrow, weights)
    truth = results(eager, cast(narrow, torch.float64), weights)
    for name, exact in truth.items():
        assert found[name].shape == exact.shape, name
        assert found[name].dtype == plain[name].dtype, name
        if not exact.numel():
            continue
        largest = exact.abs().max().item()
        bound = 2 * (plain[name].double() - exact).abs().max().item()
        bound = max(bound, 4 * torch.finfo(torch.float32).eps * largest, torch.finfo(dtype).eps * largest / 4)
        if interpreted() and dtype == torch.bfloat16:
            bound += torch.finfo(dtype).eps * largest
        error = (found[name].double() - exact).abs().max().item()
        assert error <= bound, f"{name}: off by {error:.3g}, allowed {bound:.3g}, largest value {largest:.3g}"


def compilations(candidates: Sequence[Mapping[str, int]]) -> list[dict[str, int]]:
    """One of those candidates that differ only in how many programs there are."""
    kinds = {tuple((name, value) for name, value in config.items() if name != "PER_SM"): dict(config) for config in candidates}
    return list(kinds.values())

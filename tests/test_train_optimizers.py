"""Precision, averages and copies in odd company: several optimizers, wrong ones, assigned weights, wrapped models, files."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gpupipe import ops
from gpupipe.errors import ConfigError
from gpupipe.train import Ema, Precision, fuse, unfuse

X = torch.linspace(-2, 2, 32).view(4, 8).sin()


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


def values(model: nn.Module) -> torch.Tensor:
    return torch.cat([value.detach().float().flatten() for value in model.parameters()])


def halves(trained: list[torch.Tensor], **options: Any) -> list[torch.optim.Optimizer]:
    """Two optimizers, over the first layer and over the rest."""
    options = {"lr": 1e-2, "fused": True} | options
    return [torch.optim.AdamW(trained[:2], **options), torch.optim.AdamW(trained[2:], **options)]


def gone_back(precision: Precision, model: nn.Module, x: torch.Tensor = X) -> None:
    with precision.autocast():
        loss = model(x).float().square().mean()
    precision.backward(loss)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("masters", [False, True])
def test_two_optimizers_in_one_step_are_one_over_all(dtype: str, masters: bool) -> None:
    """Where the scale grows, and where it overflows, each sees gradients of the scale that they were made with."""
    config = {"dtype": dtype, "master_weights": masters}
    if dtype == "float16":
        config |= {"initial_scale": 2.0**17, "growth_interval": 2}
    ends, scales = [], []
    for several in (False, True):
        precision, model = Precision(config), small()
        trained = precision.prepare(model)
        optimizers = halves(trained) if several else [torch.optim.AdamW(trained, lr=1e-2, fused=True)]
        for number in range(8):
            gone_back(precision, model, X * (1e4 if number == 4 else 1))
            precision.step(optimizers if several else optimizers[0], clip=1.0)
            scales.append(float(precision.scale))
        ends.append(values(model))
    assert torch.equal(ends[0], ends[1])
    assert scales[:8] == scales[8:]
    assert dtype == "bfloat16" or len(set(scales)) > 1, "it did not grow, so that nothing is shown"


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_gradients_of_one_that_are_not_finite_hold_back_both(dtype: str, fused: bool) -> None:
    precision, model = Precision({"dtype": dtype, "initial_scale": 8.0}), small()
    optimizers = halves(precision.prepare(model), fused=fused)
    gone_back(precision, model)
    assert model[0].bias.grad is not None
    model[0].bias.grad[0] = float("inf")
    before = values(model)
    assert not precision.step(optimizers).isfinite()
    assert torch.equal(values(model), before), "the other one has moved"
    assert dtype == "float32" or precision.scale == 4.0


def test_a_second_step_behind_one_backward_is_refused_under_a_scale() -> None:
    """Its gradients would be divided by a scale that the first step has moved."""
    precision, model = Precision({"dtype": "float16"}), small()
    one, other = halves(precision.prepare(model))
    gone_back(precision, model)
    precision.step(one)
    with pytest.raises(ConfigError, match=r"step\(\[one, other\]\)"):
        precision.step(other)
    gone_back(precision, model)  # each with a backward of its own, as adversaries are trained
    precision.step(other)


def test_optimizers_over_something_else_are_refused() -> None:
    precision, model = Precision({"master_weights": True}), small()
    trained = precision.prepare(model)
    gone_back(precision, model)
    before = values(model)
    with pytest.raises(ConfigError, match=r"over the model's own '0\.weight'"):
        precision.step(torch.optim.AdamW(model.parameters(), lr=1e-2))
    with pytest.raises(ConfigError, match="over nothing of what was prepared"):
        precision.step(torch.optim.AdamW(small().parameters(), lr=1e-2))
    good = torch.optim.AdamW(trained, lr=1e-2, fused=True)
    with pytest.raises(ConfigError, match="given twice"):
        precision.step([good, good])
    with pytest.raises(ConfigError, match="optimizer is 'adam'"):
        precision.step("adam")  # type: ignore[arg-type]
    assert torch.equal(values(model), before)
    precision.step(good)
    assert not torch.equal(values(model), before)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_tensor_of_two_optimizers_is_refused(dtype: str) -> None:
    """Its gradient was divided by the loss scale twice, and counted twice in the norm."""
    precision, model = Precision({"dtype": dtype}), small()
    trained = precision.prepare(model)
    both = [torch.optim.SGD(trained, lr=1e-2), torch.optim.SGD(trained[1:2], lr=1e-2)]
    gone_back(precision, model)
    with pytest.raises(ConfigError, match=r"over one tensor, '0\.bias'"):
        precision.step(both)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_step_that_an_error_ended_does_not_spoil_the_next(dtype: str) -> None:
    precision, model = Precision({"dtype": dtype}), small()
    alone, apart = Precision({"dtype": dtype}), small()
    optimizer = torch.optim.SGD(precision.prepare(model), lr=1e-2)
    other = torch.optim.SGD(alone.prepare(apart), lr=1e-2)
    gone_back(precision, model)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(optimizer, "step", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            precision.step(optimizer)
    optimizer.zero_grad()
    gone_back(precision, model)
    gone_back(alone, apart)
    assert torch.equal(precision.step(optimizer), alone.step(other))
    assert torch.equal(values(model), values(apart))


def test_averages_of_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="this GELU has no floating parameters"):
        Ema(nn.GELU())


def test_assigned_weights_have_averages_that_follow() -> None:
    """The average would go on of tensors that the model no longer has."""
    model = small()
    ema = Ema(model, decay=0.0)
    model.load_state_dict({name: value + 1 for name, value in small().state_dict().items()}, assign=True)
    ema.update()
    assert torch.equal(ema.averages["0.weight"], model[0].weight)
    with torch.no_grad():
        model[0].weight.zero_()
    with ema.applied():
        assert model[0].weight.any()
    assert not model[0].weight.any()


def test_weights_assigned_behind_the_copies_are_refused() -> None:
    precision, model = Precision({"master_weights": True}), small()
    precision.prepare(model)
    state = {name: value.bfloat16() for name, value in small().state_dict().items()}
    with pytest.raises(ConfigError, match="without assign=True"):
        model.load_state_dict(state, assign=True)


def test_weights_assigned_before_a_step_are_told() -> None:
    precision, model = Precision({"dtype": "float32"}), small()
    optimizer = torch.optim.AdamW(precision.prepare(model), lr=1e-2)
    model.load_state_dict(small().state_dict(), assign=True)
    gone_back(precision, model)
    with pytest.raises(ConfigError, match="assign=True"):
        precision.step(optimizer)


def test_a_copy_that_loads_weights_leaves_the_first_one_s_alone() -> None:
    """A copy has hooks of its model, which would take its weights for those of the first."""
    precision, model = Precision({"master_weights": True}), small()
    precision.prepare(model)
    ema = Ema(model, weights=precision.masters)
    before = {name: value.clone() for name, value in precision.masters.items()}
    other = copy.deepcopy(model)
    other.load_state_dict({name: value * 0 for name, value in other.state_dict().items()})
    assert all(torch.equal(value, before[name]) for name, value in precision.masters.items())
    ema.update()
    assert ema.averages["0.weight"].any()


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compiled": lambda model: torch.compile(model, backend="eager"),  # type: ignore[return-value]
    "compiled part": lambda model: nn.Sequential(torch.compile(model[0], backend="eager"), *model[1:]),  # type: ignore[index, arg-type]
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_averages_of_a_wrapped_model_go_on_without_the_wrapper(wrapper: str) -> None:
    written = small()
    ema = Ema(WRAPPERS[wrapper](small()))
    for value in ema.averages.values():
        value.add_(1)
    other = Ema(written)
    other.load_state_dict(ema.state_dict())
    assert torch.equal(other.averages["0.weight"], written[0].weight + 1)
    ema.load_state_dict(other.state_dict())
    named = {f"module.{name}": value for name, value in other.averages.items()}
    other.load_state_dict({"steps": 3, "averages": named})
    assert other.steps == 3


def test_averages_of_copies_are_those_of_the_copies_whatever_wraps_the_model() -> None:
    """Names with a prefix would not be found among them: the average would be of the rounded weights."""
    precision, model = Precision({"master_weights": True}), small()
    precision.prepare(model)
    wrapped = torch.compile(model, backend="eager")
    ema = Ema(wrapped, decay=0.0, weights=precision.masters)
    for value in precision.masters.values():
        value.add_(1e-4)  # nothing in bfloat16
    ema.update()
    assert torch.equal(ema.averages["0.weight"], precision.masters["0.weight"])
    with pytest.raises(ConfigError, match=r"'9\.weight' .* no parameter of the model"):
        Ema(model, weights={"9.weight": torch.zeros(1)})
    other = Precision({"dtype": "float32"})
    target = small()
    other.prepare(target)
    other.load_state_dict({"scaler": {}, "masters": {f"_orig_mod.{k}": v for k, v in precision.masters.items()}}, target)
    assert torch.equal(target[0].weight, precision.masters["0.weight"])


def test_averages_of_another_model_are_told_with_what_differs() -> None:
    state = Ema(nn.Sequential(nn.Linear(8, 3))).state_dict()
    with pytest.raises(ConfigError, match=r"'0\.bias' differs, \(3,\) in them and \(16,\) here"):
        Ema(small()).load_state_dict(state)
    with pytest.raises(ConfigError, match="has no 'averages'"):
        Ema(small()).load_state_dict({"steps": 1})


def through_file(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), through_file])
@pytest.mark.parametrize("config", [{"keep_float32": ("2",)}, {"master_weights": True, "keep_float32": ("2",)}])
def test_prepared_and_fused_models_are_copied_and_saved(config: dict[str, Any], way: Callable[[nn.Module], Any]) -> None:
    model, precision = small(), Precision(config)
    fuse(model)
    precision.prepare(model)
    with ops.use("reference"), precision.autocast():
        other = way(model)
        assert torch.equal(other(X), model(X))
        seen: list[torch.dtype] = []
        other[2].register_forward_hook(lambda _, args, out: seen.append(out.dtype))
        other(X).sum().backward()
    assert seen == [torch.float32], "it has forgotten that this one computes in float32"
    assert all(value.grad is not None for value in other.parameters())
    assert all(value.grad is None for value in model.parameters())


def test_a_module_in_float32_is_unfused_too() -> None:
    """Behind prepare() the class that is fused lies within another one of ours."""
    model, precision = small(), Precision({"keep_float32": ("2",)})
    written = type(model[2])
    fuse(model)
    precision.prepare(model)
    with ops.use("reference"), precision.autocast():
        expected = model(X)
        unfuse(model)
        assert "Fused" not in str(model)
        assert isinstance(model[2], written)
        seen: list[torch.dtype] = []
        model[2].register_forward_hook(lambda _, args, out: seen.append(out.dtype))
        assert torch.allclose(model(X), expected, atol=2e-2)
    assert seen == [torch.float32]

"""Precision of training steps: a scale with a ceiling, steps left out, float32 copies and sums, modules in float32."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gpupipe.errors import ConfigError
from gpupipe.train import Ema, Precision, load_checkpoint, save_checkpoint


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


def adamw(trained: list[torch.Tensor], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained, lr=1e-2, **{"fused": True, **options})


def values(model: nn.Module) -> list[torch.Tensor]:
    return [value.detach().clone() for value in model.parameters()]


def take(
    precision: Precision, model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, **options: Any
) -> torch.Tensor:
    with precision.autocast():
        loss = model(x).float().square().mean()
    precision.backward(loss)
    return precision.step(optimizer, **options)


def test_a_step_that_overflows_is_left_out_and_halves_the_scale() -> None:
    precision, model = Precision({"dtype": "float16", "initial_scale": 2.0**24}), small()
    optimizer = adamw(precision.prepare(model))
    before = values(model)
    norm = take(precision, model, optimizer, torch.randn(4, 8))
    assert not norm.isfinite(), "gradients of a loss times 2**24 are beyond float16"
    assert all(torch.equal(a, b) for a, b in zip(before, values(model), strict=True)), "the step was left out"
    assert not optimizer.state_dict()["state"][0]["step"], "and not counted"
    assert (precision.used_scale, precision.scale) == (2.0**24, 2.0**23)


def test_the_scale_grows_to_its_ceiling_and_no_further() -> None:
    precision, model = Precision({"dtype": "float16", "initial_scale": 256, "growth_interval": 2, "max_scale": 768}), small()
    optimizer = adamw(precision.prepare(model))
    scales = []
    for _ in range(8):
        assert take(precision, model, optimizer, torch.randn(4, 8)).isfinite()
        scales.append(float(precision.scale))
    assert scales == [256, 512, 512, 768, 768, 768, 768, 768], "GradScaler alone would go on to double"


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_that_is_not_finite_changes_nothing_without_a_scale_too(dtype: str, fused: bool) -> None:
    precision, model = Precision({"dtype": dtype}), small()
    optimizer = adamw(precision.prepare(model), fused=fused)
    take(precision, model, optimizer, torch.randn(4, 8))
    before, counted = values(model), copy.deepcopy(optimizer.state_dict()["state"])
    for odd in (float("nan"), float("inf")):
        assert not take(precision, model, optimizer, torch.full((4, 8), odd), clip=1.0).isfinite()
    assert all(torch.equal(a, b) for a, b in zip(before, values(model), strict=True))
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(counted[k][name], after[k][name]) for k in counted for name in counted[k])
    assert take(precision, model, optimizer, torch.randn(4, 8)).isfinite(), "nothing is left of it in the gradients"


def test_gradients_are_clipped_after_they_are_unscaled() -> None:
    norms = {}
    for dtype in ("float32", "float16"):
        precision, model = Precision({"dtype": dtype}), small()
        optimizer = torch.optim.SGD(precision.prepare(model), lr=1.0)
        before = values(model)
        norms[dtype] = take(precision, model, optimizer, 9 * torch.randn(4, 8, generator=torch.manual_seed(1)), clip=0.25)
        moved = torch.cat([(a - b).flatten() for a, b in zip(values(model), before, strict=True)])
        assert float(moved.norm()) == pytest.approx(0.25, rel=1e-3)
    assert float(norms["float16"]) == pytest.approx(float(norms["float32"]), rel=1e-2), "float16 has 11 bits"


@pytest.mark.parametrize("clip", [0.25, 1e4])
@pytest.mark.parametrize("kinds", [[torch.optim.SGD], [torch.optim.AdamW], [torch.optim.SGD, torch.optim.AdamW]])
def test_fused_optimizers_clip_in_their_own_pass_as_torch_does_before_it(
    kinds: list[type[torch.optim.Optimizer]], clip: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = 9 * torch.randn(4, 8, generator=torch.manual_seed(1))
    made = []
    for own in (True, False):
        precision, model = Precision({"dtype": "float32"}), small()
        trained = precision.prepare(model)
        cut = 2 if len(kinds) == 2 else len(trained)
        parts = [part for part in (trained[:cut], trained[cut:]) if part]
        optimizers = [kind(part, lr=0.1, fused=True) for kind, part in zip(kinds, parts, strict=True)]  # type: ignore[call-arg]
        for _ in range(3):
            if own:
                monkeypatch.setattr("gpupipe.train.precision.shrink", None)  # no pass over the gradients before
                take(precision, model, optimizers, x, clip=clip)  # type: ignore[arg-type]
                continue
            model(x).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(trained, clip)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        made.append(values(model))
    for one, other in zip(*made, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_momentum_begins_with_the_first_step_that_is_taken(dtype: str, clip: float | None) -> None:
    """torch's fused SGD makes it of memory as it comes, and a step that is left out on the device fills none of it."""
    made = []
    for fused in (True, False):
        precision, model = Precision({"dtype": dtype, "initial_scale": 16}), small()
        options = {"fused": True} if fused else {"foreach": False}
        optimizer = torch.optim.SGD(precision.prepare(model), lr=0.1, momentum=0.9, **options)  # type: ignore[arg-type]
        before = values(model)
        assert not take(precision, model, optimizer, torch.full((4, 8), float("inf")), clip=clip).isfinite()
        assert all(torch.equal(a, b) for a, b in zip(before, values(model), strict=True))
        assert not [state for state in optimizer.state.values() if state.get("momentum_buffer") is not None]
        for seed in range(3):
            take(precision, model, optimizer, torch.randn(4, 8, generator=torch.manual_seed(seed)), clip=clip)
        made.append(values(model))
    for one, other in zip(*made, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_fused_optimizer_that_took_up_the_state_of_another_steps_as_that_one(dtype: str) -> None:
    """torch's load_state_dict takes over that the groups are not fused."""
    precision, model = Precision({"dtype": dtype, "initial_scale": 16}), small()
    trained = precision.prepare(model)
    before = adamw(trained, fused=False)
    take(precision, model, before, torch.randn(4, 8), clip=1.0)
    optimizer = adamw(trained)
    optimizer.load_state_dict(before.state_dict())
    kept = values(model)
    take(precision, model, optimizer, torch.randn(4, 8), clip=1.0)
    assert not all(torch.equal(a, b) for a, b in zip(kept, values(model), strict=True))
    kept = values(model)
    take(precision, model, optimizer, torch.full((4, 8), float("inf")), clip=1.0)
    assert all(torch.equal(a, b) for a, b in zip(kept, values(model), strict=True))


def test_a_sparse_gradient_is_refused_by_the_name_of_its_weight() -> None:
    precision, model = Precision({"dtype": "float32"}), nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(precision.prepare(model), lr=1.0)
    with pytest.raises(ConfigError, match=r"'0\.weight' is sparse.*\n.*without sparse=True"):
        take(precision, model, optimizer, torch.tensor([1, 2]), clip=1.0)


def test_one_optimizer_that_does_not_divide_has_all_gradients_shrunk_before() -> None:
    precision, model = Precision({"dtype": "float32"}), small()
    trained = precision.prepare(model)
    optimizers = [torch.optim.SGD(trained[:2], lr=1.0, fused=True), torch.optim.SGD(trained[2:], lr=1.0, foreach=True)]
    before = values(model)
    take(precision, model, optimizers, 9 * torch.randn(4, 8), clip=0.25)  # type: ignore[arg-type]
    moved = torch.cat([(a - b).flatten() for a, b in zip(values(model), before, strict=True)])
    assert float(moved.norm()) == pytest.approx(0.25, rel=1e-3)


def test_parts_of_a_step_are_added_in_float32() -> None:
    """A thousand gradients of 1 and one of 1000: bf16 has eight bits and would stay at 256."""
    for masters in (False, True):
        precision, model = Precision({"dtype": "bfloat16", "master_weights": masters}), nn.Linear(1, 1, bias=False)
        (weight,) = precision.prepare(model)
        for _ in range(1000):
            with precision.autocast():
                precision.backward(model(torch.ones(1, 1)).sum())
        assert weight.grad is not None
        assert (weight.grad.dtype, float(weight.grad)) == (torch.float32, 1000.0)
        assert model.weight.dtype == (torch.bfloat16 if masters else torch.float32)


def test_steps_too_small_for_bf16_add_up_in_its_copies() -> None:
    precision, model = Precision({"master_weights": True}), nn.Linear(4, 4, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(precision.prepare(model), lr=1e-3)
    for _ in range(10):
        with precision.autocast():
            precision.backward(model(torch.ones(1, 4)).sum())
        precision.step(optimizer)
    assert torch.allclose(precision.masters["weight"], torch.full((4, 4), 0.99), atol=1e-6)
    assert torch.equal(model.weight, torch.full((4, 4), 0.99).bfloat16()), "one step of 0.001 rounds to none in bf16"


def test_modules_by_name_stay_in_float32() -> None:
    precision = Precision({"dtype": "float16", "master_weights": True, "keep_float32": ("2", "3*")})
    model = small()
    precision.prepare(model)
    model = copy.deepcopy(model)
    seen: dict[str, tuple[torch.dtype, torch.dtype]] = {}
    for name, module in model.named_children():
        module.register_forward_hook(lambda _, args, out, name=name: seen.update({name: (args[0].dtype, out.dtype)}))
    with precision.autocast():
        model(torch.randn(2, 8))
    assert seen["0"][1] == torch.float16
    assert seen["2"][1] == seen["3"][1] == torch.float32
    assert {name: value.dtype for name, value in model.named_parameters()} == {
        "0.weight": torch.float16, "0.bias": torch.float16, "2.weight": torch.float32, "2.bias": torch.float32,
        "3.weight": torch.float32, "3.bias": torch.float32,
    }  # fmt: skip
    with precision.autocast():
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        x = torch.randn(2, 8)
        assert torch.equal(compiled(x), model(x))
    with pytest.raises(ConfigError, match=r"'blocks\.\*', which no module is"):
        Precision({"keep_float32": ("blocks.*",)}).prepare(small())


@pytest.mark.parametrize(
    "settings", [{"dtype": "bfloat16"}, {"dtype": "float16"}, {"dtype": "float16", "master_weights": True}]
)
def test_a_run_goes_on_from_a_file_to_the_bit(settings: dict[str, Any], tmp_path: Path) -> None:
    batches = [torch.randn(4, 8, generator=torch.manual_seed(k)) for k in range(8)]

    def parts() -> tuple[Precision, nn.Module, torch.optim.Optimizer, Ema]:
        precision, model = Precision({**settings, "growth_interval": 3}), small()
        optimizer = adamw(precision.prepare(model))
        return precision, model, optimizer, Ema(model, 0.9, weights=precision.masters)

    def go(over: list[torch.Tensor], made: tuple[Precision, nn.Module, torch.optim.Optimizer, Ema]) -> list[float]:
        precision, model, optimizer, ema = made
        norms = []
        for x in over:
            norms.append(float(take(precision, model, optimizer, x, clip=1.0)))
            ema.update()
        return norms

    whole, first, second = parts(), parts(), parts()
    expected = go(batches, whole)
    go(batches[:4], first)
    save_checkpoint(
        tmp_path / "run.pt", model=first[1].state_dict(), optimizer=first[2].state_dict(), precision=first[0].state_dict(),
        ema=first[3].state_dict(), step=4,
    )  # fmt: skip
    found = load_checkpoint(tmp_path / "run.pt")
    second[1].load_state_dict(found["model"])
    second[2].load_state_dict(found["optimizer"])
    second[0].load_state_dict(found["precision"], second[1])
    second[3].load_state_dict(found["ema"])
    assert go(batches[4:], second) == expected[4:]
    assert second[0].scale == whole[0].scale
    assert all(torch.equal(a, b) for a, b in zip(values(second[1]), values(whole[1]), strict=True))
    assert all(torch.equal(second[3].averages[name], value) for name, value in whole[3].averages.items())


def test_float32_weights_of_a_file_serve_another_precision(tmp_path: Path) -> None:
    one, other = small(), small()
    precision = Precision({"master_weights": True})
    precision.prepare(one)
    plain = Precision({"dtype": "float32"})
    plain.prepare(other)
    nn.init.zeros_(other[0].weight)
    plain.load_state_dict(precision.state_dict(), other)
    assert torch.equal(other[0].weight, precision.masters["0.weight"])
    back = Precision({"master_weights": True})
    third = small()
    back.prepare(third)
    nn.init.zeros_(third[0].weight)
    back.load_state_dict(plain.state_dict(), third)
    assert not back.masters["0.weight"].any(), "without float32 weights in the file, the copies are those of the model"
    with pytest.raises(ConfigError, match="which the model does not have"):
        plain.load_state_dict({"scaler": {}, "masters": {"other": torch.zeros(1)}}, other)


def test_models_in_low_precision_get_copies_or_an_error() -> None:
    precision = Precision({"master_weights": True, "keep_float32": ("0", "0")})
    model = small().bfloat16()
    trained = precision.prepare(model.requires_grad_(True))
    assert {value.dtype for value in trained[2:]} == {torch.float32}
    with pytest.raises(ConfigError, match="second time"):
        precision.prepare(model)
    with pytest.raises(ConfigError, match=r"'0\.weight' is bfloat16"):
        Precision().prepare(small().bfloat16())


def test_settings_that_make_no_sense_are_refused() -> None:
    for fields, words in (
        ({"initial_scale": 8.0, "max_scale": 4.0}, "above max_scale"),
        ({"dtype": "float32", "master_weights": True}, "keep all weights twice"),
        ({"dtype": "float17"}, "did you mean"),
        ("float17", "did you mean"),
        ({"growth_intervall": 3}, "growth_interval"),
    ):
        with pytest.raises(ConfigError, match=words):
            Precision(fields)  # type: ignore[arg-type]
    precision = Precision()
    optimizer = adamw(precision.prepare(small()))
    with pytest.raises(ConfigError, match="without gradients"):
        precision.step(optimizer)
    with pytest.raises(ConfigError, match=r"before prepare\(\)"):
        Precision().step(optimizer)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), ("fp32", torch.float32)])
def test_the_name_of_a_type_stands_for_its_settings_as_in_a_file(name: str, dtype: torch.dtype) -> None:
    """Files took ``mixed_precision: bf16``, and Precision("bf16") wanted a PrecisionConfig."""
    assert Precision(name).dtype == Precision({"dtype": name}).dtype == dtype


def test_a_step_leaves_no_gradients_behind() -> None:
    precision, model = Precision("fp32", "cpu"), small()
    optimizer = adamw(precision.prepare(model))
    precision.backward(model(torch.ones(2, 8)).sum())
    precision.step(optimizer)
    assert all(value.grad is None for value in model.parameters())


def test_averages_follow_the_weights_and_stand_in_for_them() -> None:
    model = nn.Linear(2, 2)
    ema = Ema(model, decay=0.5)
    start = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1.0)
    ema.update()
    # In the first step the decay is 1 / 10: the average is nine tenths of the way.
    assert torch.allclose(ema.averages["weight"], start + 0.9)
    now = model.weight.detach().clone()
    with ema.applied():
        assert torch.equal(model.weight, ema.averages["weight"])
    assert torch.equal(model.weight, now)
    with pytest.raises(ConfigError, match="another model"):
        ema.load_state_dict(Ema(nn.Linear(3, 2)).state_dict())
    with pytest.raises(ConfigError, match="share"):
        Ema(model, decay=1.5)


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "runs" / "run.pt"
    save_checkpoint(path, step=1)

    def fail(_: object, file: Any) -> None:
        file.write(b"half")
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fail)
        with pytest.raises(ConfigError, match="no space left"):
            save_checkpoint(path, step=2)
    assert load_checkpoint(path) == {"step": 1}
    assert [file.name for file in path.parent.iterdir()] == ["run.pt"]
    (path.parent / "run.pt.part").write_bytes(b"left by a process that was killed")
    save_checkpoint(path, step=3)
    assert load_checkpoint(path) == {"step": 3}
    assert [file.name for file in path.parent.iterdir()] == ["run.pt"]
    with pytest.raises(ConfigError, match="version of its own"):
        save_checkpoint(path, version=3)


def test_files_that_are_no_checkpoint_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.pt").touch()
    (tmp_path / "text.pt").write_text("no checkpoint")
    torch.save({"model": {}}, tmp_path / "other.pt")
    torch.save({"version": 1, "launches": {}, "code": Precision}, tmp_path / "code.pt")
    told = dict.fromkeys(("missing", "empty", "text", "code"), "cannot read") | {"other": "version None"}
    for name, words in told.items():
        with pytest.raises(ConfigError, match=words) as raised:
            load_checkpoint(tmp_path / f"{name}.pt")
        assert name in str(raised.value)


def test_a_bad_clip_now_and_then_does_not_bring_the_scale_to_nothing() -> None:
    model = nn.Linear(4, 1)
    precision = Precision({"dtype": "float16", "initial_scale": 16.0, "min_scale": 2.0}, "cpu")
    optimizer = torch.optim.SGD(precision.prepare(model), lr=0.1)
    for _ in range(10):
        precision.backward(model(torch.full((1, 4), torch.inf)).sum())
        precision.step(optimizer)
    assert float(precision.scale) == 2.0
    with pytest.raises(ConfigError, match="below min_scale"):
        Precision({"initial_scale": 0.5})


def test_weights_loaded_into_the_model_alone_stay() -> None:
    model = nn.Linear(4, 1)
    precision = Precision({"dtype": "bfloat16", "master_weights": True}, "cpu")
    optimizer = torch.optim.SGD(precision.prepare(model), lr=0.0)
    exact = {name: value.clone() for name, value in precision.masters.items()}
    model.load_state_dict(model.state_dict())
    assert all(torch.equal(precision.masters[name], value) for name, value in exact.items()), "their own, rounded"
    model.load_state_dict({name: torch.full_like(value, 5.0) for name, value in model.state_dict().items()})
    precision.backward(model(torch.ones(1, 4, dtype=torch.bfloat16)).sum())
    precision.step(optimizer)
    assert all(bool((value == 5).all()) for value in model.parameters())


@pytest.mark.parametrize("clip", [-1.0, 0.0, float("nan"), float("inf"), 10**400])
def test_a_norm_that_is_none_is_refused(clip: float) -> None:
    model = nn.Linear(4, 1)
    precision = Precision({"dtype": "float32"}, "cpu")
    optimizer = torch.optim.SGD(precision.prepare(model), lr=0.1)
    precision.backward(model(torch.ones(1, 4)).sum())
    with pytest.raises(ConfigError, match="is no norm"):
        precision.step(optimizer, clip=clip)


def test_a_model_elsewhere_is_told() -> None:
    with pytest.raises(ConfigError, match="is on meta"):
        Precision({"dtype": "float32"}, "cpu").prepare(nn.Linear(2, 2, device="meta"))


def test_what_could_not_be_read_again_is_refused_before_the_file_is_touched(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    save_checkpoint(path, step=1)
    for part, says in (
        (np.float64(0.1), r"best is a numpy\.float64"),
        ({"a": [np.zeros(2)]}, r"best\['a'\]\[0\] is a numpy\.ndarray"),
        (nn.Linear(1, 1), "give its state_dict"),
        (Path("x"), "pathlib"),
    ):
        with pytest.raises(ConfigError, match=says):
            save_checkpoint(path, best=part)
    assert load_checkpoint(path)["step"] == 1


def test_a_turned_bit_is_told(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    save_checkpoint(path, weights=torch.arange(4096.0))
    data = bytearray(path.read_bytes())
    place = data.index(torch.tensor([2000.0, 2001.0]).numpy().tobytes())
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="it is damaged"):
        load_checkpoint(path)


def test_gradients_without_the_loss_scale_are_refused() -> None:
    """A plain backward's were divided by a scale that they did not have: weights stood still, and nothing told."""
    precision, model = Precision({"dtype": "float16"}), small()
    optimizer = adamw(precision.prepare(model))
    for _ in range(2):
        model(torch.randn(4, 8)).square().mean().backward()
        with pytest.raises(ConfigError, match=r"no precision\.backward\(\) since the last step") as caught:
            precision.step(optimizer)
        assert "in place of loss.backward()" in str(caught.value)
        optimizer.zero_grad()
        take(precision, model, optimizer, torch.randn(4, 8))


def test_a_step_that_leaves_the_loss_scale_in_the_gradients_is_told() -> None:
    precision, model = Precision({"dtype": "float16"}), small()
    optimizer = adamw(precision.prepare(model))

    def back() -> None:
        with precision.autocast():
            precision.backward(model(torch.randn(4, 8)).square().mean())

    back()
    back()  # parts of one step
    before = values(model)
    with pytest.raises(ConfigError, match=r"precision\.step\(optimizer\) in place of optimizer\.step\(\)"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, values(model), strict=True))
    precision.step(optimizer)
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    back()
    adamw(list(other.parameters())).step()  # of what was never prepared
    precision.step(optimizer)
    take(precision, model, optimizer, torch.randn(4, 8))
    plain, model = Precision({"dtype": "bfloat16"}), small()
    optimizer = adamw(plain.prepare(model))
    for _ in range(2):  # without a scale it is the optimizer's own affair
        plain.backward(model(torch.randn(4, 8)).square().mean())
        optimizer.step()

"""Public functions of gpupipe.train, each given arguments of the wrong kind: one clear error, which names the argument."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpupipe import ops
from gpupipe.errors import GpupipeError
from gpupipe.train import (
    AdaptiveGraph,
    Ema,
    GridAttention,
    LayerNorm,
    Metrics,
    Mlp,
    PipelineExecutor,
    Precision,
    RMSNorm,
    TrainingConfig,
    Watch,
    compare,
    fuse,
    load_checkpoint,
    recompute,
    residual_attention,
    residual_mlp,
    save_checkpoint,
    unfuse,
    use,
)

WRONG: tuple[Any, ...] = (
    None, -1, 2.5, float("nan"), True, "x", b"x", [1, "a"], {"a": 1}, object(), torch.ones(3), torch.ones(()), nn.Linear(2, 2),
    nn.Linear, print,
)  # fmt: skip
X = torch.ones(2, 4)


@pytest.fixture(autouse=True)
def plain_ops() -> Iterator[None]:
    with ops.use("reference"), use("fused"):
        yield


def model() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


def fused() -> nn.Module:
    made = model()
    fuse(made)
    return made


def blocks() -> nn.Module:
    made = nn.Module()
    made.blocks = nn.ModuleList([model(), model()])
    return made


def precision() -> Precision:
    return Precision({"dtype": "float32"}, "cpu")


def stepped(**given: Any) -> torch.Tensor:
    trained, own = model(), precision()
    optimizer = torch.optim.AdamW(own.prepare(trained), lr=1e-3)
    trained(X).sum().backward()
    return own.step(**{"optimizer": optimizer, **given})


def loaded(**given: Any) -> None:
    trained, own = model(), precision()
    own.prepare(trained)
    own.load_state_dict(**{"state": own.state_dict(), "model": trained, **given})


def watched(**given: Any) -> Any:
    watch = Watch(model(), lambda net, batch: net(batch).mean(), precision())
    return watch.after(**{"step": 1, "batches": [X], "loss": torch.ones(()), "norm": torch.ones(()), **given})


def loss(net: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return net(batch).mean()  # type: ignore[no-any-return]


def scalar() -> torch.Tensor:
    return torch.ones((), requires_grad=True) * 1


def with_defaults(function: Callable[..., Any], **defaults: Any) -> Callable[..., Any]:
    return lambda **given: function(**{name: make() for name, make in defaults.items()} | given)


def value(of: Any) -> Callable[[], Any]:
    return lambda: of


CALLS: dict[str, tuple[Callable[..., Any], str]] = {
    "AdaptiveGraph": (
        with_defaults(AdaptiveGraph, target=model, device=value("cpu")),
        "target warmup_steps capture_frequency max_graphs optimizers capture segments device",
    ),
    "Ema": (with_defaults(Ema, model=model), "model decay weights"),
    "Ema.load_state_dict": (lambda **given: Ema(model()).load_state_dict(**given), "state"),
    "GridAttention": (with_defaults(GridAttention, size=value(8), heads=value(2)), "size heads axis"),
    "GridAttention.forward": (
        with_defaults(GridAttention(4, 2), x=lambda: torch.ones(1, 4, 4), grid=value((1, 2, 2))), "x grid rope",
    ),
    "LayerNorm": (with_defaults(LayerNorm, size=value(8)), "size eps"),
    "LayerNorm.forward": (lambda **given: LayerNorm(4)(**{"x": X, **given}), "x scale shift"),
    "RMSNorm": (with_defaults(RMSNorm, size=value(8)), "size eps"),
    "Mlp": (with_defaults(Mlp, size=value(8), hidden=value(8)), "size hidden activation dropout"),
    "Mlp.forward": (lambda **given: Mlp(4, 8)(**{"x": X, **given}), "x gate residual"),
    "Metrics.log": (lambda **given: Metrics().log(**given), "loss"),
    "PipelineExecutor": (
        with_defaults(PipelineExecutor, batches=lambda: [1], device=value("cpu")),
        "batches prepare accumulate ahead device",
    ),
    "PipelineExecutor.load_state_dict": (lambda **given: PipelineExecutor([1], device="cpu").load_state_dict(**given), "state"),
    "Precision": (with_defaults(Precision, device=value("cpu")), "config device"),
    "Precision.prepare": (lambda **given: precision().prepare(**given), "model"),
    "Precision.backward": (lambda **given: precision().backward(**{"loss": scalar(), **given}), "loss scale"),
    "Precision.step": (stepped, "optimizer clip"),
    "Precision.load_state_dict": (loaded, "state model"),
    "TrainingConfig": (TrainingConfig, "mixed_precision cuda_graph recompute other"),
    "TrainingConfig.from_yaml": (TrainingConfig.from_yaml, "path"),
    "Watch": (with_defaults(Watch, model=model, loss_of=value(loss), precision=precision), "model loss_of precision config"),
    "Watch.after": (watched, "step loss norm"),
    "compare": (with_defaults(compare, model=fused, batches=lambda: [X], loss=value(loss)), "model seed"),
    "fuse": (with_defaults(fuse, model=model), "model kinds skip verify bound"),
    "unfuse": (unfuse, "model"),
    "use": (lambda **given: use(*({"way": "fused"} | given).values()), "way what"),
    "load_checkpoint": (lambda **given: load_checkpoint(**{"path": "none.pt", **given}), "path device"),
    "save_checkpoint": (lambda **given: save_checkpoint(**given), "path"),
    "recompute": (with_defaults(recompute, model=blocks, policy=value("block")), "model policy blocks"),
    "residual_attention": (
        with_defaults(residual_attention, x=value(X), norm=lambda: nn.LayerNorm(4), attention=lambda: torch.sin),
        "x norm gate scale shift then then_scale",
    ),
    "residual_mlp": (
        with_defaults(residual_mlp, x=value(X), norm=lambda: nn.LayerNorm(4), mlp=lambda: Mlp(4, 8)),
        "x norm gate scale normalised",
    ),
}  # fmt: skip
CASES = [(name, argument) for name, (_, arguments) in CALLS.items() for argument in arguments.split()]


@pytest.mark.parametrize(("name", "argument"), CASES, ids=[f"{name}-{argument}" for name, argument in CASES])
def test_an_argument_of_the_wrong_kind_is_one_clear_error(
    name: str, argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a value happens to fit may pass; nothing else is raised than an error of ours."""
    monkeypatch.chdir(tmp_path)
    call, refused = CALLS[name][0], 0
    for wrong in WRONG:
        try:
            call(**{argument: wrong})
        except GpupipeError:
            refused += 1
    assert refused >= 3


@pytest.mark.parametrize(
    ("function", "argument"),
    [("residual_attention", "attention"), ("residual_mlp", "mlp"), ("compare", "batches"), ("compare", "loss"),
     ("compare", "optimizer"), ("recompute", "step")],
)  # fmt: skip
def test_functions_that_are_none_are_told(function: str, argument: str) -> None:
    """Of these only what cannot be called: what their own code raises is the caller's."""
    given: dict[str, Any] = {"policy": 1.0} if argument == "step" else {}
    for wrong in (3, "x", object()):
        with pytest.raises(GpupipeError, match=argument):
            CALLS[function][0](**given, **{argument: wrong})

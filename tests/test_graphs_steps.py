"""Steps captured with their backward: what gradients they find and leave. Copies of what has graphs; what a look costs."""

from __future__ import annotations

import copy
import io
import math
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tape import Tape
from torch import nn

from gpupipe import ops
from gpupipe.errors import ConfigError
from gpupipe.train import Ema, Precision, fuse, recompute
from gpupipe.train.graphs import AdaptiveGraph, adaptive
from gpupipe.train.graphs.signature import Inside

OPTIONS: dict[str, Any] = {"warmup_steps": 2, "capture_frequency": 2, "device": "cpu", "recorder": Tape}
STEPS = 30


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batches(steps: int = STEPS) -> list[torch.Tensor]:
    return list(torch.randn(steps, 4, 6, generator=torch.Generator().manual_seed(0)))


def values(model: nn.Module) -> torch.Tensor:
    return torch.cat([value.detach().flatten() for value in model.parameters()])


def backward_only(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Adds gradients; the optimizer's step and the clearing are the caller's."""

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        return loss

    return step


def trained(graphs: bool, *, to_none: bool, accumulate: int, threshold: str = "0") -> tuple[torch.Tensor, list[float], Any]:
    """Weights, losses and the graph's report of a loop whose step only goes back."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step: Any = backward_only(model)
    if graphs:
        step = AdaptiveGraph(step, **OPTIONS)
    losses = []
    for number, batch in enumerate(batches()):
        losses.append(float(step(batch).detach()))
        if number % accumulate == accumulate - 1:
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
    return values(model), losses, step.report() if graphs else None


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("to_none", [True, False])
def test_a_step_that_only_goes_back_leaves_its_gradients(
    to_none: bool, accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replayed without care, gradients that the loop had cleared would stay cleared, or be set where they are to be added."""
    monkeypatch.setenv("GPUPIPE_GRAPH_THRESHOLD", "0")
    expected, expected_losses, _ = trained(False, to_none=to_none, accumulate=accumulate)
    made, losses, report = trained(True, to_none=to_none, accumulate=accumulate)
    assert losses == expected_losses
    assert torch.equal(made, expected)
    assert report.hits >= (20 if accumulate == 1 or not to_none else 6), "the first of each three is always alike"


def test_gradients_that_a_step_left_are_the_caller_s() -> None:
    model = net()
    graph = AdaptiveGraph(backward_only(model), **OPTIONS)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for batch in batches(12):
        graph(batch)
        grad = model[0].weight.grad
        assert isinstance(grad, torch.Tensor)
        kept.append((grad, grad.clone()))
        model.zero_grad()
    assert graph.report().hits >= 6
    assert all(torch.equal(grad, before) for grad, before in kept), "a later replay has written into them"


def test_a_capture_that_fails_leaves_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a capture asks for is not done: gradients that it made hold anything, and would be added to."""
    monkeypatch.setattr(adaptive, "_is_ours", lambda path: path.endswith(("tape.py", "adaptive.py", "graphed.py")))
    model, twin = net(), net()

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        return loss * float(loss.detach().item() > 0)

    graph = AdaptiveGraph(step, **OPTIONS)
    for batch in batches(12):
        graph(batch), backward_only(twin)(batch)
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
        model.zero_grad(), twin.zero_grad()
    assert "item" in graph.report().failures[0]


@pytest.mark.parametrize("where", ["begin", "end"])
def test_a_whole_step_may_clear_where_it_likes(where: str) -> None:
    models = net(), net()
    steps = []
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(batch: torch.Tensor, model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
            if where == "begin":
                optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            if where == "end":
                optimizer.zero_grad()
            return loss.detach()

        steps.append(step)
    graph = AdaptiveGraph(steps[0], **OPTIONS)
    for batch in batches():
        assert torch.equal(graph(batch), steps[1](batch))
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert (one.grad is None) is (other.grad is None) is (where == "end")
            assert one.grad is None or torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
    assert graph.report().hits > 20


CLEARS = ("outside", "begin", "end", "sometimes")


def mixed(graphs: bool, clears: str, to_none: bool, steps_inside: bool) -> tuple[list[float], int]:
    """Losses, weights and gradients (NaN: none) of a step in two parts, of which one sometimes takes no part; and the hits."""
    torch.manual_seed(1)
    first, last = nn.Linear(6, 8), nn.Linear(8, 1)
    optimizers = [torch.optim.SGD(first.parameters(), lr=0.05, momentum=0.9), torch.optim.SGD(last.parameters(), lr=0.05)]

    def clear() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=to_none)

    def step(batch: torch.Tensor, alone: bool) -> torch.Tensor:
        if clears == "begin" or (clears == "sometimes" and alone):
            clear()
        hidden = first(batch).tanh()
        loss = last(hidden.detach() if alone else hidden).square().mean()
        loss.backward()
        if steps_inside:
            optimizers[0].step()
        if clears == "end":
            clear()
        return loss.detach()

    call = AdaptiveGraph(step, **OPTIONS) if graphs else step
    trace: list[float] = []
    for number, batch in enumerate(batches(40)):
        trace.append(float(call(batch[: 4 - number % 2 * 2], number % 5 in (1, 2))))
        if number % 3 == 2:
            optimizers[1].step()
            if clears == "outside":
                clear()
        for value in (*first.parameters(), *last.parameters()):
            trace += [float(value.detach().sum()), math.nan if value.grad is None else float(value.grad.sum())]
    return trace, call.report().hits if isinstance(call, AdaptiveGraph) else 0


@pytest.mark.parametrize("steps_inside", [True, False])
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("clears", CLEARS)
def test_whatever_a_step_does_to_gradients_is_done(
    clears: str, to_none: bool, steps_inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a part that takes no part are cleared, kept or added to as without graphs."""
    monkeypatch.setenv("GPUPIPE_GRAPH_THRESHOLD", "0")
    expected, _ = mixed(False, clears, to_none, steps_inside)
    made, hits = mixed(True, clears, to_none, steps_inside)
    assert made == pytest.approx(expected, rel=1e-5, nan_ok=True)
    assert hits > 5 or (clears != "end" and to_none)


def test_a_rate_that_a_scheduler_changes_is_heeded() -> None:
    """A number for a learning rate would stay in the graph as it was."""
    models = net(), net()
    steps: list[Any] = []
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):

        def step(batch: torch.Tensor, model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        steps.append(step)
    graph = AdaptiveGraph(steps[0], **OPTIONS)
    for number, batch in enumerate(batches(60)):
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 0.1 if number < 20 else 0.1 / (number + 1)
        assert torch.equal(graph(batch), steps[1](batch)), number
    assert graph.report().hits >= 10
    assert "lr=torch.tensor" in str(graph.report().failures)


def test_an_optimizer_alone_reads_the_gradients_of_this_step() -> None:
    """Its gradients lie elsewhere in each step: a graph would read those of the step it was captured in."""
    model, twin = net(), net()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, twin)]

    def step() -> None:
        optimizers[0].step()

    graph = AdaptiveGraph(step, **OPTIONS)
    kept = []
    for batch in batches():
        for each in (model, twin):
            each.zero_grad()
            each(batch).square().mean().backward()
        kept.append(model[0].weight.grad)  # so that memory is not used again
        graph()
        optimizers[1].step()
        assert torch.equal(values(model), values(twin))


def test_arguments_that_no_graph_takes_are_told() -> None:
    """Else nobody would know why nothing is ever captured."""
    graph = AdaptiveGraph(lambda x, _: x * 2, **{**OPTIONS, "warmup_steps": 0})
    x = torch.ones(3)
    for other in (torch.ones(3, device="meta"), torch.ones(3).to_sparse(), x):
        assert graph(x, other).tolist() == [2, 2, 2]
    told = graph.report().failures
    assert len(told) == 3
    for failure, word in zip(told, ("a tensor on meta", "layout sparse_coo", "twice"), strict=True):
        assert word in failure


def through_file(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), through_file])
def test_a_copy_of_a_module_with_graphs_is_a_module_of_its_own(way: Callable[[nn.Module], Any], fused: bool) -> None:
    """Not one that calls the graphs of the first, with that one's weights."""
    model = nn.Sequential(nn.LayerNorm(6), *net())
    if fused:
        fuse(model)
    batch = batches(1)[0]
    with ops.use("reference"), AdaptiveGraph(model, **{**OPTIONS, "warmup_steps": 0}).installed() as graph:
        for _ in range(4):
            model(batch).sum().backward()
        calls = graph.report().calls
        other = way(model)
        assert torch.equal(other(batch), model(batch))
        with torch.no_grad():
            other[-1].bias.add_(1)
        assert not torch.equal(other(batch), model(batch))
        other(batch).sum().backward()
        assert graph.report().calls == calls + 2, "the copy's calls are its own"
    assert not [name for name in model.__dict__ if name == "forward"]


def test_a_graph_is_copied_without_its_graphs_and_not_saved() -> None:
    model = net()
    graph = AdaptiveGraph(model, **{**OPTIONS, "warmup_steps": 0})
    batch = batches(1)[0]
    for _ in range(4):
        graph(batch).sum().backward()
    other = copy.deepcopy(graph)
    assert other.target is not model
    assert other.report().graphs == 0
    assert torch.equal(other(batch), graph(batch))
    with pytest.raises(ConfigError, match="save its module"):
        pickle.dumps(graph)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(4), nn.Dropout()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.GELU()])
        self.register_buffer("seen", torch.zeros(1))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "mode": lambda model: model[1].drop.eval(),
    "gradient": lambda model: model[0].norm.weight.requires_grad_(False),
    "memory": lambda model: setattr(model[1].norm.weight, "data", torch.zeros(4)),
    "parameter": lambda model: setattr(model[1].norm, "weight", nn.Parameter(torch.zeros(4))),
    "buffer": lambda model: setattr(model[0], "seen", torch.zeros(1)),
    "new buffer": lambda model: model[0].drop.register_buffer("more", torch.zeros(1)),
    "module": lambda model: setattr(model[1], "drop", nn.Dropout()),
    "new module": lambda model: model[0].layers.append(nn.Tanh()),
    "gone": lambda model: delattr(model[0], "drop"),
    "forward": lambda model: setattr(model[0].drop, "forward", lambda x: x),
    "class": lambda model: fuse(model),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_within_a_module_is_seen(change: str) -> None:
    model = nn.Sequential(Block(), Block())
    look = Inside(model)
    before = look()
    assert look() == before
    CHANGES[change](model)
    after = look()
    assert after != before
    assert look() == after


def test_modes_come_back_as_what_they_were() -> None:
    """Evaluation between epochs needs no new graphs."""
    model = nn.Sequential(Block(), Block())
    look = Inside(model)
    train = look()
    assert look() != (model.eval(), look())[1]
    model.train()
    assert look() == train


def test_a_look_at_two_thousand_modules_costs_little() -> None:
    """Under 3 ms even on a busy machine (0.5 ms on an idle one); taking everything down anew takes ten times that."""
    model = nn.ModuleList([Block() for _ in range(340)])
    assert sum(1 for _ in model.modules()) > 2000
    look = Inside(model)
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        look()
        times.append(time.perf_counter() - begin)
    assert min(times) < 3e-3


@pytest.mark.parametrize("master_weights", [False, True])
def test_graphs_go_before_or_behind_precision_and_optimizer(master_weights: bool) -> None:
    """As docs/runtime.md has it: with layers made again and a checkpoint loaded on the way, both give what no graph gives."""

    def trained(installed: str) -> tuple[list[float], int]:
        model = net()
        graph = AdaptiveGraph(model, **OPTIONS)
        if installed == "before":
            graph.installed()
        precision = Precision({"dtype": "bfloat16", "master_weights": master_weights}, "cpu")
        optimizer = torch.optim.AdamW(precision.prepare(model), lr=1e-2)
        averages = Ema(model, weights=precision.masters)
        if installed == "behind":
            graph.installed()
        start = copy.deepcopy((model.state_dict(), optimizer.state_dict(), precision.state_dict(), averages.state_dict()))
        losses = []
        for step, batch in enumerate(batches()):
            if step == 10:
                recompute(model, "block", blocks=[model[0], model[2]])
            if step == 20:
                model.load_state_dict(start[0])
                optimizer.load_state_dict(start[1])
                precision.load_state_dict(start[2], model)
                averages.load_state_dict(start[3])
            with precision.autocast():
                loss = model(batch).float().square().mean()
            precision.backward(loss)
            precision.step(optimizer, clip=1.0)
            averages.update()
            losses.append(float(loss.detach()))
        return losses + [float(value.sum()) for value in averages.averages.values()], graph.report().hits

    expected, none = trained("never")
    assert none == 0
    for order in ("before", "behind"):
        found, hits = trained(order)
        assert hits > 10
        assert found == pytest.approx(expected, rel=1e-5)

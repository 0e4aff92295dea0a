"""Which calls are captured and when, that replays compute what the calls do, and what happens where a capture fails."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tape import Tape
from torch import nn

from gpupipe import Batch, ops
from gpupipe.errors import ConfigError, GraphError
from gpupipe.train.graphs import AdaptiveGraph, adaptive, paused
from gpupipe.train.graphs.recorder import NotCaptured

OPTIONS: dict[str, Any] = {"warmup_steps": 4, "capture_frequency": 2, "device": "cpu", "recorder": Tape}


class Net(nn.Module):
    def __init__(self, *, normed: bool = False) -> None:
        super().__init__()
        self.one = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8) if normed else nn.Identity()
        self.other = nn.Linear(8, 3)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.other(torch.tanh(self.norm(self.one(x))))


class Asks(Net):
    """Asks the device for a value midway."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.one(x))
        if hidden.sum().item() > 1e9:
            hidden = hidden * 2
        return self.other(hidden)


@pytest.fixture(autouse=True)
def forget_compiled() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def inputs(steps: int, rows: tuple[int, ...] = (4,)) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(rows[k % len(rows)], 6, generator=generator) for k in range(steps)]


def train(model: nn.Module, call: Any, batches: list[torch.Tensor], accumulate: int = 1) -> list[float]:
    """Losses of a plain loop, with the gradients of ``accumulate`` batches added up for each step of the optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for number, batch in enumerate(batches):
        loss = call(batch).square().mean()
        loss.backward()
        losses.append(float(loss.detach()))
        if number % accumulate == accumulate - 1:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def pair(kind: type[Net] = Net, **options: Any) -> tuple[Net, Net]:
    torch.manual_seed(1)
    model = kind(**options)
    return model, copy.deepcopy(model)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("rows", [(4,), (4, 2, 7)])
def test_training_by_graphs_is_training(rows: tuple[int, ...], accumulate: int) -> None:
    model, twin = pair()
    graph = AdaptiveGraph(model, **OPTIONS)
    batches = inputs(40, rows)
    assert train(model, graph, batches, accumulate) == train(twin, twin, batches, accumulate)
    for name, value in model.state_dict().items():
        assert torch.equal(value, twin.state_dict()[name]), name
    report = graph.report()
    assert report.graphs == len(rows)
    assert report.hit_rate >= 0.8
    assert report.hits == 40 - model.calls + report.graphs, "a capture calls the module once, and is replayed at once"
    assert report.launches_saved > 0
    assert not report.failures


def test_nothing_is_captured_before_the_warm_up_or_for_once() -> None:
    model, _ = pair()
    graph = AdaptiveGraph(model, **{**OPTIONS, "warmup_steps": 10, "capture_frequency": 3})
    made = Tape.made
    for batch in inputs(10):
        graph(batch)
    assert Tape.made == made
    graph(inputs(1, (9,))[0])
    assert Tape.made == made, "a shape that came once"
    graph(inputs(1)[0]).sum().backward()
    assert Tape.made == made + 2, "a forward and its backward"


def test_the_largest_shape_comes_first() -> None:
    model, _ = pair()
    graph = AdaptiveGraph(model, **{**OPTIONS, "warmup_steps": 0, "capture_frequency": 2})
    small, large = inputs(2, (2, 16))
    with torch.no_grad():
        graph(large), graph(small), graph(small)
        assert graph.report().graphs == 1, "alone so far"
        graph(large)
        assert graph.report().graphs == 2


def test_outputs_and_gradients_are_yours_to_keep() -> None:
    model, _ = pair()
    graph = AdaptiveGraph(model, **{**OPTIONS, "warmup_steps": 0, "capture_frequency": 1})
    one, other = inputs(2)
    first = graph(one)
    kept = first.detach().clone()
    first.sum().backward()
    grads = [parameter.grad for parameter in model.parameters()]
    values = [grad.clone() for grad in grads if grad is not None]
    model.zero_grad()
    graph(other).sum().backward()
    assert torch.equal(first, kept)
    assert all(torch.equal(grad, value) for grad, value in zip(grads, values, strict=True) if grad is not None)


def test_a_second_forward_before_the_backward_runs_as_it_is() -> None:
    model, twin = pair()
    graph = AdaptiveGraph(model, **{**OPTIONS, "warmup_steps": 0, "capture_frequency": 1})
    one, other = inputs(2)
    graph(one).sum().backward()
    model.zero_grad()
    hits = graph.report().hits
    (graph(one).sum() * graph(other).sum()).backward()
    (twin(one).sum() * twin(other).sum()).backward()
    assert graph.report().hits == hits + 1
    for own, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert own.grad is not None
        assert expected.grad is not None
        assert torch.allclose(own.grad, expected.grad)
    dropped = graph(one)
    del dropped
    graph(one)
    assert graph.report().hits == hits + 3, "one whose graph was dropped holds nothing up"


def test_inputs_get_their_gradients_and_what_is_written_to_them() -> None:
    def count(x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        seen.add_(1)
        return x * 2 + seen

    class Counts(nn.Module):
        def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
            return count(x, seen)

    graph = AdaptiveGraph(Counts(), **{**OPTIONS, "warmup_steps": 0, "capture_frequency": 1})
    seen = torch.zeros(3)
    for step in range(3):
        x = torch.full((3,), float(step), requires_grad=True)
        out = graph(x, seen)
        out.sum().backward()
        assert out.tolist() == [2 * step + step + 1] * 3
        assert x.grad is not None
        assert x.grad.tolist() == [2, 2, 2]
    assert seen.tolist() == [3, 3, 3]
    assert graph.report().hits == 3


def test_running_means_go_on() -> None:
    model, twin = pair(normed=True)
    graph = AdaptiveGraph(model, **OPTIONS)
    batches = inputs(20)
    train(model, graph, batches), train(twin, twin, batches)
    assert torch.allclose(model.norm.running_mean, twin.norm.running_mean)  # type: ignore[arg-type]
    assert int(model.norm.num_batches_tracked) == 20  # type: ignore[arg-type]


def test_modes_are_told_apart() -> None:
    model, twin = pair(normed=True)
    graph = AdaptiveGraph(model, **{**OPTIONS, "warmup_steps": 0, "capture_frequency": 1})
    (batch,) = inputs(1)
    graph(batch), twin(batch)
    model.eval(), twin.eval()
    with torch.no_grad():
        assert torch.equal(graph(batch), twin(batch))
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        assert graph(batch).dtype == torch.bfloat16
    assert graph.report().signatures == 3


def whole_step(model: Net, optimizer: torch.optim.Optimizer) -> Any:
    def step(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01), foreach=False)


def test_a_whole_step_with_its_optimizer() -> None:
    model, twin = pair()
    sgd = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, twin)]
    graph, plain = AdaptiveGraph(whole_step(model, sgd[0]), **OPTIONS), whole_step(twin, sgd[1])
    for batch in inputs(30, (4, 2)):
        loss, expected = graph(batch), plain(batch)
        assert torch.equal(loss, expected)
    assert not loss.requires_grad
    assert graph.report().graphs == 2
    assert graph.report().hit_rate > 0.8


def test_optimizers_that_cannot_be_captured_are_refused() -> None:
    model, _ = pair()
    with pytest.raises(ConfigError, match="capturable=False"):
        AdaptiveGraph(lambda: None, optimizers=[adam(model)], **OPTIONS)
    bad = torch.optim.Adam(model.parameters(), lr=0.01, capturable=True)
    with pytest.raises(ConfigError, match=r"a number for learning rate, 0\.01"):
        AdaptiveGraph(lambda: None, optimizers=[bad], **OPTIONS)
    good = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01), capturable=True)
    AdaptiveGraph(lambda: None, optimizers=[good], **OPTIONS)


def test_what_asks_the_device_is_named_and_cut(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = adaptive._is_ours
    monkeypatch.setattr(adaptive, "_is_ours", lambda path: ours(path) or path.endswith("tape.py"))  # where CUDA has none
    model, twin = pair(Asks)
    graph = AdaptiveGraph(model, **OPTIONS)
    batches = inputs(40)
    with caplog.at_level(logging.WARNING, "gpupipe"):
        assert train(model, graph, batches) == pytest.approx(train(twin, twin, batches))
    report = graph.report()
    assert "test_graphs.py" in report.failures[0]
    assert "if hidden.sum().item() > 1e9" in report.failures[0]
    assert any("TT_ERR_GRAPH" in record.message for record in caplog.records)
    assert report.segments == 2, "one up to the question, and one behind it"
    assert report.graphs == 2
    assert report.hit_rate > 0.6
    assert "in 2 segments" in str(report)


def test_segments_of_several_shapes() -> None:
    model, twin = pair(Asks)
    graph = AdaptiveGraph(model, **OPTIONS)
    batches = inputs(60, (4, 2, 7))
    assert train(model, graph, batches) == pytest.approx(train(twin, twin, batches))
    report = graph.report()
    assert report.graphs >= 6, "each part for each shape"
    assert report.hit_rate > 0.6


def test_without_segments_it_goes_on_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUPIPE_GRAPH_RETRY", "2")
    model, twin = pair(Asks)
    graph = AdaptiveGraph(model, segments="off", **OPTIONS)
    batches = inputs(80)
    assert train(model, graph, batches) == train(twin, twin, batches)
    report = graph.report()
    assert report.graphs == 0
    assert report.given_up is not None
    assert "under 20 %" in report.given_up
    assert len(report.failures) == 1


def test_few_hits_are_given_up_with_a_code(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TELETRON_GRAPH_THRESHOLD", "0.5")
    model, _ = pair()
    graph = AdaptiveGraph(model, **OPTIONS)
    with caplog.at_level(logging.WARNING, "gpupipe"), torch.no_grad():
        for rows in range(1, 120):
            graph(torch.zeros(rows, 6))
    assert graph.report().given_up is not None
    assert "under 50 %" in str(graph.report())
    assert "TT_ERR_GRAPH" in caplog.text
    assert graph(torch.zeros(3, 6)).shape == (3, 3)


def test_at_most_so_many_graphs() -> None:
    model, _ = pair()
    graph = AdaptiveGraph(model, **{**OPTIONS, "max_graphs": 2})
    with torch.no_grad():
        for batch in inputs(60, (2, 3, 4, 5)):
            graph(batch)
    assert graph.report().graphs == 2


def test_batches_and_other_arguments() -> None:
    class Takes(nn.Module):
        def forward(self, batch: Any, scale: float, *, more: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {"made": batch["video"] * scale + more["one"], "given": more["one"]}

    graph = AdaptiveGraph(Takes(), **{**OPTIONS, "warmup_steps": 0, "capture_frequency": 1})
    for step in range(4):
        batch = Batch({"video": torch.full((2, 3), float(step))})
        made = graph(batch, 2.0 if step < 3 else 3.0, more={"one": torch.ones(2, 3)})
        assert made["made"].tolist() == [[(2 if step < 3 else 3) * step + 1] * 3] * 2
    assert graph.report().signatures == 2, "another number is another call"


def test_installed_the_module_keeps_its_name_and_its_checkpoint() -> None:
    model, twin = pair()
    names = list(model.state_dict())
    with AdaptiveGraph(model, **OPTIONS).installed() as graph:
        assert train(model, model, inputs(20)) == train(twin, twin, inputs(20))
        assert graph.report().hits > 10
        assert list(model.state_dict()) == names
    calls = model.calls
    model(inputs(1)[0])
    assert model.calls == calls + 1, "its own forward again"
    with pytest.raises(ConfigError, match="only a module"):
        AdaptiveGraph(lambda x: x, **OPTIONS).installed()


def test_on_the_cpu_everything_runs_as_it_is() -> None:
    model, twin = pair()
    graph = AdaptiveGraph(model, device="cpu", warmup_steps=0)
    assert train(model, graph, inputs(10)) == train(twin, twin, inputs(10))
    assert graph.report().hits == 0
    assert "no graphs on cpu" in str(graph.report())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"warmup_steps": -1}, "warmup_steps=-1 is below 0"),
        ({"capture_frequency": 0}, "capture_frequency=0 is below 1"),
        ({"max_graphs": 0}, "max_graphs=0 is below 1"),
    ],
)
def test_wrong_numbers_are_named(options: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        AdaptiveGraph(lambda: None, **{**OPTIONS, **options})


@pytest.mark.parametrize("value", ["often", "nan", "inf", "-1"])
@pytest.mark.parametrize("name", ["GPUPIPE_GRAPH_RETRY", "GPUPIPE_GRAPH_THRESHOLD"])
def test_a_wrong_variable_is_named(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name}='{value}'"):
        AdaptiveGraph(lambda: None, **OPTIONS)


AT_ONCE: dict[str, Any] = {**OPTIONS, "warmup_steps": 0, "capture_frequency": 1}


def test_what_nobody_can_follow_is_not_captured() -> None:
    class Scales(nn.Module):
        def forward(self, x: torch.Tensor, by: Any) -> torch.Tensor:
            return x * float(by)

    graph = AdaptiveGraph(Scales(), **AT_ONCE)
    assert [graph(torch.ones(1), np.int64(k)).item() for k in range(6)] == [0, 1, 2, 3, 4, 5]
    assert "a numpy.int64 among the arguments" in graph.report().failures[0]

    class Returns(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return SimpleNamespace(out=x * 2)

    graph = AdaptiveGraph(Returns(), **AT_ONCE)
    kept = [graph(torch.full((1,), float(k))).out for k in range(4)]
    assert [float(each) for each in kept] == [0, 2, 4, 6]
    assert "returns a types.SimpleNamespace" in graph.report().failures[0]


def test_what_changes_inside_a_module_is_another_call() -> None:
    model, twin = pair()
    graph = AdaptiveGraph(model, **AT_ONCE)
    (x,) = inputs(1)
    for each in (model, twin):
        each.one.requires_grad_(False)
    graph(x).sum().backward()
    for each in (model, twin):
        each.one.requires_grad_(True)
    graph(x).sum().backward(), twin(x).sum().backward()
    assert torch.equal(model.one.weight.grad, twin.one.weight.grad)  # type: ignore[arg-type]
    model.other = nn.Linear(8, 3)
    assert torch.equal(graph(x), model.forward(x)), "another module in the place of one"
    model.load_state_dict({name: value + 1 for name, value in twin.state_dict().items()}, assign=True)
    assert torch.equal(graph(x), model.forward(x)), "other memory"

    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Dropout(1.0), nn.Dropout(1.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([self.one(x), self.other(x)])

    drops = Drops()
    graph = AdaptiveGraph(drops, **AT_ONCE)
    drops.one.eval()
    assert graph(torch.ones(1)).flatten().tolist() == [1, 0]
    drops.train().other.eval()
    assert graph(torch.ones(1)).flatten().tolist() == [0, 1]


def test_a_backward_that_would_be_wrong_is_an_error() -> None:
    model, _ = pair()
    graph = AdaptiveGraph(model, **AT_ONCE)
    one, other = inputs(2)
    first = graph(one).square().sum()
    first.backward(retain_graph=True)
    graph(other).sum().backward()
    with pytest.raises(GraphError, match="a second backward"):
        first.backward()
    late = graph(one).sum()
    with torch.no_grad():
        model.one.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.backward()


def test_one_tensor_given_twice() -> None:
    class Both(nn.Module):
        def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            one.add_(1)
            return other * 1

    graph, x = AdaptiveGraph(Both(), **AT_ONCE), torch.zeros(1)
    with torch.no_grad():
        assert [float(graph(x, x)) for _ in range(4)] == [1, 2, 3, 4]


def test_switches_and_hooks_are_heeded() -> None:
    model, _ = pair()
    graph = AdaptiveGraph(model, **AT_ONCE)
    (x,) = inputs(1)
    hooked: list[int] = []
    model.register_forward_hook(lambda *_: hooked.append(1))
    graph(x)
    assert hooked == [1], "the module's own"
    signatures = graph.report().signatures
    with ops.precision("conservative"):
        graph(x)
    assert graph.report().signatures == signatures + 1
    with paused():
        calls = model.calls
        graph(x)
        assert model.calls == calls + 1
    with torch.inference_mode():
        assert graph(x).shape == (4, 3)
    losses = [graph(x).sum() for _ in range(3)]
    assert len(losses) == 3
    assert "still waited for its backward" in str(graph.report())


def test_what_was_in_the_place_of_forward_comes_back() -> None:
    model, _ = pair()
    patched = lambda x: x * 0  # noqa: E731
    model.forward = patched  # type: ignore[method-assign]
    with AdaptiveGraph(model, **AT_ONCE).installed():
        assert not model(inputs(1)[0]).any()
    assert model.__dict__["forward"] is patched


@pytest.mark.parametrize("first", [0, 1])
def test_two_graphs_of_a_module_go_in_any_order(first: int) -> None:
    model, twin = pair()
    graphs = [AdaptiveGraph(model, **OPTIONS) for _ in range(2)]
    installed = [graph.installed() for graph in graphs]
    x = inputs(1)[0]
    model(x)
    assert [graph.report().calls for graph in graphs] == [1, 1]
    installed[first].remove()
    installed[first].remove()
    assert torch.equal(model(x), twin(x))
    assert [graph.report().calls for graph in graphs] == [1 + first, 2 - first]
    installed[1 - first].remove()
    assert torch.equal(model(x), twin(x))
    assert [graph.report().calls for graph in graphs] == [1 + first, 2 - first]
    assert "forward" not in model.__dict__


def test_graphs_are_installed_once_at_a_time() -> None:
    model, twin = pair()
    graph = AdaptiveGraph(model, **OPTIONS)
    former = graph.installed()
    with pytest.raises(ConfigError, match="installed already"):
        graph.installed()
    former.remove()
    with graph.installed():
        former.remove()  # nothing any more
        x = inputs(1)[0]
        assert torch.equal(model(x), twin(x))
        assert graph.report().calls == 1
    assert "forward" not in model.__dict__


def test_hooks_of_parameters_see_a_gradient_once() -> None:
    """A graph's own gradients are no affair of theirs: they are for what the parameter gets."""
    model, twin = pair()
    for each in (model, twin):
        each.one.weight.register_hook(lambda grad: 2 * grad)
    graph = AdaptiveGraph(model, **AT_ONCE)
    (x,) = inputs(1)
    graph(x).sum().backward(), twin(x).sum().backward()
    assert graph.report().hits == 1
    assert torch.equal(model.one.weight.grad, twin.one.weight.grad)  # type: ignore[arg-type]
    assert model.one.weight is next(model.parameters()), "the module has its own parameters again"


def test_autocast_ends_with_the_forward() -> None:
    """A layer kept in float32 gets the gradients of float32, although the capture began under autocast."""

    class Keeps(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.one(x).float()
            with torch.autocast("cpu", enabled=False):
                return self.other(hidden)

    model, twin = pair(Keeps)
    graph = AdaptiveGraph(model, **AT_ONCE)
    (x,) = inputs(1)
    for call in (graph, twin):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = call(x)
        out.square().sum().backward()
    assert graph.report().hits == 1
    assert torch.equal(model.other.weight.grad, twin.other.weight.grad)  # type: ignore[arg-type]


def test_parameters_that_are_read_past_the_module_get_their_gradients() -> None:
    class Keeps(Net):
        def __init__(self) -> None:
            super().__init__()
            self.kept = [self.one.weight]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, self.kept[0]).sum() + super().forward(x).sum()

    torch.manual_seed(1)
    model = Keeps()
    graph = AdaptiveGraph(model, **AT_ONCE)
    (x,) = inputs(1)
    graph(x).backward()
    found = model.one.weight.grad
    model.zero_grad()
    model(x).backward()
    assert graph.report().hits == 1
    assert torch.allclose(found, model.one.weight.grad)  # type: ignore[arg-type]


def test_what_a_step_returns_keeps_no_graph() -> None:
    """It would keep autograd's nodes of the parameters alive, from which no backward may come into a capture."""
    model, _ = pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = AdaptiveGraph(whole_step(model, optimizer), **OPTIONS)
    assert not any(graph(batch).requires_grad for batch in inputs(10))
    assert graph.report().hits == 6


def test_what_cannot_be_captured_at_all_is_told() -> None:
    class Wrapped(nn.parallel.DistributedDataParallel):
        def __init__(self, module: nn.Module) -> None:
            nn.Module.__init__(self)
            self.module = module

    with pytest.raises(ConfigError, match="would not average gradients"):
        AdaptiveGraph(Wrapped(Net()), **OPTIONS)
    graph = AdaptiveGraph(nn.Identity(), **AT_ONCE)
    graph(torch.empty(1, device="meta"))
    assert "a tensor on meta among the arguments" in graph.report().failures[0]


def test_a_capture_that_another_thread_spoils_is_no_fault_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin = pair()
    graph = AdaptiveGraph(model, **AT_ONCE)
    plain, times = Tape.record, [5]

    def spoilt(self: Tape, run: Any) -> Any:
        if times[0]:
            times[0] -= 1
            raise NotCaptured("CUDA error: operation failed due to a previous error during capture")
        return plain(self, run)

    monkeypatch.setattr(Tape, "record", spoilt)
    assert train(model, graph, inputs(12)) == train(twin, twin, inputs(12))
    assert not graph.report().failures
    assert graph.report().hits == 7
    times[0] = 1000
    graph = AdaptiveGraph(model, **AT_ONCE)
    train(model, graph, inputs(12))
    assert len(graph.report().failures) == 1, "but not for ever"


def test_inputs_that_share_memory_are_followed_where_one_is_written_to() -> None:
    """Each is a copy in a graph: what the call writes to the one would not show in the other."""

    def shifts(written: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
        written.add_(1.0)
        return read * 2

    graph = AdaptiveGraph(shifts, **OPTIONS)
    for apart in (True, False):
        for _ in range(10):
            memory = torch.zeros(8)
            out = graph(memory[:4], torch.zeros(4) if apart else memory[2:6])
            assert out.tolist() == ([0.0] * 4 if apart else [2.0, 2.0, 0.0, 0.0])
            assert memory.tolist() == [1.0] * 4 + [0.0] * 4
    assert graph.report().hits >= 3, "those that lie apart are replayed"


def test_numbers_are_told_apart_by_their_bits() -> None:
    def divides(x: torch.Tensor, by: float) -> torch.Tensor:
        return x / by

    graph = AdaptiveGraph(divides, **OPTIONS)
    one = torch.ones(2)
    for _ in range(10):
        assert graph(one, 0.0).tolist() == [torch.inf] * 2
        assert graph(one, -0.0).tolist() == [-torch.inf] * 2
        assert graph(one, float("nan")).isnan().all()
    assert graph.report().graphs == 3

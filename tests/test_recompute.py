"""Activations made again: the same gradients, less kept, and plans that stay within a budget at as little time as need be."""

from __future__ import annotations

import copy
import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tape import Tape
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from gpupipe.errors import ConfigError, DeviceMemoryError
from gpupipe.train import AdaptiveGraph, TrainingConfig
from gpupipe.train.recomputing import Choice, Cost, _amounts, _kept, _measured, _observed, _planned, recompute

MB = 1e-3
"""GB"""


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)
        self.calls = 0

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        self.calls += 1
        hidden = nn.functional.gelu(self.up(self.norm(x)))
        return x + scale * nn.functional.dropout(self.down(hidden), 0.1, self.training)


class Model(nn.Module):
    def __init__(self, blocks: int = 6, size: int = 64) -> None:
        super().__init__()
        self.first = nn.Linear(size, size)
        self.blocks = nn.ModuleList(Block(size) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


def batch(rows: int = 512) -> torch.Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(1))


def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def kept_bytes(model: nn.Module, x: torch.Tensor) -> int:
    with _kept() as kept:
        loss = step(model, x)
        total = kept()
        del loss
    return total


@pytest.mark.parametrize("policy", ["none", "elementwise", "block"])
def test_gradients_are_the_same_dropout_included(model: Model, policy: Any) -> None:
    twin, x = copy.deepcopy(model), batch()
    names = list(model.state_dict())
    with recompute(model, policy) as plan:
        torch.manual_seed(5)
        step(model, x).backward()
        assert list(model.state_dict()) == names
        assert len(plan.choices) == 6
        assert f"6 {policy}" in str(plan)
    torch.manual_seed(5)
    step(twin, x).backward()
    for own, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(own.grad, expected.grad)  # type: ignore[arg-type]
    assert [block.calls for block in model.blocks] == [1 if policy == "none" else 2] * 6  # type: ignore[comparison-overlap]
    model(x)
    assert "forward" not in model.blocks[0].__dict__


def test_blocks_keep_their_inputs_alone(model: Model) -> None:
    x = batch()
    plain = kept_bytes(model, x)
    with recompute(model, "block"):
        assert kept_bytes(model, x) < plain / 3
    assert kept_bytes(model, x) == plain


def test_without_gradients_nothing_is_made_again(model: Model) -> None:
    with recompute(model, "block"), torch.no_grad():
        model(batch())
    assert [block.calls for block in model.blocks] == [1] * 6  # type: ignore[comparison-overlap]


def test_three_budgets(model: Model) -> None:
    """The larger the budget, the fewer blocks are made again, and a step's memory stays within each."""
    x = batch(4096)
    base = 2 * sum(parameter.nbytes for parameter in model.parameters())
    plain = kept_bytes(model, x)
    again, kept = [], []
    for share in (0.45, 0.7, 1.01):
        budget = (base + share * plain) / 1e9
        with recompute(model, budget, step=lambda: step(model, x)) as plan:
            again.append(sum(choice.policy != "none" for choice in plan.choices))
            kept.append(sum(choice.costs[choice.policy].kept_bytes for choice in plan.choices))
            assert plan.peak_bytes is not None
            assert plan.peak_bytes <= budget * 1e9
            assert "at the peak" in str(plan)
            step(model, x).backward()
            model.zero_grad()
    assert kept[0] <= kept[1] <= kept[2]
    assert min(again[:2]) > again[2] == 0


@pytest.mark.filterwarnings("error")
def test_blocks_are_measured_under_the_autocast_of_the_step(model: Model) -> None:
    """It halves what they keep, and takes inputs that are of another type than the weights."""
    blocks: dict[str, nn.Module] = {str(number): block for number, block in enumerate(model.blocks)}
    kept = []
    for dtype in (torch.float32, torch.bfloat16):

        def run(dtype: torch.dtype = dtype) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                return sum(block(batch().to(dtype)).float().sum() for block in model.blocks)  # type: ignore[return-value]

        calls, _ = _observed(blocks, run)
        kept.append(_measured(blocks, calls)["0"]["none"].kept_bytes)
    assert 0 < kept[1] < 0.7 * kept[0]


def test_a_plan_needs_no_room_for_what_it_is_to_save(model: Model) -> None:
    """The forward that it measures keeps nothing: all kept at once may be more than there is memory for."""
    x = batch()
    hidden: list[StorageWeakRef] = []
    still_there: list[int] = []

    def note(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        still_there.append(sum(not each.expired() for each in hidden))
        hidden.append(StorageWeakRef(out.untyped_storage()))

    hooks = [block.up.register_forward_hook(note) for block in model.blocks]  # type: ignore[operator, union-attr]
    blocks: dict[str, nn.Module] = {str(number): block for number, block in enumerate(model.blocks)}
    _, kept = _observed(blocks, lambda: step(model, x))
    assert still_there == [0] * 6
    for hook in hooks:
        hook.remove()
    assert kept == kept_bytes(model, x)


def test_the_plan_is_the_cheapest_that_fits(monkeypatch: pytest.MonkeyPatch, model: Model) -> None:
    """With given costs: to make products again is dear, what lies between them cheap."""
    from gpupipe.train import recomputing as room

    costs = {"none": Cost(100, 1.0), "elementwise": Cost(60, 1.1), "block": Cost(10, 2.0)}
    names = [f"blocks.{k}" for k in range(6)]
    monkeypatch.setattr(room, "_observed", lambda blocks, run: (dict.fromkeys(names), 650))
    monkeypatch.setattr(room, "_measured", lambda blocks, calls: dict.fromkeys(names, costs))
    monkeypatch.setattr(room, "_base_bytes", lambda model: 1000)

    def policies(budget: int) -> list[str]:
        with _planned(model, dict(zip(names, model.blocks, strict=True)), budget, lambda: torch.zeros(())) as plan:
            assert plan.peak_bytes is not None
            assert plan.peak_bytes <= budget
            assert all(isinstance(choice, Choice) for choice in plan.choices)
            return [choice.policy for choice in plan.choices]

    assert policies(1650) == ["none"] * 6
    assert policies(1649).count("elementwise") == 3, "one alone does not pay for the block that is made again"
    assert sorted(set(policies(1400))) == ["block", "elementwise"]
    assert policies(1210) == ["block"] * 6
    with pytest.raises(DeviceMemoryError, match="too small"):
        policies(1200)


@pytest.mark.parametrize(
    ("policy", "options", "says"),
    [
        ("some", {}, "recompute='some'"),
        (0.0, {}, "is no budget"),
        (True, {}, "is no budget"),
        (1.0, {}, "needs a step"),
    ],
)
def test_wrong_policies_are_named(model: Model, policy: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        recompute(model, policy, **options)


def test_blocks_can_be_named() -> None:
    model = nn.Sequential(Block(8), Block(8))
    with pytest.raises(ConfigError, match="no list of like modules"):
        recompute(model, "block")
    with recompute(model, "block", blocks=[model[1]]) as plan:
        model(torch.zeros(2, 8)).sum().backward()
    assert [choice.name for choice in plan.choices] == ["1"]
    assert (model[0].calls, model[1].calls) == (1, 2)


def test_twice_is_refused_and_what_was_there_comes_back(model: Model) -> None:
    patched = model.blocks[0].forward
    model.blocks[0].forward = patched  # type: ignore[method-assign]
    with recompute(model, "block"), pytest.raises(ConfigError, match="is made again already"):
        recompute(model, "elementwise")
    assert model.blocks[0].__dict__["forward"] is patched


def test_fusing_behind_it_is_heeded_and_can_be_undone() -> None:
    from gpupipe.train import fuse, unfuse

    torch.manual_seed(0)
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.LayerNorm(16) for _ in range(3))})
    x = torch.randn(4, 16, requires_grad=True)

    def run() -> torch.Tensor:
        made = x
        for block in model["blocks"]:  # type: ignore[union-attr]
            made = block(made)
        return made

    expected = run()
    with recompute(model, "block"):
        fuse(model)
        assert type(model["blocks"][0]).__mro__[1].__name__ != "Module"  # type: ignore[index]
        assert torch.allclose(run(), expected, atol=1e-5)
        unfuse(model)
        run().sum().backward()
    assert torch.equal(run(), expected)


def test_fused_products_are_kept_by_the_elementwise_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpupipe import ops
    from gpupipe.ops.linear import products

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = ops.mlp(ops.layer_norm(x), self.up.weight, self.up.bias, self.down.weight, self.down.bias, residual=x)
            return ops.linear_act(y, self.up.weight, self.up.bias, activation="silu") @ self.down.weight.T

    made: list[int] = []
    plain = products.product
    monkeypatch.setattr(products, "product", lambda *args: (made.append(1), plain(*args))[1])
    model, x = nn.ModuleList(Layer() for _ in range(2)), torch.randn(3, 8, requires_grad=True)
    found = []
    with ops.use("kernel"):
        for policy in ("none", "elementwise"):
            made.clear()
            with recompute(nn.ModuleDict({"layers": model}), policy):  # type: ignore[arg-type]
                y = model[1](model[0](x))
                found.append([y, *torch.autograd.grad(y.sin().sum(), [x, *model.parameters()])])
            assert len(made) == 4, "of pre_and_act, once for each op of a layer"
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("policy", ["elementwise", "block"])
def test_fused_modules_are_checked_on_first_use_all_the_same(policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpupipe.train import fuse, statistics

    torch.manual_seed(0)
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.LayerNorm(16) for _ in range(2))})
    fuse(model)
    kind = type(model["blocks"][0]).__mro__[1]  # type: ignore[index]
    plain = kind.fused_forward
    monkeypatch.setattr(kind, "fused_forward", lambda self, x: plain(self, x) * 3)
    x = torch.randn(4, 16, requires_grad=True)
    with recompute(model, policy):
        made = model["blocks"][0](x)  # type: ignore[index]
        made.sum().backward()
    assert torch.allclose(made, nn.functional.layer_norm(x, (16,)), atol=1e-5), "as written, for the fused way is wrong"
    assert statistics.checked[0] > 0


def test_a_step_with_a_backward_is_told(model: Model) -> None:
    """It is what largest_batch takes; torch said that its unpack_hook got a NoneType."""
    with pytest.raises(ConfigError, match="step does a backward") as caught:
        recompute(model, 0.5, step=lambda: step(model, batch()).backward())
    assert "return its loss, without backward" in str(caught.value)
    with pytest.raises(ConfigError, match="step returned None, not the loss"):
        recompute(model, 0.5, step=lambda: None)  # type: ignore[arg-type, return-value]


def test_a_budget_is_an_amount_with_its_unit_too(model: Model) -> None:
    plan = recompute(model, "2GB", step=lambda: step(model, batch()))
    assert plan.peak_bytes is not None
    plan.remove()
    with pytest.raises(ConfigError, match="recompute='2 heaps'"):
        recompute(model, "2 heaps")
    assert TrainingConfig(recompute="60GB").recompute == TrainingConfig(recompute=60).recompute == 60.0


class Talks(nn.Module):
    """Has arguments that torch's checkpoint has as well, and those of what stands between."""

    NAMES = (
        "function", "debug", "preserve_rng_state", "early_stop", "determinism_check", "context_fn", "use_reentrant",
        "forward", "policy", "draws", "own", "module",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, **given: Any) -> torch.Tensor:
        hidden = self.line(x).tanh()
        for name, value in given.items():
            hidden = hidden * (value + self.NAMES.index(name))
        return hidden.sin()


@pytest.mark.parametrize("policy", ["elementwise", "block"])
@pytest.mark.parametrize("name", Talks.NAMES)
def test_arguments_reach_the_block_whatever_their_names(policy: Any, name: str) -> None:
    model, x = nn.ModuleDict({"blocks": nn.ModuleList([Talks(), Talks()])}), torch.randn(3, 4)
    given = {name: torch.full((4,), 3.0, requires_grad=True)}

    def run() -> list[torch.Tensor]:
        loss = sum(block(x, **given).sum() for block in model["blocks"])  # type: ignore[union-attr]
        return [loss, *torch.autograd.grad(loss, [given[name], *model.parameters()])]

    expected = run()
    with recompute(model, policy):
        found = run()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("policy", ["elementwise", "block"])
def test_arguments_reach_the_block_under_torch_compile(policy: Any) -> None:
    model, x = nn.ModuleDict({"blocks": nn.ModuleList([Talks(), Talks()])}), torch.randn(3, 4)
    scale = torch.full((4,), 3.0, requires_grad=True)

    def run() -> torch.Tensor:
        return sum(block(x, debug=scale, early_stop=True).sum() for block in model["blocks"])  # type: ignore[return-value, union-attr]

    wanted = [scale, *model.parameters()]
    expected = torch.autograd.grad(run(), wanted)
    with recompute(model, policy):
        found = torch.autograd.grad(torch.compile(run, backend="aot_eager", fullgraph=True)(), wanted)
    torch._dynamo.reset()
    assert all(torch.allclose(a, b) for a, b in zip(found, expected, strict=True))


class Repeats(nn.Module):
    """One block, three times over."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(64)] * 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_a_block_that_stands_several_times_is_one_block() -> None:
    model = Repeats()
    block, x = model.blocks[0], batch(8)
    with recompute(model, "block") as plan:
        step(model, x).backward()
        assert block.calls == 6, "three forwards, each made again once"
        assert [choice.name for choice in plan.choices] == ["blocks.0"]
    step(model, x).backward()
    assert block.calls == 9
    assert "forward" not in block.__dict__
    recompute(model, "elementwise").remove()


def test_a_block_of_two_lists_is_one_block() -> None:
    one, other, third = (Block(8) for _ in range(3))
    model = nn.ModuleDict({"first": nn.ModuleList([one, other]), "then": nn.ModuleList([other, third])})
    with recompute(model, "block") as plan:
        assert [choice.name for choice in plan.choices] == ["first.0", "first.1", "then.1"]


def test_a_budget_counts_each_call_of_a_block() -> None:
    model, x = Repeats(), batch(4096)
    base = 2 * sum(parameter.nbytes for parameter in model.parameters())
    plain = kept_bytes(model, x)
    with recompute(model, (base + 0.8 * plain) / 1e9, step=lambda: step(model, x)) as plan:
        (choice,) = plan.choices
        assert choice.policy != "none"
        assert {cost.calls for cost in choice.costs.values()} == {3}
        assert kept_bytes(model, x) < 0.8 * plain


def test_blocks_of_another_model_are_named(model: Model) -> None:
    with pytest.raises(ConfigError, match=r"blocks\[1\], a Block, is no module of the Model"):
        recompute(model, "block", blocks=[model.blocks[0], copy.deepcopy(model).blocks[1]])
    assert "forward" not in model.blocks[0].__dict__


def test_small_budgets_are_told_by_figures_that_differ(model: Model) -> None:
    x = batch()
    least = recompute(model, 1.0, step=lambda: step(model, x))
    least.remove()
    assert least.peak_bytes is not None
    assert f"about {least.peak_bytes / 1e6:.2f} MB" in str(least)
    with pytest.raises(DeviceMemoryError, match=r"0\.10 MB is too small a budget: .* a step takes \d+\.\d\d MB"):
        recompute(model, "100KB", step=lambda: step(model, x))
    assert _amounts(60_000_000_000, 60_001_000_000) == ["60.000 GB", "60.001 GB"]
    assert _amounts(1, 2) == ["0.000001 MB", "0.000002 MB"]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_what_stands_on_one_another_goes_in_any_order(model: Model, order: tuple[int, ...]) -> None:
    """Graphs, a plan, and graphs again in the place of one forward: those that are left go on."""
    block, x = model.blocks[0], batch(4)
    expected = step(copy.deepcopy(model.eval()), x)
    graphs = [AdaptiveGraph(block, device="cpu", recorder=Tape) for _ in range(2)]  # in their warm-up all along
    standing: dict[int, Any] = {0: graphs[0].installed()}
    standing[1] = recompute(model, "block", blocks=[block])
    standing[2] = graphs[1].installed()

    def counts() -> list[int]:
        return [graphs[0].report().calls, block.calls, graphs[1].report().calls]

    for place in order:
        with pytest.raises(ConfigError, match="already") if 1 in standing else nullcontext():
            recompute(model, "block", blocks=[block]).remove()
        standing.pop(place).remove()
        before = counts()
        loss = step(model, x)
        loss.backward()
        assert torch.equal(loss, expected)
        again = 1 + (1 in standing)
        # a plan makes again what it stands on, and not what stands on it
        assert [now - then for now, then in zip(counts(), before, strict=True)] == [
            again * (0 in standing),
            again,
            2 in standing,
        ]
    assert "forward" not in block.__dict__


def test_a_copy_keeps_the_plan_under_graphs_that_it_loses(model: Model) -> None:
    block = model.blocks[0]
    plan = recompute(model, "block")
    graph = AdaptiveGraph(block, device="cpu", recorder=Tape)
    with graph.installed():
        other = copy.deepcopy(model)
        step(other, batch(4)).backward()
        assert graph.report().calls == 0
        assert [each.calls for each in other.blocks] == [2] * 6  # type: ignore[comparison-overlap]
        with pytest.raises(ConfigError, match=r"blocks.0 is made again already"):
            recompute(other, "block", blocks=[other.blocks[0]])
    plan.remove()

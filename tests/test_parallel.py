"""Models over several ranks of gloo: split by heads and columns, by tokens, sharded; each held against one process with all.

What the ranks do is in parallel_cases.py. Bounds are those of float32 sums in another order, in parts of the largest value.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import reports
from torch import nn
from torch.autograd import DeviceType

from gpupipe.errors import ConfigError, ShapeError
from gpupipe.ops import Rope
from gpupipe.ops.rope import spread
from gpupipe.train import GridAttention, fuse
from gpupipe.train.fused import Left
from gpupipe.train.parallel.balance import balance_of, spans_of
from gpupipe.train.parallel.plans import plan_of

ALIKE = 1e-5
"""Relative to the largest value of a tensor: some hundred roundings of float32, sums in another order."""
WHOLE = 141_504
"""Parameters of the model of the cases."""
TWO = (
    "reference_model",
    "tokens",
    "uneven_tokens",
    "model_of_others",
    "precision",
    "sharded",
    "draws",
    "ops_on_shards",
    "shared",
)
FOUR = ("reference_model", "tokens", "both", "tokens_and_batches", "draws")

Found = dict[str, dict[str, Any]]


def run(ranks: int, *cases: str) -> Found:
    """What rank 0 found, by case; all others found the same but for what is theirs."""
    everyone = reports(ranks, ["tests/parallel_cases.py", *cases], 200)
    for lines in everyone:
        broken = [line["error"] for line in lines if str(line.get("error")).startswith("Traceback")]
        assert not broken, broken[0]
        assert [line["case"] for line in lines] == list(cases)
    return {line["case"]: line for line in everyone[0]}


@pytest.fixture(scope="module")
def two() -> Found:
    return run(2, *TWO)


@pytest.fixture(scope="module")
def four() -> Found:
    return run(4, *FOUR)


@pytest.fixture(params=[2, 4])
def some(request: pytest.FixtureRequest) -> tuple[int, Found]:
    return request.param, request.getfixturevalue({2: "two", 4: "four"}[request.param])


def in_pairs(values: list[float]) -> list[tuple[float, float]]:
    return list(zip(values[::2], values[1::2], strict=True))


@pytest.mark.timeout(250)
def test_a_split_model_trains_as_the_whole_one(some: tuple[int, Found]) -> None:
    """Losses, every gradient, weights after three steps; a part of what can be split is on each rank, under the same names."""
    ranks, found = some
    case = found["reference_model"]
    for alone, split in in_pairs(case["losses"]):
        assert split == pytest.approx(alone, rel=ALIKE)
    assert max(case["gradients"]) < ALIKE
    assert case["weights"] < ALIKE
    assert case["names"]
    assert case["total"] == WHOLE
    assert case["local"] < WHOLE * (0.75 if ranks == 2 else 0.62)
    assert "SelfAttention  qkv by rows*3, out by columns" in case["report"]


@pytest.mark.timeout(250)
def test_checkpoints_fit_any_number_of_ranks(some: tuple[int, Found]) -> None:
    """Weights and optimizer of a split model go on in one process, and the other way round."""
    case = some[1]["reference_model"]
    assert case["resumed"] < ALIKE
    assert case["taken back"] < ALIKE


@pytest.mark.timeout(250)
@pytest.mark.parametrize("along", ["time", "rows"])
def test_tokens_of_a_clip_are_shared_out(some: tuple[int, Found], along: str) -> None:
    """Attention along the axis that is split sees all of it: else losses and gradients would be others."""
    case = some[1]["tokens"][along]
    for alone, split in in_pairs(case["losses"]):
        assert split == pytest.approx(alone, rel=ALIKE)
    assert max(case["gradients"]) < ALIKE
    assert case["weights"] < ALIKE
    assert case["sampled"] < ALIKE


@pytest.mark.timeout(250)
@pytest.mark.parametrize("along", ["time", "rows"])
def test_where_ranks_do_not_divide_heads_the_rest_of_the_grid_is_shared_out(two: Found, along: str) -> None:
    case = two["uneven_tokens"][along]
    assert case["output"] < ALIKE
    assert case["gradients"] < ALIKE
    assert "3 heads for 2 ranks, and axis 'full'" in case["error"]


@pytest.mark.timeout(250)
def test_models_of_others_are_split_as_they_are_fused(two: Found) -> None:
    """By packed and by separate layers, with norms of queries and keys, with a gated MLP, with no layer behind; switched off,
    each rank runs all as written, on gathered weights."""
    case = two["model_of_others"]
    for way in ("fused", "original"):
        alone, split = case[way]["losses"]
        assert split == pytest.approx(alone, rel=ALIKE)
        assert case[way]["gradients"] < 2e-4, "some of them are a thousandth of the others"
        assert case[way]["input"] < ALIKE
        assert case[way]["weights"] < ALIKE
    assert case["names"]
    assert case["ways"] == [True, True], "neither attention runs whole on each rank by itself"
    assert "split (4)" in case["report"]
    assert "0.attn has 3 heads for 2 ranks" in case["error"]


@pytest.mark.timeout(250)
def test_layers_that_share_a_weight_share_it_split(two: Found) -> None:
    """Each got a half of the gradient, and they went apart."""
    case = two["shared"]
    assert case["gradients"] < ALIKE
    assert case["counts"][0] == case["counts"][1]
    assert "0.fc1.weight and 1.fc2.weight are one parameter" in case["unlike"]
    assert "0.fc1.weight and 1.fc1.weight are one parameter" in case["skipped"]


@pytest.mark.timeout(250)
def test_a_split_model_can_be_copied(two: Found) -> None:
    assert two["shared"]["copy"] < ALIKE
    assert two["shared"]["own weights"] < ALIKE
    assert two["shared"]["compiled"] < ALIKE, "and compiled, but for what is split"
    assert two["shared"]["none"] == [0, 6, 24], "a batch of no clips"


@pytest.mark.timeout(250)
def test_second_derivatives_and_other_kinds_of_arguments_are_refused(two: Found) -> None:
    """A sum between ranks that no graph knows of made second derivatives wrong, and said nothing."""
    case = two["shared"]
    assert "twice" in case["second"]
    assert [case[name].splitlines()[0] for name in ("mesh", "skip", "model")] == [
        "[TT_ERR_CONFIG] mesh is 2", "[TT_ERR_CONFIG] skip is '0'", "[TT_ERR_CONFIG] model is a list",
    ]  # fmt: skip


@pytest.mark.timeout(250)
def test_norms_and_clipping_go_over_all_shards(two: Found) -> None:
    case = two["precision"]
    alone, split = case["norms"][:2], case["norms"][2:]
    assert split == pytest.approx(alone, rel=ALIKE)
    assert case["weights"] < ALIKE
    assert case["averages"] < ALIKE
    assert case["averages back"] == case["copies"]["back"] == 0, "whole states are taken up by shards"
    assert case["copies"]["types"] == ["torch.bfloat16"]
    assert case["copies"]["norms"][1] == pytest.approx(case["copies"]["norms"][0], rel=1e-2), "of bfloat16 products"
    assert case["copies"]["weights"] < 1e-2


@pytest.mark.timeout(250)
def test_what_one_rank_finds_infinite_is_left_out_by_all(two: Found) -> None:
    """Otherwise their weights would part."""
    case = two["precision"]
    assert (case["broken"]["norm"], case["broken"]["moved"], case["broken"]["scale"]) == (math.inf, False, 4.0)
    assert math.isfinite(case["whole"]["norm"])
    assert case["whole"]["moved"]
    assert case["whole"]["scale"] == 4.0


@pytest.mark.timeout(250)
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_fused_models_train_with_other_batches_on_each_rank(two: Found, kind: str) -> None:
    case = two["sharded"]
    assert case[kind]["norms"] == pytest.approx(case["alone"]["norms"], rel=ALIKE)
    assert case[kind]["weights"] < ALIKE
    assert case[kind]["gradients"] < 2e-4, "some of them are a thousandth of the others"
    assert case[kind]["names"]


@pytest.mark.timeout(250)
def test_shards_in_float32_need_no_copies(two: Found) -> None:
    assert "float32 shards are just that" in two["sharded"]["error"]
    assert two["sharded"]["policy"] == ["torch.bfloat16", "torch.float32"]


@pytest.mark.timeout(250)
def test_dropout_is_alike_where_ranks_are_and_other_where_they_have_other_columns(some: tuple[int, Found]) -> None:
    """The same elements on all ranks would be fewer choices; other ones of what all have would let the ranks part."""
    case = some[1]["draws"]
    assert case["others"]
    assert 0.2 < case["kept"] < 0.8
    assert case["again"], "a recomputation drops the same"
    assert case["alike"], "generators are at one place afterwards"


@pytest.mark.timeout(250)
def test_split_and_sharded_at_once(four: Found) -> None:
    case = four["both"]
    assert case["first"] == 0
    for alone, split in in_pairs(case["norms"]):
        assert split == pytest.approx(alone, rel=ALIKE)
    assert max(case["gradients"]) < ALIKE
    assert case["weights"] < ALIKE
    assert case["taken back"] == 0
    assert case["names"]
    assert case["ranks"] == {"rank": 0, "world_size": 2}


@pytest.mark.timeout(250)
def test_tokens_shared_out_beside_other_batches(four: Found) -> None:
    assert four["tokens_and_batches"]["gradients"] < ALIKE


@pytest.mark.timeout(250)
@pytest.mark.parametrize("op", ["rows", "gated", "mlp", "norm layer", "norm rms", "qkv", "norm over all"])
def test_ops_take_weights_that_are_split(two: Found, op: str) -> None:
    result, gradients = two["ops_on_shards"][op]
    assert result < ALIKE
    assert gradients < ALIKE


@pytest.mark.timeout(250)
@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("half", "of weight1 and weight2 one alone is split"),
        ("otherwise", "weight1 is split by columns"),
        ("packing", "holds 3 layers one after the other, and is split as if it were 1"),
        ("heads", "heads is 1 for 2 ranks"),
        ("norm", "no rank has whole rows to normalise"),
        ("layer norm", "weight is split by rows, and is used on what is whole"),
        ("uneven", "5 rows for 2 ranks"),
        ("twice", "'0.fc1.weight' is a DTensor already"),
        ("checkpoint", "weight is a DTensor, of which this rank has a part alone"),
    ],
)
def test_what_does_not_fit_is_one_clear_error(two: Found, what: str, told: str) -> None:
    """It would be computed wrong, or hang a rank that waits for another."""
    assert told in two["ops_on_shards"]["refused"][what]
    assert "What to do" in two["ops_on_shards"]["refused"][what]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_diffusers_and_transformers_models_are_split() -> None:
    """Attention with text beside the video, across to it, with norms and rotary tables; each with its own way to its layers."""
    (found,) = run(2, "families").values()
    families = {name: case for name, case in found.items() if name != "case"}
    if not families:
        pytest.skip("needs diffusers, transformers or timm")
    for name, case in families.items():
        assert case["output"] < ALIKE, name
        assert case["gradients"] < ALIKE, name
        assert case["split"] >= 2, name
        assert len(case["ways"]) >= 2, name
        assert all(case["ways"]), f"{name} runs whole on each rank"


def test_tables_of_a_part_turn_as_the_whole_ones() -> None:
    """Tokens of a later part of the grid would be turned as the first ones otherwise."""
    rope = Rope.of((6, 4, 3), (4, 2, 2))
    for axis, first, count in ((0, 2, 2), (1, 1, 3)):
        sizes = [6, 4, 3]
        part = rope.part(axis, first, count)
        sizes[axis] = count
        found = spread(part.table, part.lengths, part.pairs, sizes)
        whole = spread(rope.table, rope.lengths, rope.pairs, [6, 4, 3])
        for one, other in zip(found, whole, strict=True):
            assert torch.equal(one.view(*sizes, -1), other.view(6, 4, 3, -1).narrow(axis, first, count))
    with pytest.raises(ShapeError, match="6 positions on axis 0"):
        rope.part(0, 4, 3)
    assert Rope.of((6, 4, 3), (0, 4, 4)).part(0, 4, 3).table.numel() > 0, "what does not turn needs no places"


def test_a_balance_tells_what_hides_what() -> None:
    """Exchange beside work costs nothing, whichever thread or stream it is on, and spans that overlap count once."""
    names = {"work": "aten::mm", "gloo": "gloo:all_reduce", "other": "Optimizer.step"}
    events = [
        SimpleNamespace(name=names[name], device_type=DeviceType.CPU, time_range=SimpleNamespace(start=1000 * a, end=1000 * b))
        for name, a, b in (("work", 0, 4), ("work", 1, 3), ("gloo", 2, 6), ("gloo", 5, 7), ("work", 9, 10), ("other", 0, 99))
    ]
    found = balance_of(spans_of(events))
    assert (found.whole_ms, found.work_ms, found.exchange_ms, found.exposed_ms) == (10, 5, 5, 3)
    assert found.bound == "compute"
    assert "40 % of 5.0 ms of exchange is hidden; 2.0 are neither" in str(found)
    kernel = SimpleNamespace(
        name="ncclDevKernel_AllReduce", device_type=DeviceType.CUDA, time_range=SimpleNamespace(start=0, end=1)
    )
    assert [span.kind for span in spans_of([*events, kernel])] == ["exchange"], "where there are kernels, they alone count"
    with pytest.raises(ConfigError, match="shows no work"):
        balance_of(spans_of([kernel]))


class Gated(nn.Module):
    """An MLP of three layers, as LLaMA has it."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


@pytest.mark.parametrize("fused", [False, True])
def test_a_gated_mlp_of_three_layers_stays_whole_with_a_reason(fused: bool) -> None:
    module = Gated()
    if fused:
        fuse(module)
    with pytest.raises(Left, match="three layers, which are not split"):
        plan_of(module)


def test_plans_are_read_from_modules() -> None:
    plan = plan_of(GridAttention(12, 3))
    assert plan is not None
    assert plan.hows == {"qkv": "rows*3", "proj": "columns", "q_norm.weight": "heads", "k_norm.weight": "heads"}
    assert plan.heads == 3
    assert plan_of(nn.Linear(3, 3)) is None
    odd = nn.Linear(3, 3)
    odd.split_plan = {"weight": "diagonal"}  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="says 'diagonal' of weight"):
        plan_of(odd)

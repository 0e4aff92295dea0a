"""The largest batch that fits: its step stays within the budget, the next size does not, and few steps are run to find it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpupipe import VideoLoader
from gpupipe.config import BatchConfig
from gpupipe.errors import ConfigError, DeviceMemoryError
from gpupipe.train import largest_batch, recompute
from gpupipe.train.memory.largest import Probe, fitted
from gpupipe.train.memory.tensors import LiveBytes, python_tensors, storages

MB = 10**6
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


def steps(model: nn.Module) -> Callable[[int], None]:
    def step(tokens: int) -> None:
        model(torch.randn(tokens, 32)).square().mean().backward()

    return step


def peak_of(step: Callable[[int], object], tokens: int) -> int:
    before = sum(storages(python_tensors(CPU)).values())
    with LiveBytes(CPU) as live:
        step(tokens)
    return before + live.peak


def test_bytes_that_live_are_counted_forward_and_backward(model: Model) -> None:
    """By hand: of the 4 blocks' kept activations and the largest of what comes on top."""
    step = steps(model)
    step(8)
    model.zero_grad()
    with LiveBytes(CPU) as live:
        step(1000)
    grads = sum(parameter.nbytes for parameter in model.parameters())
    kept = 4 * 1000 * (32 + 128 + 128) * 4
    assert live.now == grads, "what the step leaves behind"
    assert kept < live.peak < kept + grads + 1000 * 4 * (3 * 128 + 4 * 32)
    with LiveBytes(CPU) as none:
        for parameter in model.parameters():
            parameter.detach().view(-1)[:1].zero_()
    assert none.peak <= 8, "views of what was there before, and work in it, are nothing new"


def test_the_batch_that_is_proposed_fits_and_a_larger_one_does_not(model: Model) -> None:
    base = sum(storages(python_tensors(CPU)).values())
    budget = (base + 12 * MB) / 1e9
    plan = largest_batch(steps(model), (32, 64, 128), budget=budget, multiple=16, zero_grad=model.zero_grad, device="cpu")
    assert plan.size % 16 == 0
    assert plan.peak_bytes <= plan.budget_bytes
    model.zero_grad()
    assert peak_of(steps(model), plan.size) <= budget * 1e9
    model.zero_grad()
    assert peak_of(steps(model), int(1.03 * plan.size) + 16) > budget * 1e9
    model.zero_grad()
    assert len(plan.probes) <= 8
    assert BatchConfig(size=4096, layout="pack", **plan.for_loader("max_tokens")).max_tokens == plan.size


def test_the_loader_s_batches_fit_by_the_plan_s_tokens(clips: dict[str, Path], model: Model) -> None:
    """Clips of several lengths, packed: each batch's step is within the budget, and the fullest is not far below it."""
    embed = nn.Linear(3 * 2 * 8 * 8, 32)

    def loss(tokens: torch.Tensor) -> torch.Tensor:
        return model(embed(tokens)).square().mean()

    def clear() -> None:
        model.zero_grad()
        embed.zero_grad()

    budget = sum(storages(python_tensors(CPU)).values()) + 4 * MB
    plan = largest_batch(
        lambda n: loss(torch.randn(n, 384)).backward(), (16, 32), budget=budget / 1e9, zero_grad=clear, device="cpu"
    )
    peaks, sizes = [], []
    with VideoLoader(
        [str(clips[name]) for name in ("h264", "mpeg4", "vp9_odd")] * 16,
        clip={"frames": 8},
        transform={"size": 32, "dtype": "float32"},
        batch={
            "size": 256,
            "layout": "pack",
            "patch": (2, 8, 8),
            "buckets": {"frames": [2, 4, 8], "sizes": [(32, 32), (16, 32)]},
            **plan.for_loader("max_tokens"),
        },
        device="cpu",
    ) as loader:
        for batch in loader:
            tokens = batch["tokens"].clone()
            sizes.append(len(tokens))
            del batch
            before = sum(storages([*model.parameters(), *embed.parameters()]).values())
            with LiveBytes(CPU) as live:
                loss(tokens.clone()).backward()
            peaks.append(before + live.peak)
            clear()
    assert len(sizes) > 1
    assert max(sizes) <= plan.size
    assert max(sizes) > 0.7 * plan.size
    assert max(peaks) <= budget


def test_recomputing_makes_room_for_more_and_is_left_off_afterwards(model: Model) -> None:
    base = sum(storages(python_tensors(CPU)).values())
    plan = largest_batch(
        steps(model),
        (32, 64),
        budget=(base + 6 * MB) / 1e9,
        model=model,
        policies=("none", "block"),
        zero_grad=model.zero_grad,
        device="cpu",
    )
    (plain,) = plan.others
    assert (plan.policy, plain.policy) == ("block", "none")
    assert plan.size > 1.5 * plain.size
    assert "not: " in str(plan)
    assert not any("forward" in block.__dict__ for block in model.blocks)
    with recompute(model, plan.policy):
        assert peak_of(steps(model), plan.size) <= plan.budget_bytes


def test_the_first_policy_that_does_is_taken(model: Model) -> None:
    base = sum(storages(python_tensors(CPU)).values())
    plan = largest_batch(
        steps(model),
        (16, 32),
        budget=(base + 20 * MB) / 1e9,
        model=model,
        policies=("none", "elementwise", "block"),
        most=160,
        zero_grad=model.zero_grad,
        device="cpu",
    )
    assert (plan.size, plan.policy, plan.others) == (160, "none", ())


def device(peak: Callable[[int], float], memory: float = float("inf")) -> tuple[list[int], Any]:
    """(sizes that were run, a measure) of a device on which a step takes ``peak`` MB of its size; above ``memory`` it fails."""
    run: list[int] = []

    def measure(step: Callable[[int], object], size: int) -> Probe:
        run.append(size)
        return Probe(size, int(peak(size) * MB) if peak(size) <= memory else None, 0.0)

    return run, measure


@pytest.mark.parametrize(
    ("name", "peak", "memory", "best"),
    [
        ("a straight line", lambda n: 100 + 3 * n, 1e9, 300),
        ("more than a line", lambda n: 100 + 2 * n + n * n / 500, 1e9, 346),
        ("less than a line", lambda n: 100 + 60 * n**0.5, 1e9, 225),
        ("in steps", lambda n: 100 + 30 * (n // 10), 1e9, 309),
        ("a device that gives out below the budget", lambda n: 100 + 3 * n, 700, 200),
        ("a device that gives out all but at once", lambda n: 100 + 3 * n, 120, 6),
    ],
)
def test_the_search_ends_near_the_best_size(name: str, peak: Any, memory: float, best: int) -> None:
    run, measure = device(peak, memory)
    plan = fitted(lambda size: None, (2, 4, 8), 1000 * MB, measure)
    assert plan is not None
    assert 0.9 * best <= plan.size <= best
    assert peak(plan.size) <= 1000
    assert plan.size in run
    assert len(run) <= 12


def test_multiples_and_bounds_are_kept() -> None:
    run, measure = device(lambda n: 100 + 3 * n)
    plan = fitted(lambda size: None, (14, 28), 1000 * MB, measure, multiple=14)
    assert plan is not None
    assert plan.size == 294
    assert not [size for size in run if size % 14]
    run, measure = device(lambda n: 100 + 3 * n)
    plan = fitted(lambda size: None, (2, 4, 80), 1000 * MB, measure, most=64)
    assert plan is not None
    assert plan.size == max(run) == 64
    assert (plan.fixed_bytes, plan.unit_bytes) == (100 * MB, 3 * MB)


def test_memory_that_does_not_follow_the_size_is_told() -> None:
    """A step that works in another thread was said to fit with 268 million clips on the CPU, where that is not seen."""
    run, measure = device(lambda n: 100)
    with pytest.raises(ConfigError, match="a step of 256 takes no more memory than one of 2"):
        fitted(lambda size: None, (2, 4), 1000 * MB, measure)
    assert max(run) == 256
    plan = fitted(lambda size: None, (2, 4), 1000 * MB, measure, most=1024)
    assert plan is not None
    assert plan.size == 1024


def test_a_step_that_runs_out_of_memory_is_one_that_does_not_fit(model: Model) -> None:
    def step(tokens: int) -> None:
        if tokens > 100:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        steps(model)(tokens)

    cleaned: list[int] = []
    plan = largest_batch(step, (8, 16), budget=50, zero_grad=lambda: cleaned.append(1), device="cpu")
    assert 90 <= plan.size <= 100
    assert [probe.peak_bytes for probe in plan.probes].count(None) >= 1
    assert len(cleaned) == len(plan.probes) + 1, "behind those that failed as well"


def test_a_plain_sequence_takes_its_blocks_by_name() -> None:
    """Amounts are written as everywhere else, and a bound that is no multiple is rounded down."""
    model = nn.Sequential(*(Block() for _ in range(3)))
    budget = 1000 + sum(storages(python_tensors(CPU)).values()) // 10**6  # tests before may have left some
    given: dict[str, Any] = {
        "multiple": 16,
        "most": 100,
        "zero_grad": model.zero_grad,
        "device": "cpu",
        "budget": f"{budget}MB",
    }
    plan = largest_batch(steps(model), (16, 32), model=model, policies=("none", "block"), blocks=list(model), **given)
    assert (plan.size, plan.policy, plan.budget_bytes) == (96, "none", budget * 10**6)
    assert largest_batch(steps(model), (16, 32), model=model, **given).size == 96, "without policies it needs no blocks"


def test_a_step_without_backward_is_told(model: Model) -> None:
    """It is what recompute takes; measured here, a batch would seem to fit that does not."""
    with pytest.raises(ConfigError, match="step does no backward"):
        largest_batch(lambda tokens: model(torch.randn(tokens, 32)).mean(), (8, 16), budget=1, device="cpu")


def test_other_errors_of_a_step_are_its_own(model: Model) -> None:
    def step(tokens: int) -> None:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        largest_batch(step, (8, 16), budget=50, device="cpu")


def test_a_budget_below_the_first_size_is_told(model: Model) -> None:
    with pytest.raises(DeviceMemoryError, match=r"not even a batch of 512 fits 0\.001 GB"):
        largest_batch(steps(model), (512, 1024), budget=0.001, zero_grad=model.zero_grad, device="cpu")


def test_fields_for_the_loader(model: Model) -> None:
    _, measure = device(lambda n: 100 + 3 * n)
    plan = fitted(lambda size: None, (2, 4), 1000 * MB, measure)
    assert plan is not None
    assert plan.for_loader("micro_size") == {"micro_size": 300}
    assert plan.for_loader("max_gib", bytes_each=2**20)["max_gib"] == pytest.approx(300 / 1024)
    with pytest.raises(ConfigError, match="bytes_each"):
        plan.for_loader("max_gib")
    with pytest.raises(ConfigError, match="no field of batch"):
        plan.for_loader("tokens")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sizes", "options", "says"),
    [
        ((8,), {}, "two or more whole numbers"),
        ((8, 4), {}, "ascending"),
        ((8, 8), {}, "ascending"),
        ((0, 8), {}, "whole numbers"),
        ((8, 12), {"multiple": 8}, "multiples of 8"),
        ((8, 16), {"budget": 0}, "budget=0"),
        ((8, 16), {"budget": True}, "budget=True is no budget"),
        ((8, 16), {"budget": float("nan")}, "budget=nan is no budget"),
        ((8, 16), {"budget": "1 heap"}, "budget='1 heap' is no budget"),
        ((8, 16), {"budget": "0.8"}, "budget='0.8' is no budget"),
        ((8, 16), {"blocks": []}, "blocks without a model"),
        ((8, 16), {"margin": 1.0}, "margin"),
        ((8, 16), {"most": 4}, "most=4"),
        ((8, 16), {"policies": ("block",)}, "without a model"),
        ((8, 16), {"policies": ()}, "without a model"),
    ],
)
def test_what_does_not_go_together_is_named(sizes: tuple[int, ...], options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        largest_batch(lambda size: None, sizes, device="cpu", **options)

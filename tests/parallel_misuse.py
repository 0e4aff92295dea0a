"""What the ranks of tests/test_parallel_misuse.py do: calls in a wrong order or with wrong things; what each rank is told."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from parallel_cases import case, clips, dit, furthest, main, others, world
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from video_dit import flow_loss

from gpupipe.errors import GpupipeError
from gpupipe.train import AdaptiveGraph, Ema, GridAttention, Precision, recompute
from gpupipe.train.parallel import (
    load_optimizer_state,
    load_whole,
    optimizer_state,
    param_groups,
    sequence_parallel,
    tensor_parallel,
    whole,
)


def told(call: Callable[[], Any]) -> list[str]:
    """What each rank is told of one call."""
    own = "nothing"
    try:
        call()
    except Exception as error:  # others, too: the other rank waits for what this one tells
        own = str(error) if isinstance(error, GpupipeError) else repr(error)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def prepared() -> nn.Module:
    model = others()
    Precision({"dtype": "float32"}, "cpu").prepare(model)
    return model


def averaged() -> nn.Module:
    model = others()
    Ema(model)
    return model


def with_graphs() -> nn.Module:
    model = others()
    AdaptiveGraph(model[0], device="cpu").installed()  # type: ignore[index]
    recompute(model, "block", blocks=[model[0]])  # type: ignore[index]  # stands on them
    return model


def seeded_by_rank() -> nn.Module:
    model = others()
    if dist.get_rank() == 1:
        with torch.no_grad():
            model[0].attn.qkv.weight[0, 0] += 1e-3  # type: ignore[index, union-attr, operator]
    return model


def larger_by_rank() -> nn.Module:
    return nn.Sequential(others(), nn.Linear(3, 3)) if dist.get_rank() == 1 else others()


def with_tokens_shared() -> nn.Module:
    model = dit()
    sequence_parallel(model, world())
    return model


def split() -> nn.Module:
    model = others()
    tensor_parallel(model, world())
    return model


def frames_of_all(along: str) -> None:
    model = dit()
    sequence_parallel(model, world(), along=along)  # type: ignore[arg-type]
    video, _, time = clips(0)
    model(video, time)


def layers_shared() -> None:
    model = dit()
    tensor_parallel(model, world())
    sequence_parallel(model, world())


@case
def refused() -> dict[str, Any]:
    calls: dict[str, Callable[[], Any]] = {
        "prepared": lambda: tensor_parallel(prepared(), world()),
        "averaged": lambda: tensor_parallel(averaged(), world()),
        "graphs": lambda: tensor_parallel(with_graphs(), world()),
        "ddp": lambda: tensor_parallel(DistributedDataParallel(others()), world()),
        "weights": lambda: tensor_parallel(seeded_by_rank(), world()),
        "larger": lambda: tensor_parallel(larger_by_rank(), world()),
        "tokens too": lambda: tensor_parallel(with_tokens_shared(), world()),
        "layers too": layers_shared,
        "whole state": lambda: split().load_state_dict(others().state_dict()),
        "in a larger one": lambda: nn.Sequential(split()).load_state_dict(nn.Sequential(others()).state_dict()),
        "no own frames": lambda: frames_of_all("time"),
        "no own rows": lambda: frames_of_all("rows"),
    }
    return {name: told(call) for name, call in calls.items()}


@case
def accepted() -> dict[str, Any]:
    """What must go on as ever: a copy of a prepared model, layers that are made again, states that are split, a mesh of two."""
    copied = copy.deepcopy(prepared())
    again = others()
    recompute(again, "block", blocks=list(again))  # type: ignore[call-overload]
    one = split()
    calls: dict[str, Callable[[], Any]] = {
        "copy": lambda: tensor_parallel(copied, world()),
        "recompute": lambda: tensor_parallel(again, world()),
        "own state": lambda: one.load_state_dict(one.state_dict()),
        "whole state": lambda: load_whole(one, others().state_dict()),
        "whole state of a copy": lambda: load_whole(copy.deepcopy(one), whole(one.state_dict())),
    }
    return {name: told(call) for name, call in calls.items()}


@case
def late() -> dict[str, Any]:
    """An optimizer that nobody sees, then a split: the step finds that its tensors are the model's no more."""
    model = dit()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    report = tensor_parallel(model, world())
    precision = Precision({"dtype": "float32"}, "cpu")
    precision.prepare(model)
    sharded, taken = others(), Precision({"dtype": "float32"}, "cpu")
    over, averages = torch.optim.AdamW(taken.prepare(sharded)), Ema(sharded)
    fully_shard(sharded)
    return {
        "split": len(report.split), "stale": told(lambda: precision.step(optimizer)),
        "sharded": told(lambda: taken.step(over)), "averages": told(averages.update),
    }  # fmt: skip


@case
def inputs() -> dict[str, Any]:
    """Other inputs on each rank: the first use is off, and the log says what may be the cause."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gpupipe").addHandler(handler)
    model = split()
    torch.manual_seed(dist.get_rank())
    model(torch.randn(2, 6, 24))
    attention = GridAttention(24, heads=2, axis="full")
    sequence = sequence_parallel(attention, world())
    x = torch.randn(1, 16, 24)
    for _ in range(2):
        attention(x, (4, 2, 2))
    sequence = sequence_parallel(attention, world())
    attention(sequence.own(x, 1), (4, 2, 2))
    return {"lines": [line for line in lines if "runs whole" in line], "own": [line for line in lines if "own(" in line]}


@case
def meshes() -> dict[str, Any]:
    from gpupipe.train.parallel import data_ranks

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    attention = GridAttention(24, heads=2)
    return {
        "data": told(lambda: data_ranks(mesh)),
        "layers": told(lambda: tensor_parallel(others(), mesh)),
        "tokens": told(lambda: sequence_parallel(attention, mesh)),
        "model": told(lambda: whole(attention)),
        "order": told(lambda: optimizer_state(torch.optim.SGD(attention.parameters()), attention)),  # type: ignore[arg-type]
    }


@case
def documented() -> dict[str, Any]:
    """The loop and the checkpoint of docs/parallel.md: float32 copies of a split model, saved whole, taken up by another."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))

    def made() -> tuple[nn.Module, Precision, torch.optim.Optimizer]:
        model = dit()
        tensor_parallel(model, mesh["tp"])
        precision = Precision({"dtype": "bfloat16", "master_weights": True}, "cpu", group=mesh["dp"].get_group())
        return model, precision, torch.optim.AdamW(param_groups(precision.prepare(model)), lr=1e-3, fused=True)

    def step(model: nn.Module, precision: Precision, optimizer: torch.optim.Optimizer, number: int) -> None:
        with precision.autocast():
            loss = flow_loss(model, *clips(number))
        precision.backward(loss)
        precision.step(optimizer, clip=1.0)

    one, other = made(), made()
    for number in range(2):
        step(*one, number)
    model, precision, optimizer = one
    states = whole(model.state_dict()), optimizer_state(model, optimizer, precision.masters), whole(precision.state_dict())
    model, precision, optimizer = other
    load_whole(model, states[0])
    load_optimizer_state(model, optimizer, states[1], precision.masters)
    precision.load_state_dict(states[2], model)
    step(*one, 2)
    step(*other, 2)
    ends = [whole(dict(each[1].masters)) for each in (one, other)]
    return {"further": furthest(*ends), "trained": furthest(ends[0], states[2]["masters"])}


if __name__ == "__main__":
    main(sys.argv[1:])

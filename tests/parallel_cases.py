"""What the ranks of tests/test_parallel.py do: each case is held against one process that has all, in float64 where it can."""

from __future__ import annotations

import copy
import importlib.util
import json
import math
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from video_dit import VideoDiT, VideoDiTConfig, flow_loss

from gpupipe import ops
from gpupipe.errors import ConfigError, ShapeError
from gpupipe.train import Ema, GridAttention, Mlp, Precision, fuse, save_checkpoint, switches, use
from gpupipe.train.parallel import (
    data_ranks,
    fsdp_placement,
    load_optimizer_state,
    load_whole,
    optimizer_state,
    param_groups,
    sequence_parallel,
    split_columns,
    split_rows,
    tensor_parallel,
    whole,
)

CASES: dict[str, Callable[[], dict[str, Any]]] = {}
CONFIG = VideoDiTConfig(frames=8, height=16, width=16, patch=(1, 4, 4), hidden=48, depth=2, heads=4)
WIDTH = 24
EPS = 1e-2
"""Of Adam: gradients that are zero but for rounding, as those of keys' biases, take no step."""


def case(made: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    CASES[made.__name__] = made
    return made


def dit() -> VideoDiT:
    """A model in which nothing is zero, the same in each process."""
    torch.manual_seed(0)
    model = VideoDiT(CONFIG)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value), alpha=0.05)
    return model


def clips(step: int, count: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    shape = (count, 3, CONFIG.frames, CONFIG.height, CONFIG.width)
    video, noise = (torch.randn(shape, generator=generator) for _ in range(2))
    return video, noise, torch.rand(count, generator=generator)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return whole({name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None})


def furthest(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference between two sets of tensors, in parts of the largest value of each. Those that are next to zero
    beside the others, as gradients of keys' biases, are rounding alone: in parts of a thousandth of the largest of all."""
    assert found.keys() == expected.keys(), set(found) ^ set(expected)
    sizes = {name: float(value.detach().abs().max()) for name, value in expected.items()}
    least = max(sizes.values()) / 1000
    return max(float((found[name] - value).detach().abs().max()) / max(sizes[name], least) for name, value in expected.items())


def world() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


@case
def reference_model() -> dict[str, Any]:
    """Three steps of the sample's model, split: losses, gradients, weights; its checkpoint in one process, and back."""
    alone, split = dit(), dit()
    names = list(split.state_dict())
    report = tensor_parallel(split, world())
    optimizers = [
        torch.optim.AdamW(parameters, lr=1e-3, eps=EPS) for parameters in (alone.parameters(), param_groups(split.parameters()))
    ]
    errors, losses = [], []
    for step in range(3):
        for model in (alone, split):
            model.zero_grad()
            losses.append(flow_loss(model, *clips(step)))
            losses[-1].backward()
        errors.append(furthest(gradients(split), gradients(alone)))
        for optimizer in optimizers:
            optimizer.step()
    weights = furthest(whole(split.state_dict()), alone.state_dict())
    again, state = dit(), whole(split.state_dict())
    again.load_state_dict(state)
    onward = torch.optim.AdamW(again.parameters(), lr=1e-3, eps=EPS)
    load_optimizer_state(again, onward, optimizer_state(split, optimizers[1]))
    back = dit()
    tensor_parallel(back, world())
    load_whole(back, alone.state_dict())
    back_optimizer = torch.optim.AdamW(param_groups(back.parameters()), lr=1e-3, eps=EPS)
    load_optimizer_state(back, back_optimizer, optimizer_state(alone, optimizers[0]))
    for model in (split, again, back, alone):
        model.zero_grad()
        flow_loss(model, *clips(9)).backward()
    for optimizer in (*optimizers, onward, back_optimizer):
        optimizer.step()
    return {
        "names": names == list(split.state_dict()), "report": str(report), "gradients": errors, "weights": weights,
        "losses": [float(loss.detach()) for loss in losses], "local": report.local, "total": report.total,
        "resumed": furthest(again.state_dict(), whole(split.state_dict())),
        "taken back": furthest(whole(back.state_dict()), alone.state_dict()),
    }  # fmt: skip


@case
def tokens() -> dict[str, Any]:
    """The sample's model with frames split between the ranks, and with rows: losses and gradients under DDP; a sample."""
    found: dict[str, Any] = {}
    for along, dim in (("time", 2), ("rows", 3)):
        alone, split = dit(), dit()
        sequence = sequence_parallel(split, world(), along=along)  # type: ignore[arg-type]
        model = DistributedDataParallel(split)
        optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3, eps=EPS) for each in (alone, split)]
        errors, losses = [], []
        for step in range(2):
            video, noise, time = clips(step)
            split.zero_grad(), alone.zero_grad()
            losses.append(flow_loss(alone, video, noise, time))
            losses[-1].backward()
            mean = flow_loss(model, sequence.own(video, dim), sequence.own(noise, dim), time)
            mean.backward()
            errors.append(furthest(gradients(split), gradients(alone)))
            mean = mean.detach().clone()
            dist.all_reduce(mean)
            losses.append(mean / sequence.ranks)
            for optimizer in optimizers:
                optimizer.step()
        with torch.no_grad():
            made = sequence.whole(split(sequence.own(video, dim), time), dim)
            found[along] = {
                "gradients": errors, "losses": [float(loss.detach()) for loss in losses],
                "weights": furthest(split.state_dict(), alone.state_dict()),
                "sampled": furthest({"": made}, {"": alone(video, time)}),
            }  # fmt: skip
    return found


@case
def uneven_tokens() -> dict[str, Any]:
    """Heads that the ranks do not divide: what is left of the grid is shared out; over all of it, there is nothing to share."""
    torch.manual_seed(1)
    found: dict[str, Any] = {}
    for along, axis, dim in (("time", "temporal", 1), ("rows", "spatial", 2)):
        alone = GridAttention(18, 3, axis)  # type: ignore[arg-type]
        split, grid, rope = copy.deepcopy(alone), (4, 4, 2), ops.Rope.of((4, 4, 2), (2, 2, 2))
        sequence = sequence_parallel(split, world(), along=along)  # type: ignore[arg-type]
        x = torch.randn(2, *grid, 18)
        own = sequence.own(x, dim)
        made, expected = split(own.flatten(1, 3), grid, rope), alone(x.flatten(1, 3), grid, rope)
        made.square().sum().backward(), expected.square().sum().backward()
        for value in split.parameters():
            dist.all_reduce(value.grad)
        found[along] = {
            "output": furthest({"": made}, {"": sequence.own(expected.view(x.shape), dim).flatten(1, 3)}),
            "gradients": furthest(gradients(split), gradients(alone)),
        }
        try:
            sequence.attention(split.qkv(own).view(2, -1, 3, 3, 6), rope=rope, grid=grid)
        except ShapeError as error:
            found[along]["error"] = str(error)
    return found


@case
def model_of_others() -> dict[str, Any]:
    """A fused model that somebody else wrote, split and trained; a mask that is not served; a switch; heads that do not fit."""
    alone, split = others(), others()
    fuse(split)
    report = tensor_parallel(split, world(), skip=["2"])
    x = torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(1))
    ramp = torch.linspace(0, 9, x.numel()).sin().view(x.shape)
    found: dict[str, Any] = {"report": str(report), "names": list(alone.state_dict()) == list(split.state_dict())}
    optimizers = [
        torch.optim.AdamW(groups, lr=1e-2, eps=EPS) for groups in (alone.parameters(), param_groups(split.parameters()))
    ]
    for way in ("fused", "original"):
        with use(way):  # type: ignore[arg-type]
            inputs = [x.clone().requires_grad_() for _ in range(2)]
            losses = [(model(value) * ramp).mean() for model, value in zip((alone, split), inputs, strict=True)]
            for model, loss in zip((alone, split), losses, strict=True):
                model.zero_grad()
                loss.backward()
            for optimizer in optimizers:
                optimizer.step()
        found[way] = {
            "losses": [float(loss.detach()) for loss in losses],
            "gradients": furthest(gradients(split), gradients(alone)),
            "input": furthest({"": inputs[1].grad}, {"": inputs[0].grad}),  # type: ignore[dict-item]
            "weights": furthest(whole(split.state_dict()), alone.state_dict()),
        }
    found["ways"] = ways(split)
    try:
        tensor_parallel(others(heads=3), world())
    except ConfigError as error:
        found["error"] = str(error)
    return found


@case
def shared() -> dict[str, Any]:
    """Layers that share a weight, a copy of a split model, a second derivative, and arguments of the wrong kind."""

    def pair(tied: str, other: str) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(Mlp(WIDTH, WIDTH), Mlp(WIDTH, WIDTH))
        model.get_submodule(other).weight = model.get_submodule(tied).weight
        return model

    alone, split = pair("0.fc1", "1.fc1"), pair("0.fc1", "1.fc1")
    report = tensor_parallel(split, world())
    x = torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(1))
    for model in (alone, split):
        model(x).square().mean().backward()
    found: dict[str, Any] = {
        "gradients": furthest(gradients(split), gradients(alone)),
        "counts": [report.total, sum(value.numel() for value in alone.parameters())],
    }
    theirs = others()
    tensor_parallel(theirs, world(), skip=["2"])
    copied = copy.deepcopy(theirs)
    with torch.no_grad():
        found["copy"] = float((copied(x) - others()(x)).abs().max())
        found["compiled"] = float((torch.compile(copied, backend="eager")(x) - others()(x)).abs().max())
        found["none"] = list(copied(x[:0]).shape)
        copied[0].attn.qkv.weight.zero_()  # type: ignore[union-attr, operator]
        found["own weights"] = float((theirs(x) - others()(x)).abs().max())
    x.requires_grad_()
    (slope,) = torch.autograd.grad(split(x).square().sum(), x, create_graph=True)
    calls: dict[str, Callable[[], Any]] = {
        "unlike": lambda: tensor_parallel(pair("0.fc1", "1.fc2"), world()),
        "skipped": lambda: tensor_parallel(pair("0.fc1", "1.fc1"), world(), skip=["1"]),
        "mesh": lambda: tensor_parallel(others(), 2),  # type: ignore[arg-type]
        "skip": lambda: tensor_parallel(others(), world(), skip="0"),
        "model": lambda: sequence_parallel([others()], world()),  # type: ignore[arg-type]
        "second": lambda: slope.square().sum().backward(),
    }
    for name, call in calls.items():
        try:
            call()
        except (ConfigError, RuntimeError) as error:
            found[name] = str(error)
    return found


class Attention(nn.Module):
    """Queries, keys and values by one layer, normalised over each head."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q_norm, self.k_norm = nn.RMSNorm(WIDTH // heads), nn.RMSNorm(WIDTH // heads)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        made = nn.functional.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        return self.proj(made.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Sides(nn.Module):
    """By three layers, and the layer behind is somebody else's."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sides = [layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)]
        return nn.functional.scaled_dot_product_attention(*sides).transpose(1, 2).flatten(2)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, gate = self.one(x).chunk(2, -1)
        return self.two(value * nn.functional.silu(gate))  # type: ignore[no-any-return]


class Block(nn.Module):
    """As vision transformers have it."""

    def __init__(self, attn: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = nn.LayerNorm(WIDTH), attn, nn.LayerNorm(WIDTH), mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


def others(heads: int = 4) -> nn.Module:
    """A model that somebody else wrote; of the last block all is to be left as it is."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
    blocks = (Block(Attention(heads), Gated()), Block(Sides(heads), plain), Block(Attention(heads), Gated()))
    return nn.Sequential(*blocks, nn.LayerNorm(WIDTH))


@case
def ops_on_shards() -> dict[str, Any]:
    """The linear ops by themselves, on weights that are split: results and gradients; and what they refuse."""
    mesh, generator = world(), torch.Generator().manual_seed(0)
    found: dict[str, Any] = {}

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def own(x: torch.Tensor, parts: int = 1) -> torch.Tensor:
        """This rank's columns of each part."""
        return torch.cat([part.chunk(mesh.size(), -1)[mesh.get_local_rank()] for part in x.chunk(parts, -1)], -1)

    def compared(
        name: str,
        way: Callable[..., torch.Tensor],
        plain: list[torch.Tensor],
        split: list[Any],
        shown: Callable[[torch.Tensor], torch.Tensor] = lambda y: y,
    ) -> None:
        results, grads = [], []
        for values, part in ((plain, lambda y: y), (split, shown)):
            leaves = [value.detach().requires_grad_() for value in values]
            results.append(way(*leaves))
            weight = torch.linspace(-9, 9, results[0].numel()).cos().view(results[0].shape)
            (results[-1] * part(weight)).sum().backward()
            grads.append(whole({str(place): leaf.grad for place, leaf in enumerate(leaves)}))
        found[name] = [furthest({"": results[1]}, {"": shown(results[0])}), furthest(grads[1], grads[0])]

    x, weight, bias, back, back_bias = drawn(2, 5, 8), drawn(24, 8), drawn(24), drawn(8, 12), drawn(8)
    norm, scale, shift, behind = drawn(8), drawn(2, 8), drawn(2, 8), drawn(8, 24)
    rows = [x, split_rows(weight, mesh), split_rows(bias, mesh)]
    compared("rows", lambda *given: ops.linear_act(*given, activation="silu"), [x, weight, bias], rows, own)
    halves = [x, split_rows(weight, mesh, parts=2), bias]
    compared("gated", lambda *given: ops.linear_act(*given, activation="geglu"), [x, weight, bias], halves, own)
    compared(
        "mlp",
        lambda x, *layers: ops.mlp(x, *layers, activation="swiglu", gate=x[:, 0], residual=x),
        [x, weight, bias, back, back_bias],
        [*halves, split_columns(back, mesh), back_bias],
    )
    for kind in ("layer", "rms"):
        compared(
            f"norm {kind}",
            lambda x, w, b, n, *rows, kind=kind: ops.norm_linear(x, w, b, n, scale=rows[0], shift=rows[1], kind=kind),
            [x, weight, bias, norm, scale, shift],
            [*rows, norm, scale, shift],
            own,
        )
    compared(
        "qkv",
        lambda *given: ops.qkv_linear(*given, packed=True).flatten(-2),  # type: ignore[union-attr]
        [x, weight, bias],
        [x, split_rows(weight, mesh, parts=3), bias],
        lambda y: own(y, 3),
    )

    def normed(x: torch.Tensor, weight: torch.Tensor, over: torch.Tensor, behind: torch.Tensor) -> torch.Tensor:
        return ops.linear_act(ops.rms_norm(ops.linear_act(x, weight, activation=None), over), behind, activation=None)

    compared("norm over all", normed, [x, weight, bias, behind], [*rows, split_columns(behind, mesh)])
    refused = {}
    for name, call in {
        "half": lambda: ops.mlp(x, rows[1], rows[2], back, back_bias),
        "otherwise": lambda: ops.mlp(x, split_columns(weight, mesh), bias, split_columns(back, mesh), back_bias),
        "packing": lambda: ops.qkv_linear(*rows),
        "heads": lambda: ops.qkv_linear(x, split_rows(weight, mesh, parts=3), bias, heads=1),
        "norm": lambda: ops.norm_linear(own(x), split_columns(weight, mesh), bias),
        "layer norm": lambda: ops.layer_norm(x, split_rows(norm, mesh)),
        "uneven": lambda: split_rows(drawn(2 * mesh.size() + 1, 3), mesh),
        "twice": lambda: tensor_parallel(nn.Sequential(Split()), mesh),
        "checkpoint": lambda: save_checkpoint("never", weight=rows[1]),
    }.items():
        try:
            call()  # type: ignore[no-untyped-call]
        except (ConfigError, ShapeError) as error:
            refused[name] = str(error)
    return {**found, "refused": refused}


class Split(Mlp):
    """An MLP that is split already."""

    def __init__(self) -> None:
        super().__init__(8, 16)
        tensor_parallel(self, world())


def ways(model: nn.Module) -> list[bool]:
    """Of the attentions of others that were called, whether they pass their check."""
    states = [module.__dict__[switches.SPLIT] for module in model.modules() if switches.SPLIT in module.__dict__]
    return [passed for state in states if state.plan.heads for passed in state.decided.values()]


@case
def families() -> dict[str, Any]:
    """Models of diffusers and transformers, fused and split: outputs and gradients."""
    import fuse_families

    found: dict[str, Any] = {}
    for name in ("wan", "hunyuan", "latte", "cogvideox", "videomae", "timesformer", "vit"):
        family = fuse_families.FAMILIES[name]
        if importlib.util.find_spec(family.package) is None:
            continue
        importlib.import_module(family.package)
        torch.manual_seed(0)
        alone = family.build().eval()
        split = copy.deepcopy(alone)
        fuse(split)
        report = tensor_parallel(split, world())
        inputs = family.inputs(torch.Generator().manual_seed(1))
        made = []
        for model in (alone, split):
            made.append(family.call(model, inputs))
            (made[-1] * torch.linspace(0, 9, made[-1].numel()).sin().view(made[-1].shape)).sum().backward()
        found[name] = {
            "output": furthest({"": made[1]}, {"": made[0]}), "gradients": furthest(gradients(split), gradients(alone)),
            "split": len(report.split), "ways": ways(split),
        }  # fmt: skip
    return found


@case
def precision() -> dict[str, Any]:
    """Norms, clipping, averages of a split model; float32 copies; a gradient that one rank alone finds not to be finite."""
    found: dict[str, Any] = {}
    models, norms, averages = (dit(), dit()), [], []
    tensor_parallel(models[1], world())
    for model in models:
        own = Precision({"dtype": "float32"}, "cpu")
        optimizer = torch.optim.AdamW(param_groups(own.prepare(model)), lr=1e-3, eps=EPS, fused=True)
        ema = Ema(model, 0.9)
        for step in range(2):
            own.backward(flow_loss(model, *clips(step)))
            norms.append(float(own.step(optimizer, clip=0.05)))
            ema.update()
        averages.append(whole(ema.averages))
    found["norms"] = norms
    found["weights"] = furthest(whole(models[1].state_dict()), models[0].state_dict())
    found["averages"] = furthest(averages[1], averages[0])
    fresh = Ema(models[1], 0.9)
    fresh.load_state_dict(whole(ema.state_dict()))
    found["averages back"] = furthest(whole(fresh.averages), averages[1])
    models, norms = (dit(), dit()), []
    tensor_parallel(models[1], world())
    for model in models:
        own = Precision({"dtype": "bfloat16", "master_weights": True}, "cpu")
        optimizer = torch.optim.SGD(param_groups(own.prepare(model)), lr=0.1)
        with own.autocast():
            loss = flow_loss(model, *clips(0))
        own.backward(loss)
        norms.append(float(own.step(optimizer)))
        averages.append({name: value.clone() for name, value in whole(own.masters).items()})
    found["copies"] = {"norms": norms, "weights": furthest(averages[3], averages[2])}
    state = whole(own.state_dict())
    own.load_state_dict({**state, "masters": {name: 2 * value for name, value in state["masters"].items()}}, models[1])
    doubled = {name: value / 2 for name, value in whole(own.masters).items()}
    found["copies"]["back"] = furthest(doubled, averages[3])
    found["copies"]["types"] = sorted({str(value.dtype) for value in models[1].parameters()})
    model = dit()
    tensor_parallel(model, world())
    own = Precision({"dtype": "float16", "initial_scale": 8.0}, "cpu")
    optimizer = torch.optim.AdamW(param_groups(own.prepare(model)), lr=1e-3)
    before = whole(model.state_dict())
    for broken in (True, False):
        own.backward(flow_loss(model, *clips(0)))
        grad: Any = model.blocks[0].up.weight.grad  # type: ignore[union-attr]
        if broken and dist.get_rank() == 1:
            grad.to_local()[0, 0] = math.inf
        norm = own.step(optimizer)
        moved = furthest(whole(model.state_dict()), before) > 0
        found["broken" if broken else "whole"] = {"norm": float(norm), "moved": moved, "scale": float(own.scale)}
    return found


@case
def sharded() -> dict[str, Any]:
    """Fused models under DistributedDataParallel and under fully_shard, each rank with a part of the batch."""
    found: dict[str, Any] = {}
    ranks, rank = dist.get_world_size(), dist.get_rank()
    x = torch.randn(4, 6, WIDTH, generator=torch.Generator().manual_seed(1))
    ramp = torch.linspace(0, 9, x.numel()).sin().view(x.shape)
    weights: dict[str, Any] = {}
    for kind in ("alone", "ddp", "fsdp2"):
        model = others()
        rows = slice(None) if kind == "alone" else slice(rank * 4 // ranks, (rank + 1) * 4 // ranks)
        if kind != "alone":
            fuse(model)
        called: nn.Module = model
        if kind == "ddp":
            called = DistributedDataParallel(model)
        if kind == "fsdp2":
            for block in list(model.children())[:3]:
                fully_shard(block)
            fully_shard(model)
        own = Precision({"dtype": "float32"}, "cpu")
        optimizer = torch.optim.AdamW(own.prepare(model), lr=1e-2, eps=EPS, fused=True)
        norms = []
        for _ in range(3):
            own.backward((called(x[rows]) * ramp[rows]).mean())
            grads = gradients(model)
            norms.append(float(own.step(optimizer, clip=0.01)))
        weights[kind] = whole(model.state_dict()), grads
        found[kind] = {"norms": norms, "names": list(model.state_dict()) == list(others().state_dict())}
        if kind != "alone":
            found[kind] |= {
                "weights": furthest(weights[kind][0], weights["alone"][0]),
                "gradients": furthest(weights[kind][1], weights["alone"][1]),
            }
    try:
        Precision({"dtype": "bfloat16", "master_weights": True}, "cpu").prepare(model)
    except ConfigError as error:
        found["error"] = str(error)
    policy = Precision({"dtype": "bfloat16"}, "cpu").fsdp_policy()
    found["policy"] = [str(policy.param_dtype), str(policy.reduce_dtype)]
    return found


@case
def both() -> dict[str, Any]:
    """Four ranks, two by two: split in one direction, sharded and with other batches in the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    alone, split = dit(), dit()
    names = list(split.state_dict())
    tensor_parallel(split, mesh["tp"])
    for block in split.blocks:
        fully_shard(block, mesh=mesh["dp"], shard_placement_fn=fsdp_placement)
    fully_shard(split, mesh=mesh["dp"], shard_placement_fn=fsdp_placement)
    first = furthest(whole(split.state_dict()), alone.state_dict())
    precisions = [Precision({"dtype": "float32"}, "cpu") for _ in range(2)]
    optimizers = [
        torch.optim.AdamW(param_groups(own.prepare(model)), lr=1e-3, eps=EPS, fused=True)
        for own, model in zip(precisions, (alone, split), strict=True)
    ]
    norms, errors = [], []
    rows = slice(mesh.get_local_rank("dp"), mesh.get_local_rank("dp") + 1)
    for step in range(2):
        batch = clips(step)
        precisions[0].backward(flow_loss(alone, *batch))
        precisions[1].backward(flow_loss(split, *(value[rows] for value in batch)))
        errors.append(furthest(gradients(split), gradients(alone)))
        norms += [float(own.step(each, clip=0.05)) for own, each in zip(precisions, optimizers, strict=True)]
    again = dit()
    load_whole(again, whole(split.state_dict()))
    load_whole(split, whole(split.state_dict()))
    return {
        "first": first, "norms": norms, "gradients": errors, "names": names == list(split.state_dict()),
        "weights": furthest(again.state_dict(), alone.state_dict()),
        "taken back": furthest(whole(split.state_dict()), again.state_dict()),
        "ranks": data_ranks(mesh["dp"]),
    }  # fmt: skip


@case
def tokens_and_batches() -> dict[str, Any]:
    """Four ranks: clips split between two, other batches on the other two; gradients averaged over all four."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    alone, split = dit(), dit()
    sequence = sequence_parallel(split, mesh["sp"])
    model = DistributedDataParallel(split)
    batch = clips(0)
    flow_loss(alone, *batch).backward()
    place = mesh.get_local_rank("dp")
    video, noise, time = (value[place : place + 1] for value in batch)
    flow_loss(model, sequence.own(video, 2), sequence.own(noise, 2), time).backward()
    return {"gradients": furthest(gradients(split), gradients(alone))}


@case
def draws() -> dict[str, Any]:
    """Dropout: the same on all ranks of what they have alike, other elements of what is split; the same in a recomputation."""
    torch.manual_seed(3)
    model = Mlp(8, 64, dropout=0.5)
    tensor_parallel(model, world())
    with torch.no_grad():
        for value in model.parameters():
            value.zero_()
        model.fc1.bias.fill_(1.0)
    x = torch.zeros(2, 8)
    seen: list[torch.Tensor] = []
    linear_act = ops.linear_act

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = linear_act(*args, **kwargs)
        seen.append(made.detach() != 0)
        return made

    ops.linear_act = watched  # type: ignore[assignment]
    try:
        checkpoint(model, x.requires_grad_(), use_reentrant=False).sum().backward()
    finally:
        ops.linear_act = linear_act  # type: ignore[assignment]
    hidden = [mask for mask in seen if mask.shape[-1] == 64 // dist.get_world_size()]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, hidden[0].tolist())
    after = torch.rand(())
    both = [torch.zeros(()) for _ in gathered]
    dist.all_gather(both, after)
    return {
        "others": len({str(mask) for mask in gathered}) == len(gathered), "kept": float(hidden[0].float().mean()),
        "again": len(hidden) == 2 and bool(torch.equal(*hidden)), "alike": len({float(one) for one in both}) == 1,
    }  # fmt: skip


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with ops.use("reference"):
        for name in names:
            try:
                found = CASES[name]()
            except Exception:
                found = {"error": traceback.format_exc()}
            print("FOUND" + json.dumps({"case": name, **found}), flush=True)
            dist.barrier()
    os._exit(0)  # gloo's threads abort a process that ends by itself now and then


if __name__ == "__main__":
    main(sys.argv[1:])

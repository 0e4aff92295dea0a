"""The subjects of bench_train.py: one training step, with none, one or all of the parts of gpupipe.train."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from bench_block import Results, off
from bench_ops import NEAR
from torch import nn
from train_models import Inputs, Model, inputs_of
from video_dit import VideoDiT

from gpupipe.train import AdaptiveGraph, Precision, Watch, recompute

Compiled = Literal["no", "default", "reduce-overhead"]
Graphs = Literal["no", "auto", "always"]
CLIP, RATE = 1.0, 1e-4
"""The gradients' norm at most, and the optimizer's rate."""
WARM_UPS = 6
"""Steps before the clock starts: in the last but one CUDA graphs are recorded, if those before show that it gains anything."""


@dataclass(frozen=True)
class Part:
    """What a subject does in another way than ``eager``.

    Attributes:
        fused: the model over ``gpupipe.ops``.
        precision: fields of a PrecisionConfig; None: torch's autocast and clipping, as in anybody's loop.
        watch: whether losses and gradients are watched.
        graphs: forward and backward by CUDA graphs: always, or where the host is the bottleneck.
        again: the policy by which activations are made again in the backward.
    """

    fused: bool = False
    precision: dict[str, Any] | None = field(default=None)
    watch: bool = False
    graphs: Graphs = "no"
    again: Literal["none", "elementwise"] = "none"
    compiled: Compiled = "no"


SUBJECTS = {
    "eager": Part(),
    "bf16": Part(precision={"dtype": "bfloat16", "master_weights": True}),
    "bf16-watch": Part(precision={"dtype": "bfloat16", "master_weights": True}, watch=True),
    "fp16-scaler": Part(precision={"dtype": "float16"}),
    "fused": Part(fused=True),
    "fused-elementwise": Part(fused=True, again="elementwise"),
    "graphs": Part(graphs="always"),
    "gpupipe": Part(fused=True, graphs="auto", precision={"dtype": "bfloat16", "master_weights": True}),
    "compile": Part(compiled="default"),
    "compile-reduce-overhead": Part(compiled="reduce-overhead"),
}


class Training:
    """One subject at work on a model of its own, which starts as all others do."""

    def __init__(self, part: Part, model: Model, device: torch.device, rate: float = RATE) -> None:
        self.device, self.part, self.kind = device, part, model
        self.net = model.build(part.fused, device)
        self.precision = Precision(part.precision, device) if part.precision is not None else None
        parameters = self.precision.prepare(self.net) if self.precision is not None else list(self.net.parameters())
        self.parameters: list[torch.Tensor] = list(parameters)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=rate, fused=True)
        if part.again != "none":
            assert isinstance(self.net, VideoDiT)
            recompute(self.net, part.again, blocks=list(self.net.blocks))  # there may be one
        self.model: nn.Module = self.net
        self.graph: AdaptiveGraph | None = None
        if part.graphs != "no":
            self.graph = AdaptiveGraph(
                self.net, warmup_steps=WARM_UPS - 2, capture_frequency=WARM_UPS - 1, capture=part.graphs, device=device
            )
            self.graph.installed()
        if part.compiled != "no":
            torch._dynamo.reset()
            mode = None if part.compiled == "default" else part.compiled
            self.model = torch.compile(self.net, fullgraph=model.fullgraph, mode=mode)  # type: ignore[assignment]
        self.watch: Watch | None = None
        if part.watch:
            assert self.precision is not None
            self.watch = Watch(self.net, lambda net, batch: model.loss(net, *batch), self.precision)
        self.steps = 0

    def forward(self, inputs: Inputs) -> torch.Tensor:
        """The loss, with its graph."""
        with self.precision.autocast() if self.precision is not None else torch.autocast(self.device.type, torch.bfloat16):
            return self.kind.loss(self.model, *inputs)

    def backward(self, inputs: Inputs) -> torch.Tensor:
        """Leaves the gradients of a step; its loss."""
        loss = self.forward(inputs)
        if self.precision is not None:
            self.precision.backward(loss)
        else:
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def step(self, inputs: Inputs) -> torch.Tensor:
        """A whole step; its loss, on the device."""
        loss = self.backward(inputs)
        if self.precision is not None:
            norm = self.precision.step(self.optimizer, clip=CLIP)
            if self.watch is not None:
                self.watch.after(self.steps, [inputs], loss, norm)
        else:
            torch.nn.utils.clip_grad_norm_(self.parameters, CLIP)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return loss

    def __call__(self, video: torch.Tensor) -> torch.Tensor:
        """A step on a video, with noise and times of its own."""
        return self.step(noised(video))

    def results(self, inputs: Inputs) -> Results:
        """The loss and all gradients, float32 on the device, without a step; zeros for a parameter that has none. Those of a
        replay, where there are graphs."""
        for _ in range(0 if self.graph is None else WARM_UPS):
            self.backward(inputs)
            self.optimizer.zero_grad()
        made = {"loss": self.backward(inputs).float()[None]}
        self.check_graphs()
        scale = float(self.precision.scale) if self.precision is not None else 1.0
        masters = self.precision.masters if self.precision is not None else {}
        for name, value in self.net.named_parameters():
            grad = masters.get(name, value).grad
            made[name] = torch.zeros_like(value, dtype=torch.float32) if grad is None else grad.float() / scale
        return made

    def check_graphs(self) -> None:
        """Raises RuntimeError where there should be graphs and there are none: it would be eager's time. Those that would gain
        nothing are told, and no fault."""
        if self.graph is None or self.device.type != "cuda":
            return
        report = self.graph.report()
        if report.gpu_bound:
            print(f"no graphs, which would gain nothing: {'; '.join(report.gpu_bound)}", flush=True)
        elif not report.hits:
            raise RuntimeError(f"nothing was captured: {report}")

    def saved_gb(self, inputs: Inputs) -> float | None:
        """What a forward leaves for its backward, in GB (10^9 bytes); None with CUDA graphs, which keep it all the time.

        On a GPU what it leaves allocated, casts of weights among it; elsewhere what autograd saves.
        """
        graphs = self.part.graphs == "always" or (self.graph is not None and self.graph.report().graphs > 0)
        if graphs or self.part.compiled == "reduce-overhead":
            return None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            before = torch.cuda.memory_allocated(self.device)
            loss = self.forward(inputs)
            left = torch.cuda.memory_allocated(self.device) - before
        else:
            with kept_by_autograd(list(self.net.parameters())) as pieces:
                loss = self.forward(inputs)
            left = sum(pieces.values())
        del loss
        return left / 1e9


@contextmanager
def kept_by_autograd(others: list[nn.Parameter]) -> Iterator[dict[int, int]]:
    """Within the block, the bytes that autograd saves, each piece of memory once; ``others`` are there anyhow."""
    known = {value.untyped_storage().data_ptr() for value in others}
    pieces: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in known:
            pieces[memory.data_ptr()] = memory.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield pieces


def noised(video: torch.Tensor) -> Inputs:
    """A video with noise and times that are drawn on its device."""
    return video, torch.randn_like(video, dtype=torch.float32), torch.rand(len(video), device=video.device)


@dataclass(frozen=True)
class Expected:
    """What a subject owes for ``inputs``: the results in float32, and how far eager's are from them in the mean."""

    inputs: Inputs
    exact: Results
    own: dict[str, float]

    def check(self, found: Results) -> None:
        """Raises RuntimeError where a subject does other work than eager: its error may be twice eager's own."""
        for name, value in self.exact.items():
            error = off(found[name], value.to(found[name].device))
            if not error <= max(NEAR, 2 * self.own[name]):
                raise RuntimeError(f"{name} is {error:.1%} off in the mean, eager's {self.own[name]:.1%}")


def expected(model: Model, device: torch.device) -> Expected:
    """Of one block of a model. What is kept lies on the host: elsewhere it would count as memory of the subjects."""
    inputs = inputs_of(model, 1, device)
    exact = Training(Part(precision={"dtype": "float32"}), model, device).results(inputs)
    eager = Training(SUBJECTS["eager"], model, device).results(inputs)
    own = {name: off(eager[name], value) for name, value in exact.items()}
    return Expected(inputs, {name: value.cpu() for name, value in exact.items()}, own)

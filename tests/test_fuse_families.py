"""Models of other packages, fused: the same results, gradients and training as unfused, the same state."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fuse_families import FAMILIES, Family, Inputs, family
from torch import nn

from gpupipe import ops
from gpupipe.train import fuse, layout, statistics, unfuse, use
from gpupipe.train.verify import BOUNDS, relative_error

STEPS = 50


@pytest.fixture(autouse=True)
def _quick_and_counted_from_zero() -> Iterator[None]:
    """Ops as plain torch: their kernels, which would run in Triton's interpreter here, have tests of their own."""
    with warnings.catch_warnings(), ops.use("reference"):
        warnings.simplefilter("ignore")  # of other packages, about each other
        statistics.reset()
        yield


def built(of: Family, seed: int = 0) -> nn.Module:
    """A model whose parameters are all of some size: many are zero at the start, and would hide what they multiply."""
    torch.manual_seed(seed)
    model = of.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def inputs_of(of: Family, seed: int = 1) -> Inputs:
    return of.inputs(torch.Generator().manual_seed(seed))


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Floating inputs in another type, but for numbers a sample such as a guidance of 6000; rotary tables stay as they are."""
    return {
        name: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 1 else value
        for name, value in inputs.items()
    }


def step(of: Family, model: nn.Module, inputs: Inputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The output, and the gradients of a loss made of it."""
    model.zero_grad()
    out = of.call(model, inputs)
    wave = torch.linspace(0, 50, out.numel()).sin().view(out.shape)
    (out.double() * wave).sum().backward()
    return out.detach(), {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def whole(gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.flatten().double() for value in gradients.values()])


@pytest.mark.parametrize("name", FAMILIES)
def test_as_fused(name: str) -> None:
    """What is found in each model; a change of another package that hides a part from us shows here."""
    of = family(name)
    model = built(of)
    found: dict[str, int] = {}
    for entry in fuse(model).replaced:
        kind = entry.said.partition(" ")[0]
        found[kind] = found.get(kind, 0) + 1
    assert found == of.fused
    of.call(model, inputs_of(of))
    assert statistics.written == {}, statistics.line()  # everything found is served
    assert sum(statistics.fused.values()) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_results_and_gradients(name: str, dtype: torch.dtype) -> None:
    """Against the model as written, in float64: at most twice as far off as that in the same type, and a rounding more."""
    of = family(name)
    written, inputs = built(of), inputs_of(of)
    exact, exact_gradients = step(of, copy.deepcopy(written).double(), cast(inputs, torch.float64))
    model, inputs = written.to(dtype), cast(inputs, dtype)
    theirs, their_gradients = step(of, model, inputs)
    fuse(model)
    ours, our_gradients = step(of, model, inputs)
    assert statistics.written == {}, statistics.line()
    assert ours.dtype == theirs.dtype
    slack = 2 * torch.finfo(dtype).eps
    assert relative_error(ours, exact) <= 2 * relative_error(theirs, exact) + slack
    assert list(our_gradients) == list(their_gradients)
    truth = whole(exact_gradients)
    assert relative_error(whole(our_gradients), truth) <= 2 * relative_error(whole(their_gradients), truth) + slack
    largest = max(float(value.square().mean().sqrt()) for value in exact_gradients.values())
    for key, value in our_gradients.items():  # each by itself: small ones are mostly what rounding left of large ones
        allowed = 2 * relative_error(their_gradients[key], exact_gradients[key], largest / 10) + BOUNDS[dtype]
        assert relative_error(value, exact_gradients[key], largest / 10) <= allowed, key


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if "vae" in name else []) for name in FAMILIES]
)  # fmt: skip
def test_training_and_state(name: str) -> None:
    """Some steps of AdamW laid over the unfused run; states alike in keys, order and values, loading either way; back again."""
    of = family(name)
    written = built(of)
    fused = copy.deepcopy(written)
    before = {key: (type(module), id(module)) for key, module in fused.named_modules()}
    parameters = [id(parameter) for parameter in fused.parameters()]
    fuse(fused)
    assert list(fused.state_dict()) == list(written.state_dict())
    assert [id(parameter) for parameter in fused.parameters()] == parameters
    curves = []
    for model in (written, fused):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        target = None
        losses = []
        for number in range(STEPS):
            out = of.call(model, inputs_of(of, 1 + number % 2))
            target = torch.zeros_like(out) if target is None else target
            loss = (out - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        curves.append(losses)
    assert curves[0][-1] < curves[0][0]  # it learns, or the comparison says little
    assert curves[1] == pytest.approx(curves[0], rel=1e-3)
    written.load_state_dict(fused.state_dict())
    fused.load_state_dict(written.state_dict())
    for key, value in written.state_dict().items():
        assert torch.equal(value, fused.state_dict()[key]), key
    expected = of.call(fused, inputs_of(of))
    unfuse(fused)
    assert {key: (type(module), id(module)) for key, module in fused.named_modules()} == before
    assert relative_error(of.call(fused, inputs_of(of)), expected) <= BOUNDS[torch.float32]


@pytest.mark.parametrize("name", FAMILIES)
def test_copies_and_files(name: str) -> None:
    """A copy, and a model read from a file, are fused and give the same."""
    of = family(name)
    model, inputs = built(of), inputs_of(of)
    fuse(model)
    expected = of.call(model, inputs)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        statistics.reset()
        assert torch.equal(of.call(other, inputs), expected)
        assert sum(statistics.fused.values()) > 0
        assert not any(one is two for one, two in zip(other.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("name", [name for name in FAMILIES if "vae" not in name])
def test_one_graph(name: str) -> None:
    """A fused model compiles without a break, as it did before, and gives the same."""
    of = family(name)
    model, inputs = built(of), inputs_of(of)
    fuse(model)
    expected = of.call(model, inputs)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    out = of.call(torch.compile(model, backend=backend, fullgraph=True), inputs)
    assert relative_error(out, expected) <= BOUNDS[torch.float32]
    assert len(graphs) == 1
    assert "gpupipe/ops" in graphs[0].print_readable(print_output=False), "it runs as written"


def test_with_kernels() -> None:
    """The same through the ops' kernels, run by Triton's interpreter where there is no GPU."""
    of = family("vit")
    model, inputs = built(of), inputs_of(of)
    expected = step(of, model, inputs)
    fuse(model)
    with ops.use("kernel"):
        out, gradients = step(of, model, inputs)
    assert statistics.written == {}, statistics.line()
    assert relative_error(out, expected[0]) <= BOUNDS[torch.float32]
    assert relative_error(whole(gradients), whole(expected[1])) <= BOUNDS[torch.float32]


@pytest.mark.parametrize("name", ["wan", "hunyuan"])
def test_rotary_tables_are_made_once_a_grid(name: str) -> None:
    """Kept for each grid, with one table an axis beside them; of another grid they are others."""
    of = family(name)
    model, inputs = built(of), inputs_of(of)
    fuse(model)
    rope: Any = model.rope
    video = inputs["hidden_states"]
    first = rope(video)
    assert rope(video) is first
    assert first.rope.axes == 3
    assert sum(first.rope.lengths) == sum(first.grid) < first[0].numel() / 8
    other = rope(torch.zeros(2, 4, 3, 8, 4))
    assert other is not first
    assert other.grid == (3, 4, 2)
    assert copy.copy(other)[0].equal(unfuse(model).rope(torch.zeros(2, 4, 3, 8, 4))[0])


@pytest.mark.parametrize("name", ["wan", "hunyuan", "cogvideox", "videomae"])
def test_a_model_s_own_checkpointing(name: str) -> None:
    """Blocks made again in the backward, as the packages themselves do it: the same gradients, and fused both times."""
    of = family(name)
    model, inputs = built(of).train(), inputs_of(of)
    _, expected = step(of, model, inputs)
    fuse(model)
    enable = getattr(model, "enable_gradient_checkpointing", None) or model.gradient_checkpointing_enable
    enable()
    for _ in range(2):
        statistics.reset()
        _, gradients = step(of, model, inputs)
        assert relative_error(whole(gradients), whole(expected)) <= BOUNDS[torch.float32]
        assert statistics.written == {}, statistics.line()
    assert statistics.fused["block"] >= of.fused["block"]  # what is made again may stop before its end, uncounted


def test_modulations_by_token() -> None:
    """A time for each token, as Wan 2.2 has it for pictures that go on as videos."""
    of = family("wan")
    model, inputs = built(of), inputs_of(of)
    inputs["timestep"] = torch.randint(0, 1000, (2, 12), generator=torch.Generator().manual_seed(2))
    expected = step(of, model, inputs)
    fuse(model)
    out, gradients = step(of, model, inputs)
    assert relative_error(out, expected[0]) <= BOUNDS[torch.float32]
    assert relative_error(whole(gradients), whole(expected[1])) <= BOUNDS[torch.float32]
    assert statistics.written == {}


class Adapted(nn.Module):
    """A layer with a low-rank addition, in the place of another, as fine-tuning has it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.in_features, self.out_features = base.in_features, base.out_features
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("first", [False, True], ids=["fused before", "fused after"])
@pytest.mark.parametrize("name", ["wan", "hunyuan"])
def test_adapters_on_projections(name: str, first: bool) -> None:
    """Projections with additions are called, not read; the rest of attention runs fused."""
    of = family(name)
    model, inputs = built(of), inputs_of(of)
    if not first:
        fuse(model)
    for module in list(model.modules()):
        for layer in ("to_q", "to_v"):
            if isinstance(getattr(module, layer, None), nn.Linear):
                setattr(module, layer, Adapted(getattr(module, layer)))
    if first:
        fuse(model)
    with use("original"):
        expected = step(of, model, inputs)
    statistics.reset()
    out, gradients = step(of, model, inputs)
    assert relative_error(out, expected[0]) <= BOUNDS[torch.float32]
    assert relative_error(whole(gradients), whole(expected[1])) <= BOUNDS[torch.float32]
    assert statistics.written == {}, statistics.line()
    assert statistics.fused["attention"] == of.fused["attention"]


def test_another_processor() -> None:
    """One that somebody puts in the place of the one that was recognised is used."""
    of = family("hunyuan")
    model, inputs = built(of), inputs_of(of)
    fuse(model)
    attention: Any = model.transformer_blocks[0].attn
    calls: list[int] = []

    class Mine(type(attention.processor)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return super().__call__(*args, **kwargs)

    attention.set_processor(Mine())
    of.call(model, inputs)
    assert calls
    assert statistics.written["attention", "arguments not served"] == 1


def test_added_positions_with_a_mask() -> None:
    """Only the patches that a masked autoencoder sees, each with its own place; and the table is sent once."""
    of = family("videomae")
    model, inputs = built(of), inputs_of(of)
    embeddings: Any = model.videomae.embeddings
    mask = torch.zeros(2, 8, dtype=torch.bool)
    mask[0, 2:5] = mask[1, 5:] = True
    expected = embeddings(inputs["pixel_values"], mask)
    fuse(model)
    out = embeddings(inputs["pixel_values"], mask)
    assert relative_error(out, expected) <= BOUNDS[torch.float32]
    assert statistics.fused["positions"] == 1
    with torch.no_grad():
        embeddings.position_embeddings.add_(1)  # another table is another one
    assert relative_error(embeddings(inputs["pixel_values"], mask), expected + 1) <= BOUNDS[torch.float32]


@pytest.mark.parametrize("name", ["wan vae", "hunyuan vae"])
def test_channels_last(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions given channels-last video, as on a GPU, give the same; those whose padding would undo that are not."""
    of = family(name)
    model, inputs = built(of), inputs_of(of)
    expected = step(of, model, inputs)
    fuse(model)
    converted: list[torch.Tensor] = []

    def convert(x: torch.Tensor) -> torch.Tensor:
        converted.append(x)
        return x.contiguous(memory_format=torch.channels_last_3d)

    monkeypatch.setattr(layout, "for_convolution", convert)
    out, gradients = step(of, model, inputs)
    assert relative_error(out, expected[0]) <= BOUNDS[torch.float32]
    assert relative_error(whole(gradients), whole(expected[1])) <= 10 * BOUNDS[torch.float32]
    assert statistics.written == {}, statistics.line()
    assert bool(converted) is (name == "wan vae")

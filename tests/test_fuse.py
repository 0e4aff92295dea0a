"""How fused modules are found, checked, switched, copied and undone: on small modules written here."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gpupipe import ops
from gpupipe.errors import ConfigError
from gpupipe.train import compare, fuse, residual_attention, residual_mlp, statistics, switches, unfuse, use
from gpupipe.train.fused import is_fused
from gpupipe.train.modules import GridAttention, LayerNorm, Mlp, RMSNorm
from gpupipe.train.parts.mlps import FusedMLP
from gpupipe.train.parts.norms import FusedNorm

SIZE = 12


@pytest.fixture(autouse=True)
def _quick_and_counted_from_zero() -> Iterator[None]:
    """Ops as plain torch: their kernels, which would run in Triton's interpreter here, have tests of their own."""
    with ops.use("reference"):
        statistics.reset()
        torch.manual_seed(0)
        yield


class MyRMS(nn.Module):
    """An RMS norm by another name."""

    def __init__(self, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(SIZE))
        self.variance_epsilon = 1e-5
        self.offset = offset

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(hidden.float().square().mean(-1, keepdim=True) + self.variance_epsilon)
        return ((hidden.float() * scale) * (self.weight + self.offset)).to(hidden.dtype)


class LiteralRMS(nn.Module):
    """An RMS norm whose eps is in its code alone."""

    def __init__(self, eps: str, size: int = SIZE, name: str = "weight") -> None:
        super().__init__()
        self.text, self.called = eps, name
        setattr(self, name, nn.Parameter(torch.rand(size)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + float(self.text)) * getattr(self, self.called)


class MyMlp(nn.Module):
    """linear, activation, linear, as somebody may write it."""

    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor], wide: int = 1, p: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(SIZE, 2 * SIZE * wide)
        self.act = act
        self.drop = nn.Dropout(p)
        self.down = nn.Linear(2 * SIZE, SIZE)
        self.out = nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.down(self.drop(self.act(self.up(x)))))


class Scaled(MyMlp):
    """The same, with something more before the first layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(2 * x)


class Early(MyMlp):
    """The same, with its dropout before the activation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.drop(self.up(x))))


class Llama(nn.Module):
    """A gated MLP of three layers, as LLaMA has it, or in other names."""

    def __init__(
        self, act: Callable[[torch.Tensor], torch.Tensor], *, turned: bool = False, bias: str = "", p: float = 0.0
    ) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(SIZE, 2 * SIZE, bias=one in bias) for one in ("gate", "up"))
        self.down_proj = nn.Linear(2 * SIZE, SIZE, bias=False)
        self.act_fn, self.turned = act, turned
        self.drop, self.out = nn.Dropout(p), nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = self.gate_proj(x), self.up_proj(x)
        return self.out(self.down_proj(self.drop(one * self.act_fn(two) if self.turned else self.act_fn(one) * two)))


def swiglu(z: torch.Tensor) -> torch.Tensor:
    value, gate = z.chunk(2, -1)
    return value * functional.silu(gate)


def glu_other_way(z: torch.Tensor) -> torch.Tensor:
    gate, value = z.chunk(2, -1)
    return value * functional.silu(gate)


class LayerScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gamma


class DropPath(nn.Module):
    """Stochastic depth: some samples go without the branch."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.drop_prob = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.drop_prob == 0:
            return x
        keep = 1 - self.drop_prob
        return x * torch.bernoulli(x.new_full((x.shape[0], *[1] * (x.dim() - 1)), keep)) / keep


class Block(nn.Module):
    """A pre-norm block with self-attention, in the usual names."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(SIZE)
        self.attn = Attention()
        self.ls1 = LayerScale() if p else nn.Identity()
        self.drop_path1 = DropPath(p)
        self.norm2 = nn.LayerNorm(SIZE)
        self.mlp = MyMlp(functional.gelu, p=p)
        self.ls2 = LayerScale() if p else nn.Identity()
        self.drop_path2 = DropPath(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.qkv = nn.Linear(SIZE, 3 * SIZE)
        self.proj = nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class HandWritten(nn.Module):
    """Attention with names of its own: its heads are told by what comes out."""

    def __init__(self, sides: tuple[str, ...] = ("to_qkv",), number: str = "h", p: float = 0.0, drop: float = 0.0) -> None:
        super().__init__()
        setattr(self, number, 2 if number != "size_of_head" else SIZE // 2)
        self.sides, self.p = sides, p
        for name in sides:
            setattr(self, name, nn.Linear(SIZE, 3 * SIZE if len(sides) == 1 else SIZE))
        self.out = nn.Linear(SIZE, SIZE)
        self.drop = nn.Dropout(drop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.cat([getattr(self, name)(x) for name in self.sides], -1)
        q, k, v = made.unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        p = self.p if self.training else 0.0
        return self.drop(self.out(functional.scaled_dot_product_attention(q, k, v, dropout_p=p).transpose(1, 2).flatten(2)))


def model(p: float = 0.0) -> nn.Sequential:
    return nn.Sequential(Block(p), Block(p), nn.LayerNorm(SIZE))


def step(of: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients."""
    of.zero_grad()
    x = x.detach().clone().requires_grad_()
    out = of(x)
    (out * torch.linspace(0, 9, out.numel()).sin().view(out.shape)).sum().backward()
    return [out.detach(), x.grad, *(one.grad for one in of.parameters() if one.grad is not None)]


def alike(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Equal but for the order of float32 sums."""
    return len(one) == len(other) and all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(one, other, strict=True))


class InTraining(Attention):
    """Has the usual names, and drops or masks in training by itself."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        p, causal = (0.5 * (self.what == "drops"), self.what == "masks") if self.training else (0.0, False)
        return self.proj(functional.scaled_dot_product_attention(q, k, v, None, p, causal).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("what", ["drops", "masks"])
def test_attention_with_the_usual_names_that_does_more_in_training_is_left_with_a_reason(what: str) -> None:
    report = fuse(InTraining(what))
    assert not [entry for entry in report.replaced if entry.said.startswith("attention")]
    assert [entry for entry in report.left if "in training it does more" in entry.said]


class Normed(nn.Module):
    """Attention whose norms of queries and keys have names of their own."""

    def __init__(self, qn: nn.Module, kn: nn.Module, vn: nn.Module | None = None) -> None:
        super().__init__()
        self.h = 2
        self.to_q, self.to_k, self.to_v, self.out = (nn.Linear(SIZE, SIZE) for _ in range(4))
        self.kn, self.qn = kn, qn
        if vn is not None:
            self.vn = vn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (one(x).unflatten(-1, (2, -1)).transpose(1, 2) for one in (self.to_q, self.to_k, self.to_v))
        v = self.vn(v) if hasattr(self, "vn") else v
        made = functional.scaled_dot_product_attention(self.qn(q), self.kn(k), v)
        return self.out(made.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, lambda size: LiteralRMS("1e-6", size)])
def test_norms_of_queries_and_keys_are_known_under_any_name(norm: Callable[[int], nn.Module]) -> None:
    module, x = Normed(norm(SIZE // 2), norm(SIZE // 2)), torch.randn(2, SIZE, SIZE)
    for one in (module.qn, module.kn):
        nn.init.uniform_(one.weight)  # so that the two are not taken for each other
    written = copy.deepcopy(module)
    (entry,) = fuse(module).replaced
    assert entry.said.startswith("attention (self; norm ")
    assert alike(step(module, x), step(written, x))
    assert not statistics.written
    module.qn.register_forward_hook(lambda _, inputs, out: 2 * out)
    written.qn.register_forward_hook(lambda _, inputs, out: 2 * out)
    assert alike(step(module, x), step(written, x))


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (Normed(nn.RMSNorm(SIZE // 2), nn.LayerNorm(SIZE // 2)), "norms of queries and keys, qn and kn"),
        (Normed(LiteralRMS("1e-7", SIZE // 2), LiteralRMS("1e-7", SIZE // 2)), "eps as attributes"),
        (Normed(nn.RMSNorm(SIZE // 2), nn.RMSNorm(SIZE // 2), nn.RMSNorm(SIZE // 2)), "it holds vn"),
        (Normed(nn.RMSNorm(SIZE // 2), nn.Identity()), "queries or keys alone"),
    ],
)
def test_attention_that_is_left_for_its_norms_has_a_line(module: nn.Module, why: str) -> None:
    """There was none, where heads or layers had names of their own."""
    assert [entry.said for entry in fuse(module).left if entry.name == "" and why in entry.said]


class Switched(Attention):
    """Reads its own numbers and switches in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.causal, self.scale = False, 1.0
        self.q_norm, self.k_norm = nn.Identity(), nn.Identity()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(hidden_states).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = self.q_norm(q) * self.scale, self.k_norm(k)
        made = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.proj(made.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    "change",
    [
        lambda module: setattr(module, "num_heads", 4),
        lambda module: setattr(module, "causal", True),
        lambda module: setattr(module, "scale", 0.25),
        lambda module: setattr(module, "q_norm", nn.LayerNorm(SIZE // 2)),
        lambda module: module.q_norm.register_forward_hook(lambda _, inputs, out: 2 * out),
    ],
)
def test_attention_that_was_changed_after_it_was_checked_runs_as_written(change: Callable[[Any], object]) -> None:
    module, x = Switched().eval(), torch.randn(2, SIZE, SIZE)
    written = copy.deepcopy(module)
    assert [entry for entry in fuse(module).replaced if entry.said.startswith("attention")]
    torch.testing.assert_close(module(x), written(x))
    change(module)
    change(written)
    torch.testing.assert_close(module(x), written(x))
    torch.testing.assert_close(module(hidden_states=x), written(x))


class AsTimm(Attention):
    """As timm writes it: the share that is dropped is read off a layer."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.head_dim, self.scale = SIZE // 2, (SIZE // 2) ** -0.5
        self.q_norm, self.k_norm, self.norm = nn.LayerNorm(SIZE // 2), nn.LayerNorm(SIZE // 2), nn.Identity()
        self.attn_drop, self.proj_drop = nn.Dropout(p), nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        p = self.attn_drop.p if self.training else 0.0
        made = functional.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, dropout_p=p)
        return self.proj_drop(self.proj(self.norm(made.transpose(1, 2).flatten(2))))


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_a_layer_whose_share_is_read_and_one_behind_all_do_what_they_did(p: float) -> None:
    module, x = AsTimm(p).train(), torch.randn(2, SIZE, SIZE)
    written = copy.deepcopy(module)
    assert [entry for entry in fuse(module).replaced if entry.said == "attention (self; norm layer head)"]
    for mode in (True, False):
        module.train(mode)
        written.train(mode)
        torch.manual_seed(1)
        expected = written(x)
        torch.manual_seed(1)
        torch.testing.assert_close(module(x), expected)


def test_attention_that_drops_in_training_is_not_taken_for_one_that_does_not() -> None:
    """What a function drops is found by trying; what a layer drops may be set later, and is looked at in each call."""
    functional_one = HandWritten(p=0.5)
    before = torch.get_rng_state()
    assert not [entry for entry in fuse(functional_one).replaced if entry.said.startswith("attention")]
    assert torch.equal(torch.get_rng_state(), before), "nothing is drawn from the user's generator"
    module, x = HandWritten(drop=0.5).train(), torch.randn(2, SIZE, SIZE)
    written = copy.deepcopy(module)
    assert [entry for entry in fuse(module).replaced if entry.said.startswith("attention")]
    torch.manual_seed(1)
    expected = written(x)
    torch.manual_seed(1)
    assert torch.equal(module(x), expected), "it runs as written"


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (nn.LayerNorm(SIZE), "norm (layer)"),
        (nn.LayerNorm(SIZE, elementwise_affine=False), "norm (layer)"),
        (nn.RMSNorm(SIZE), "norm (rms)"),
        (MyRMS(), "norm (rms)"),
        (LiteralRMS("1e-6"), "norm (rms)"),
        (LiteralRMS("1e-5"), "norm (rms)"),
        (LiteralRMS("1e-8"), "norm (rms)"),
        (nn.GroupNorm(2, SIZE), "group_norm"),
        (MyMlp(functional.silu), "mlp (silu)"),
        (MyMlp(nn.GELU("tanh")), "mlp (gelu_tanh)"),
        (MyMlp(functional.gelu, p=0.5), "mlp (gelu)"),
        (MyMlp(swiglu, wide=2), "mlp (swiglu)"),
        (Llama(nn.SiLU()), "mlp (swiglu)"),
        (Llama(functional.silu, turned=True), "mlp (swiglu)"),
        (Llama(nn.GELU("tanh"), bias="gate up", p=0.5), "mlp (geglu_tanh)"),
        (Llama(functional.gelu, bias="up"), "mlp (geglu)"),
        (nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU()), "linear_act (gelu)"),
        (Attention(), "attention (self; norm none)"),
        (HandWritten(), "attention (self; norm none)"),
        (HandWritten(("q", "k", "v"), "n_head"), "attention (self; norm none)"),
        (HandWritten(("q_proj", "k_proj", "v_proj"), "size_of_head"), "attention (self; norm none)"),
        (Block(), "block (pre-norm)"),
    ],
)
def test_modules_are_known_by_what_they_do(module: nn.Module, said: str) -> None:
    """Each is found under its kind, also on the meta device, and gives the same, forward and backward."""
    module, x = module.eval(), torch.randn(2, SIZE, SIZE)
    report = fuse(copy.deepcopy(module).to("meta"))
    assert report.replaced[0].said == said
    expected = step(module, x)
    report = fuse(module)
    assert (report.replaced[0].name, report.replaced[0].said) == ("", said)
    assert alike(step(module, x), expected)
    assert not statistics.written
    assert not [entry for entry in report.left if entry.name == ""]


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (MyRMS(offset=1.0), "nobody here knows it"),
        (LiteralRMS("1e-7"), "an attribute eps"),
        (LiteralRMS("1e-6", name="g"), "by a parameter weight"),
        (nn.LayerNorm((SIZE, SIZE)), "several dimensions"),
        (MyMlp(functional.relu), "activation of ours"),
        (MyMlp(glu_other_way, wide=2), "activation of ours"),
        (Scaled(functional.gelu), "activation of ours"),
        (Llama(torch.sigmoid), "activation of ours: SiLU or GELU"),
        (Early(functional.gelu, p=0.5), "not behind the activation"),
        (nn.Linear(SIZE, SIZE), "one call of torch"),
    ],
)
def test_what_only_looks_alike_is_left(module: nn.Module, why: str) -> None:
    """A norm with 1 + weight, an MLP with ReLU, with its gate first, with something before it: fused, they would be wrong."""
    report = fuse(module)
    assert [entry.said for entry in report.left if entry.name == ""] != []
    assert why in report.left[0].said
    assert not is_fused(module)


@pytest.mark.parametrize("way", [Attention, Block, MyRMS, lambda: MyMlp(functional.silu), lambda: nn.GroupNorm(2, SIZE)])
def test_a_batch_of_no_clips_is_one(way: Callable[[], nn.Module]) -> None:
    """As where a filter left none of a part: the module that was written takes it."""
    module = way()
    fuse(module)
    out, grad, *_ = step(module, torch.empty(0, SIZE, SIZE))
    assert out.shape == grad.shape == (0, SIZE, SIZE)


def test_a_gated_mlp_of_three_layers_is_joined_where_that_pays_and_stays_three_layers() -> None:
    """It ran as written, without a line in the report."""
    module, few, many = Llama(nn.SiLU()), torch.randn(2, 3, SIZE), torch.randn(2, SIZE, SIZE)
    written = copy.deepcopy(module)
    report = fuse(module)
    assert module.state_dict().keys() == written.state_dict().keys()
    assert ("value, gate", "joined per step (moves 0.01 MB) from 13 tokens on; else as written") in [
        (entry.what, entry.said) for entry in report.layouts
    ]
    assert alike(step(module, many), step(written, many))
    assert (statistics.fused["mlp"], not statistics.written) == (1, True)
    assert alike(step(module, few), step(written, few))
    assert statistics.written["mlp", "arguments not served"] == 1
    module.up_proj.register_forward_hook(lambda _, inputs, out: 2 * out)
    written.up_proj.register_forward_hook(lambda _, inputs, out: 2 * out)
    assert alike(step(module, many), step(written, many))


def test_a_gated_mlp_of_three_layers_drops_what_it_drops() -> None:
    module, x = Llama(nn.SiLU(), p=0.5).train(), torch.ones(40, SIZE, SIZE)
    fuse(module)
    made = module(x)
    assert 0.4 < float((made == 0).float().mean()) < 0.6
    assert not torch.equal(made, module(x))
    assert statistics.fused["mlp"] == 2


def test_a_gated_mlp_in_a_block_is_fused_with_it() -> None:
    block, x = Block(), torch.randn(2, SIZE, SIZE)
    block.mlp = Llama(nn.SiLU())
    written = copy.deepcopy(block)
    assert {entry.said for entry in fuse(block).replaced} >= {"block (pre-norm)", "mlp (swiglu)"}
    assert alike(step(block, x), step(written, x))
    assert not statistics.written


def test_the_module_stays_what_it_was() -> None:
    """Its class is a subclass with the same name; unfused, it is of the class it was."""
    block = Block()
    fuse(block)
    assert isinstance(block, Block)
    assert type(block).__name__ == "Block"
    assert type(block).__module__ == __name__
    assert "FusedMyMlp(" in repr(block)
    assert unfuse(block) is block
    assert [type(one) for one in (block, block.norm1, block.mlp)] == [Block, nn.LayerNorm, MyMlp]
    assert not any("gpupipe" in name for one in block.modules() for name in vars(one))


def test_copies_and_pickles_are_fused_too() -> None:
    net, x = model(), torch.randn(2, 5, SIZE)
    fuse(net)
    expected = step(net, x)
    net.zero_grad()
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert [is_fused(one) for one in other.modules()] == [is_fused(one) for one in net.modules()]
        assert alike(step(other, x), expected)
        with use("original", other):  # a switch of the copy, not of the model
            statistics.reset()
            net(x)
            assert not statistics.written


def test_dropout_of_an_mlp() -> None:
    """In training it drops the share asked for, alike under one seed; in evaluation nothing."""
    mlp, x = MyMlp(functional.gelu, p=0.5), torch.randn(64, 64, SIZE)
    fuse(mlp)
    torch.manual_seed(1)
    first = mlp(x)
    torch.manual_seed(1)
    assert torch.equal(mlp(x), first)
    assert (first == 0).float().mean().item() == pytest.approx(0.5, abs=0.02)  # 49 152 draws: a deviation of 0.0023
    mlp.eval()
    assert torch.equal(mlp(x), mlp(x))
    assert statistics.fused["mlp"] == 4


@pytest.mark.parametrize("depth", [0.0, 0.4])
def test_training_with_dropout_and_stochastic_depth(depth: float) -> None:
    """Layer scale, dropout and stochastic depth in their places: under one seed the same draws, and the same gradients."""
    net, x = model(p=0.3).train(), torch.randn(8, 5, SIZE)
    for block in net[:2]:
        block.drop_path1.drop_prob = block.drop_path2.drop_prob = depth
    written = copy.deepcopy(net)
    fuse(net)
    step(net, x)  # the first use, whose checks are not to draw
    for seed in range(3):
        sides = []
        for side in (written, net):
            torch.manual_seed(seed)
            sides.append(step(side, x))
        assert alike(*sides)
    assert statistics.fused["block"] == 8
    assert not statistics.written


def test_first_use_leaves_nothing_behind() -> None:
    """No gradient, no drawn number, the mode as it was, hooks of the module called once."""
    net, x = model(p=0.3).train(), torch.randn(2, 5, SIZE, requires_grad=True)
    fuse(net)
    calls: list[int] = []
    net[0].register_forward_hook(lambda *_: calls.append(1))
    state = torch.random.get_rng_state()
    torch.nn.functional.dropout(x, 0.0)
    with torch.no_grad():
        net.eval()(x)
    assert torch.equal(torch.random.get_rng_state(), state)
    net.train()(x)
    assert calls == [1, 1]
    assert all(one.training for one in net.modules())
    assert x.grad is None
    assert all(one.grad is None for one in net.parameters())
    assert statistics.checked[0] > 0


def _wrong_output(self: Any, x: torch.Tensor) -> torch.Tensor:
    return FusedNorm.written_forward(self, x) * 1.01


def _wrong_gradient(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = FusedNorm.written_forward(self, x)
    return y.detach() + 1.01 * (y - y.detach())


def _wrong_type(self: Any, x: torch.Tensor) -> torch.Tensor:
    return FusedNorm.written_forward(self, x).double()


def _raises(self: Any, x: torch.Tensor) -> torch.Tensor:
    raise ValueError("no such kernel")


@pytest.mark.parametrize(
    ("way", "said"),
    [
        (_wrong_output, "output 0 is off by 1.0e-02"),
        (_wrong_gradient, "the gradient of argument 0 is off"),
        (_wrong_type, "torch.float64"),
        (_raises, "ValueError: no such kernel"),
    ],
)
def test_a_wrong_way_is_not_taken(
    way: Callable[..., Any], said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It runs as written for that signature, once told; without the check it would be taken."""
    monkeypatch.setattr(FusedNorm, "fused_forward", way)
    norm, x = nn.LayerNorm(SIZE), torch.randn(3, SIZE, requires_grad=True)
    expected = step(copy.deepcopy(norm), x)
    fuse(norm)
    for _ in range(2):
        assert alike(step(norm, x), expected)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert said in warnings[0]
    assert "float32 (3, 12)" in warnings[0]
    assert statistics.written == {("norm", "did not pass the check"): 2}
    if way is not _raises:
        other = nn.LayerNorm(SIZE)
        fuse(other, verify="off")
        other(x)
        assert statistics.fused["norm"] == 1


def test_each_signature_is_checked_by_itself() -> None:
    norm = nn.LayerNorm(SIZE)
    fuse(norm)
    for shape in ((3, SIZE), (4, SIZE), (3, SIZE)):
        norm(torch.randn(shape))
    assert statistics.checked[0] == 2
    with torch.no_grad():
        norm(torch.randn(3, SIZE))
    norm(torch.randn(3, SIZE, requires_grad=True))
    assert statistics.checked[0] == 4


def test_many_sizes_are_not_checked_for_ever() -> None:
    """Batches of ever new shapes: eight are checked, of each type and number of dimensions."""
    norm = nn.LayerNorm(SIZE)
    fuse(norm)
    for rows in range(1, 20):
        norm(torch.randn(rows, SIZE))
    assert statistics.checked[0] == 8
    norm(torch.randn(2, 3, SIZE))
    norm(torch.randn(5, SIZE, requires_grad=True))
    assert statistics.checked[0] == 10
    assert statistics.fused["norm"] == 21


def test_values_that_are_not_finite_decide_nothing() -> None:
    """A NaN in the data must not turn a module off, nor let it pass unchecked for good."""
    norm = nn.LayerNorm(SIZE)
    fuse(norm)
    norm(torch.full((3, SIZE), torch.nan))
    assert statistics.checked[0] == 0
    norm(torch.randn(3, SIZE))
    assert statistics.checked[0] == 1


def test_a_bound_of_ones_own() -> None:
    rough = nn.LayerNorm(SIZE).bfloat16()
    fuse(rough, bound=1e-9)
    rough(torch.randn(3, SIZE, dtype=torch.bfloat16))
    assert statistics.fused["norm"] + statistics.written["norm", "did not pass the check"] == 1


def test_switches() -> None:
    """Global, by kind, by module; each with a way back."""
    net, x = model(), torch.randn(2, 5, SIZE)
    fuse(net)

    def ran() -> tuple[int, int]:
        statistics.reset()
        net(x)
        return sum(statistics.fused.values()), sum(statistics.written.values())

    all_fused = ran()
    assert all_fused[1] == 0
    with use("original"):
        assert ran()[0] == 0
        with use("fused", "norm"):
            assert statistics.fused == {}
            assert ran()[0] == 5  # the norms alone, also of blocks that run as written
    with use("original", "block"):
        statistics.reset()
        net(x)
        assert statistics.written["block", "switched off"] == 2
    with use("original", net[0]):
        statistics.reset()
        net(x)
        assert statistics.written["block", "switched off"] == 1
    assert ran() == all_fused
    with pytest.raises(ConfigError, match="no kind 'mpl'"):
        use("original", "mpl")
    with pytest.raises(ConfigError, match="nothing is fused"):
        use("original", nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="the way is"):
        use("off")  # type: ignore[arg-type]


def test_the_environment_says_it_from_the_start() -> None:
    before = set(switches._off)
    try:
        switches._from_environment("-mlp, -block")
        assert [switches.wanted(kind) for kind in ("mlp", "block", "norm")] == [False, False, True]
        switches._from_environment("off")
        assert not switches.wanted("norm")
        with pytest.raises(ConfigError, match="GPUPIPE_FUSE is 'no'"):
            switches._from_environment("no")
    finally:
        switches._off.clear()
        switches._off.update(before)


def test_what_is_asked_for() -> None:
    net = model()
    report = fuse(net, kinds=["norm"], skip=["1*"])
    assert [entry.name for entry in report.replaced] == ["0.norm1", "0.norm2", "2"]
    assert [(entry.name, entry.said) for entry in report.left if entry.name == "1"] == [("1", "skipped, as asked")]
    again = fuse(net)
    assert "0" in [entry.name for entry in again.replaced]
    assert ("0.norm1", "it is fused already") in [(entry.name, entry.said) for entry in again.left]
    text = str(again)
    assert text.startswith("fused (")
    assert "*.norm1" in text
    for wrong in ({"kinds": ["norms"]}, {"skip": ["blocks.*"]}, {"verify": "always"}, {"bound": 0.0}):
        with pytest.raises(ConfigError):
            fuse(model(), **wrong)


class Low(nn.Linear):
    """A layer with a low-rank addition, as fine-tuning puts it in the place of another."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + 1


def test_layers_replaced_or_watched_since_are_called() -> None:
    """The fused way takes weights from layers without calling them: where that would show, it must step back."""
    net, x = model(), torch.randn(2, 5, SIZE)
    fuse(net)
    before = net(x)
    layer = Low(SIZE, 2 * SIZE)
    layer.load_state_dict(net[0].mlp.up.state_dict())
    plain = net[0].mlp.up
    net[0].mlp.up = layer
    assert not torch.allclose(net(x), before)
    net[0].mlp.up = plain
    assert torch.allclose(net(x), before, atol=1e-6)
    seen: list[tuple[int, ...]] = []
    for place in (net[1].mlp.down, net[1].norm2, net[1].mlp):
        handle = place.register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
        seen.clear()
        net(x)
        assert seen == [(2, 5, SIZE)]
        handle.remove()
    offloaded = net[1].mlp.up
    offloaded.forward = lambda x, way=offloaded.forward: way(x) + 1  # as offloading brings weights: on the instance
    assert not torch.allclose(net(x), before)
    del offloaded.forward
    assert torch.allclose(net(x), before, atol=1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    """The first use happens within it: the check must not disturb what is kept and made again."""
    net, x = model(), torch.randn(2, 5, SIZE, requires_grad=True)
    expected = step(copy.deepcopy(net), x)
    fuse(net)
    for _ in range(2):
        net.zero_grad()
        leaf = x.detach().clone().requires_grad_()
        out = leaf
        for block in net:
            out = checkpoint(block, out, use_reentrant=reentrant)
        (out * torch.linspace(0, 9, out.numel()).sin().view(out.shape)).sum().backward()
        assert alike([out.detach(), leaf.grad, *(one.grad for one in net.parameters())], expected)
    assert statistics.fused["block"] > 0
    assert not statistics.written


def test_in_a_compiled_graph() -> None:
    """One graph, no break, the same results, and fused: without the ops' own names in it, it would be the graph as written."""
    net, x = model(), torch.randn(2, 5, SIZE)
    expected = step(copy.deepcopy(net), x)
    fuse(net)
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph.print_readable(print_output=False))
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(net, backend=backend, fullgraph=True)
    out = compiled(x.clone().requires_grad_())
    assert torch.allclose(out, expected[0], atol=1e-5)
    assert len(graphs) == 1
    assert "repeat_interleave" not in graphs[0]
    assert "ops/norms/reference.py" in graphs[0]
    with use("original"):
        torch._dynamo.reset()
        graphs.clear()
        torch.compile(net, backend=backend, fullgraph=True)(x)
        assert "ops/norms/reference.py" not in graphs[0]


def test_compiled_training() -> None:
    """Through the compiler's own autograd: the same gradients."""
    net, x = model(), torch.randn(2, 5, SIZE)
    expected = step(copy.deepcopy(net), x)
    fuse(net)
    torch._dynamo.reset()
    assert alike(step(torch.compile(net, backend="aot_eager", fullgraph=True), x), expected)


def test_autocast() -> None:
    """Under autocast the fused way gives the types and values that autocast gives."""
    net, x = model(), torch.randn(2, 5, SIZE)
    with torch.autocast("cpu", torch.bfloat16):
        expected = net(x)
        fuse(net)
        out = net(x)
    assert out.dtype == expected.dtype
    assert torch.allclose(out.float(), expected.float(), atol=0.05)
    assert not statistics.written


def test_data_parallel(tmp_path: Path) -> None:
    from torch import distributed

    net, x = model(), torch.randn(2, 5, SIZE)
    expected = step(copy.deepcopy(net), x)
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        fuse(net)
        parallel = nn.parallel.DistributedDataParallel(net)
        for _ in range(2):
            assert alike(step(parallel, x), expected)
        assert statistics.fused["block"] == 4
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("after", [False, True])
def test_fully_sharded(after: bool, tmp_path: Path) -> None:
    """FSDP2 before or after: both subclasses get along, and the class comes back without the fused half alone."""
    from torch import distributed
    from torch.distributed.fsdp import FSDPModule, fully_shard

    net, x = model(), torch.randn(2, 5, SIZE)
    expected = step(copy.deepcopy(net), x)
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        if not after:
            fuse(net)
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        for block in net[:2]:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
        if after:
            fuse(net)
        for _ in range(2):
            made = step(net, x)
            made = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in made]
            assert alike(made, expected)
        assert statistics.fused["block"] == 4
        assert not statistics.written
        unfuse(net)
        assert isinstance(net[0], FSDPModule)
        assert isinstance(net[0], Block)
        assert not any("gpupipe" in one.__module__ for one in type(net[0]).__mro__)
        assert alike([one.full_tensor() if hasattr(one, "full_tensor") else one for one in step(net, x)], expected)
    finally:
        distributed.destroy_process_group()


def test_a_model_fused_before_it_has_memory() -> None:
    """Big models are built on the meta device, fused or sharded, and given memory then."""
    with torch.device("meta"):
        net = model()
    fuse(net)
    net.to_empty(device="cpu")
    other = model()
    net.load_state_dict(other.state_dict())
    x = torch.randn(2, 5, SIZE)
    assert alike(step(net, x), step(other, x))
    assert not statistics.written


def test_compare_shows_both_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On equal ways nearly nothing, by module and step; on a wrong one, the module it is in."""
    net = model()
    batches = [torch.randn(4, 5, SIZE) for _ in range(3)]

    def loss(of: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return (of(batch) - batch.flip(1)).square().mean()

    with pytest.raises(ConfigError, match="nothing is fused"):
        compare(net, batches, loss)
    fuse(net, verify="off")
    state = copy.deepcopy(net.state_dict())
    found = compare(net, batches, loss)
    assert len(found.fused) == len(found.written) == 3
    assert found.loss_error < 1e-4
    assert {"0", "1", "2", "0.attn"} <= set(found.modules)
    assert all(one.first < 1e-5 for one in found.modules.values())
    assert not statistics.written, "watching them made modules run as written"
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    found.plot(tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 5000
    lines = str(found).splitlines()
    assert lines[0].split() == ["module", "first", "step", "all", "steps", "gradients"]
    assert lines[-1].startswith("largest difference of losses:")
    monkeypatch.setattr(FusedMLP, "fused_forward", lambda self, x: FusedMLP.written_forward(self, x) * 1.1)
    with use("original", "block"):
        wrong = compare(net, batches, loss)
    assert wrong.modules["0.mlp"].first == pytest.approx(0.1, rel=1e-3)
    assert wrong.modules["0.norm1"].first < 1e-6
    with pytest.raises(ConfigError, match="no batch"):
        compare(net, [], loss)


def test_the_line_for_logs() -> None:
    net = model()
    fuse(net)
    net(torch.randn(2, 5, SIZE))
    with use("original", net[2]):
        net(torch.randn(2, 5, SIZE))
    line = statistics.line()
    assert "fused 9 (attention 4, block 4, norm 1)" in line
    assert "as written 1 (norm 1: switched off)" in line
    assert "checked 5" in line
    assert "\n" not in line


@pytest.mark.parametrize("norm", [nn.LayerNorm(SIZE), nn.RMSNorm(SIZE, eps=1e-6), MyRMS()], ids=["layer", "rms", "other"])
@pytest.mark.parametrize("mlp", [MyMlp(functional.gelu), Mlp(SIZE, 2 * SIZE, "gelu"), nn.Linear(SIZE, SIZE)])
def test_halves_of_a_block(norm: nn.Module, mlp: nn.Module) -> None:
    """Modulated, gated, with the second norm in the first half's sum: as written out in torch."""
    x = torch.randn(2, 5, SIZE)
    gate, scale, shift = torch.randn(3, 2, SIZE)
    attention = Attention()
    y, total = residual_attention(x, norm, attention, gate=gate, scale=scale, shift=shift, then=norm, then_scale=scale)
    out = residual_mlp(total, norm, mlp, gate=gate, normalised=y)
    middle = x + gate[:, None] * attention(norm(x) * (1 + scale[:, None]) + shift[:, None])
    expected = middle + gate[:, None] * mlp(norm(middle) * (1 + scale[:, None]))
    assert torch.allclose(total, middle, atol=1e-5)
    assert torch.allclose(out, expected, atol=1e-5)
    plain = residual_mlp(residual_attention(x, norm, attention), norm, mlp)
    middle = x + attention(norm(x))
    assert torch.allclose(plain, middle + mlp(norm(middle)), atol=1e-5)
    with pytest.raises(ConfigError, match="norm is a BatchNorm1d, which is no layer norm"):
        residual_attention(x, nn.BatchNorm1d(SIZE), attention)


def test_modules_to_write_with() -> None:
    """They take the states of torch's and timm's, and compute the same."""
    x = torch.randn(2, 8, SIZE)
    for mine, theirs in ((LayerNorm(SIZE), nn.LayerNorm(SIZE)), (RMSNorm(SIZE), nn.RMSNorm(SIZE, eps=1e-6))):
        with torch.no_grad():
            theirs.weight.normal_()
        mine.load_state_dict(theirs.state_dict())
        assert torch.allclose(mine(x), theirs(x), atol=1e-6)
        scale, shift = torch.randn(2, 2, SIZE)
        assert torch.allclose(mine(x, scale, shift), theirs(x) * (1 + scale[:, None]) + shift[:, None], atol=1e-5)
    mlp = Mlp(SIZE, 8, "swiglu", dropout=0.5)
    assert set(mlp.state_dict()) == {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"}
    assert mlp.fc1.weight.shape == (16, SIZE)
    assert torch.allclose(mlp.eval()(x), mlp.fc2(swiglu(mlp.fc1(x))), atol=1e-6)
    assert (mlp.train()(x) == 0).any()
    attention = GridAttention(SIZE, 2, axis="spatial")
    assert set(attention.state_dict()) > {"qkv.weight", "q_norm.weight", "proj.bias"}
    rope = ops.Rope.of((2, 2, 2), (2, 2, 2))
    out = attention(x, (2, 2, 2), rope)
    apart = torch.cat([attention(x[:, :4], (1, 2, 2), rope), attention(x[:, 4:], (1, 2, 2), rope)], 1)
    assert torch.allclose(out, apart, atol=1e-5)  # frames do not see each other, and turn alike but for time
    for wrong in (lambda: Mlp(4, 4, "relu"), lambda: Mlp(4, 4, dropout=2), lambda: GridAttention(10, 3)):  # type: ignore[arg-type]
        with pytest.raises(ConfigError):
            wrong()


def test_a_layer_replaced_behind_the_first_check_is_heeded() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    x = torch.randn(3, 8)
    fuse(model)
    model(x)
    model[1] = nn.ReLU()
    assert torch.equal(model(x), model[2](torch.relu(model[0](x))))
    model.append(nn.Tanh())
    assert torch.equal(model(x), torch.tanh(model[2](torch.relu(model[0](x)))))
    unfuse(model)

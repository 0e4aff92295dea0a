"""The blocks of diffusion transformers, a small class a family: gates, scales and shifts round attention and MLP."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gpupipe import ops
from gpupipe.train.fused import Left, is_fused
from gpupipe.train.parts.blocks import FusedBlock, added, gated, mlp_added, normed, norms_of
from gpupipe.train.parts.modulated import FusedModulatedNorm
from gpupipe.train.parts.probe import activation_of, plain, silent, takes


def _has(module: nn.Module, *names: str) -> bool:
    return all(isinstance(getattr(module, name, None), nn.Module) for name in names)


class FusedCrossBlock(FusedBlock):
    """Self-attention, cross-attention and MLP, six modulations of a table and the time: Wan's block."""

    attn1: Any
    attn2: Any
    ffn: Any
    norm1: Any
    norm2: Any
    norm3: Any
    scale_shift_table: torch.Tensor

    @classmethod
    def recognise(cls, module: nn.Module) -> dict[str, Any] | None:
        table = getattr(module, "scale_shift_table", None)
        if not _has(module, "norm1", "attn1", "norm2", "attn2", "norm3", "ffn") or not isinstance(table, torch.Tensor):
            return None
        if (
            not takes(type(module).forward, "hidden_states", "encoder_hidden_states", "temb", "rotary_emb")
            or table.shape[1] != 6
        ):
            return None
        second = isinstance(module.norm2, nn.Identity)
        kinds = norms_of(module, "norm1", "norm3", *(() if second else ("norm2",)))
        if kinds is None or set(kinds.values()) != {"layer"}:
            raise Left("its norms are no layer norms")
        return {"second": not second}

    def fused_forward(
        self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor, temb: torch.Tensor, rotary_emb: Any
    ) -> Any:
        if not silent(self.norm1, self.norm2, self.norm3):
            return NotImplemented
        x = hidden_states
        table = self.scale_shift_table[:, None] if temb.dim() == 4 else self.scale_shift_table
        shift1, scale1, gate1, shift3, scale3, gate3 = (table + temb.float()).unbind(-2)
        branch = self.attn1(normed(self.norm1, "layer", x, scale1, shift1), None, None, rotary_emb)
        if self.settings["second"]:
            y, x = added(self.norm2, "layer", x, branch, gate1)
        else:
            x = y = gated(x, branch, gate1)
        branch = self.attn2(y, encoder_hidden_states, None, None)
        y, x = added(self.norm3, "layer", x, branch, None, scale3, shift3)
        return mlp_added(self.ffn, y, x, gate3)


class FusedJointBlock(FusedBlock):
    """Video and text, each with its norms and MLP, one attention over both: HunyuanVideo's double-stream block."""

    attn: Any
    ff: Any
    ff_context: Any
    norm1: Any
    norm1_context: Any
    norm2: Any
    norm2_context: Any

    @classmethod
    def recognise(cls, module: nn.Module) -> dict[str, Any] | None:
        names = ("norm1", "norm1_context", "attn", "norm2", "ff", "norm2_context", "ff_context")
        if not _has(module, *names) or any(True for _ in module.parameters(recurse=False)):
            return None
        if not takes(type(module).forward, "hidden_states", "encoder_hidden_states", "temb", "attention_mask", "freqs_cis"):
            return None
        if takes(type(module).forward, "token_replace_emb"):
            raise Left("its first frame has modulations of its own")
        if not all(five_results(one) for one in (module.norm1, module.norm1_context)):
            return None
        return norms_of(module, "norm2", "norm2_context")

    def fused_forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        temb: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        freqs_cis: Any = None,
        *rest: Any,
        **others: Any,
    ) -> Any:
        if not silent(self.norm2, self.norm2_context):
            return NotImplemented
        x, text = hidden_states, encoder_hidden_states
        y, gate1, shift2, scale2, gate2 = self.norm1(x, emb=temb)
        beside, text_gate1, text_shift2, text_scale2, text_gate2 = self.norm1_context(text, emb=temb)
        branch, text_branch = self.attn(
            hidden_states=y, encoder_hidden_states=beside, attention_mask=attention_mask, image_rotary_emb=freqs_cis
        )
        y, x = added(self.norm2, self.settings["norm2"], x, branch, gate1, scale2, shift2)
        beside, text = added(
            self.norm2_context, self.settings["norm2_context"], text, text_branch, text_gate1, text_scale2, text_shift2
        )
        return mlp_added(self.ff, y, x, gate2), mlp_added(self.ff_context, beside, text, text_gate2)


def five_results(norm: Any) -> bool:
    """True for a modulated norm that hands on a gate and what the next norm and gate take, in the usual order."""
    try:
        found = FusedModulatedNorm.recognise(norm) if not is_fused(norm) else norm.settings
    except Left:
        return False
    return found is not None and found["results"] == [(0, 1, 0), (2, 0), (3, 0), (4, 0), (5, 0)]


class FusedSingleBlock(FusedBlock):
    """Attention and MLP side by side behind one norm, over video and text: HunyuanVideo's single-stream block."""

    attn: Any
    norm: Any
    proj_mlp: Any
    proj_out: Any
    act_mlp: Any

    @classmethod
    def recognise(cls, module: nn.Module) -> dict[str, Any] | None:
        if not _has(module, "attn", "norm", "proj_mlp", "act_mlp", "proj_out"):
            return None
        names = ("hidden_states", "encoder_hidden_states", "temb", "attention_mask", "image_rotary_emb")
        if not takes(type(module).forward, *names):
            return None
        if takes(type(module).forward, "token_replace_emb"):
            raise Left("its first frame has modulations of its own")
        activation = activation_of(module.act_mlp)
        if activation is None:
            raise Left("its activation is none of ours")
        return {"activation": activation}

    def fused_forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        temb: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Any = None,
        *rest: Any,
        **others: Any,
    ) -> Any:
        if not plain(self.proj_mlp) or not silent(self.act_mlp):
            return NotImplemented
        sizes = [hidden_states.shape[1], encoder_hidden_states.shape[1]]
        x = torch.cat([hidden_states, encoder_hidden_states], 1)
        y, gate = self.norm(x, emb=temb)
        hidden = ops.linear_act(y, self.proj_mlp.weight, self.proj_mlp.bias, activation=self.settings["activation"])
        video, text = y[:, : sizes[0]], y[:, sizes[0] :]
        branches = self.attn(
            hidden_states=video, encoder_hidden_states=text, attention_mask=attention_mask, image_rotary_emb=image_rotary_emb
        )
        branch = self.proj_out(torch.cat([torch.cat(branches, 1), hidden], 2))
        made = gated(x, branch, gate)
        return made[:, : sizes[0]], made[:, sizes[0] :]


class FusedSharedBlock(FusedBlock):
    """Video and text through one norm, one attention and one MLP, each with its modulations: CogVideoX' block."""

    attn1: Any
    norm1: Any
    norm2: Any
    ff: Any

    @classmethod
    def recognise(cls, module: nn.Module) -> dict[str, Any] | None:
        if not _has(module, "norm1", "attn1", "norm2", "ff") or any(True for _ in module.parameters(recurse=False)):
            return None
        names = ("hidden_states", "encoder_hidden_states", "temb", "image_rotary_emb", "attention_kwargs")
        if not takes(type(module).forward, *names):
            return None
        second: Any = module.norm2
        found = FusedModulatedNorm.recognise(second)
        if found is None or found["inputs"] != 2 or [len(told) for told in found["results"]] != [3, 3, 2, 2]:
            raise Left("its second norm is none of ours")
        return {}

    def fused_forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        temb: torch.Tensor,
        image_rotary_emb: Any = None,
        attention_kwargs: dict[str, Any] | None = None,
    ) -> Any:
        second = self.norm2
        if not is_fused(second) or not isinstance(second, FusedModulatedNorm) or not silent(second, second.norm):
            return NotImplemented
        x, text = hidden_states, encoder_hidden_states
        y, beside, gate, text_gate = self.norm1(x, text, temb)
        branch, text_branch = self.attn1(
            hidden_states=y, encoder_hidden_states=beside, image_rotary_emb=image_rotary_emb, **(attention_kwargs or {})
        )
        chunks, kind = second.chunks(temb, x), second.settings["norm"]
        y, x = added(second.norm, kind, x, branch, gate, *second.modulation(0, chunks))
        beside, text = added(second.norm, kind, text, text_branch, text_gate, *second.modulation(1, chunks))
        gate, text_gate = (chunks[second.settings["results"][place][0]] for place in (2, 3))
        branches = self.ff(torch.cat([beside, y], 1))
        text_branch, branch = branches[:, : text.shape[1]], branches[:, text.shape[1] :]
        return gated(x, branch, gate), gated(text, text_branch, text_gate)


class FusedTableBlock(FusedBlock):
    """Self-attention, perhaps cross-attention, MLP; six modulations of a table and the time: PixArt's block, and Latte's."""

    attn1: Any
    attn2: Any
    norm1: Any
    norm2: Any
    ff: Any
    scale_shift_table: torch.Tensor

    @classmethod
    def recognise(cls, module: nn.Module) -> dict[str, Any] | None:
        table = getattr(module, "scale_shift_table", None)
        if not _has(module, "norm1", "attn1", "norm2", "ff") or not isinstance(table, torch.Tensor) or table.dim() != 2:
            return None
        names = ("hidden_states", "attention_mask", "encoder_hidden_states", "encoder_attention_mask", "timestep")
        if not takes(type(module).forward, *names) or table.shape[0] != 6:
            return None
        for name in ("pos_embed", "fuser", "only_cross_attention"):
            if getattr(module, name, None):
                raise Left(f"it has {name}")
        return norms_of(module, "norm1", "norm2")

    def fused_forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        timestep: torch.Tensor | None = None,
        *rest: Any,
        **others: Any,
    ) -> Any:
        given = [value for value in (*rest, *others.values()) if value is not None]
        x = hidden_states
        if given or timestep is None or x.dim() != 3 or getattr(self, "_chunk_size", None) is not None:
            return NotImplemented
        if not silent(self.norm1, self.norm2):
            return NotImplemented
        parts = self.scale_shift_table[None] + timestep.reshape(x.shape[0], 6, -1)
        shift1, scale1, gate1, shift2, scale2, gate2 = parts.unbind(1)
        y = normed(self.norm1, self.settings["norm1"], x, scale1, shift1)
        branch = self.attn1(y, encoder_hidden_states=None, attention_mask=attention_mask)
        gate: torch.Tensor | None = gate1
        if self.attn2 is not None:
            x = gated(x, branch, gate1)
            branch = self.attn2(x, encoder_hidden_states=encoder_hidden_states, attention_mask=encoder_attention_mask)
            gate = None
        y, x = added(self.norm2, self.settings["norm2"], x, branch, gate, scale2, shift2)
        return mlp_added(self.ff, y, x, gate2)

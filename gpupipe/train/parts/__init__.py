"""What can be fused, and how: one class a kind of module, the ones that serve more first."""

from __future__ import annotations

from gpupipe.train.fused import Fused
from gpupipe.train.parts.convolutions import FusedCausalConvolution, FusedChannelNorm, FusedPatches, FusedResidualConvolutions
from gpupipe.train.parts.diffusion import (
    FusedCrossBlock,
    FusedJointBlock,
    FusedSharedBlock,
    FusedSingleBlock,
    FusedTableBlock,
)
from gpupipe.train.parts.mlps import FusedGatedMLP, FusedLinearAct, FusedMLP
from gpupipe.train.parts.modulated import FusedModulatedNorm
from gpupipe.train.parts.norms import FusedGroupNorm, FusedNorm
from gpupipe.train.parts.positions import FusedPositions, FusedRotary
from gpupipe.train.parts.prenorm import FusedPreNorm, FusedTwoHalves
from gpupipe.train.parts.processed import FusedProcessed
from gpupipe.train.parts.self_attention import FusedSelfAttention
from gpupipe.train.parts.windows import FusedWindowAttention

ALL: tuple[type[Fused], ...] = (
    FusedCrossBlock,
    FusedJointBlock,
    FusedSingleBlock,
    FusedSharedBlock,
    FusedTableBlock,
    FusedPreNorm,
    FusedTwoHalves,
    FusedResidualConvolutions,
    FusedProcessed,
    FusedSelfAttention,
    FusedWindowAttention,
    FusedModulatedNorm,
    FusedRotary,
    FusedPositions,
    FusedNorm,
    FusedGroupNorm,
    FusedChannelNorm,
    FusedCausalConvolution,
    FusedPatches,
    FusedMLP,
    FusedGatedMLP,
    FusedLinearAct,
)
"""In the order in which they are asked; the first that serves a module has it."""

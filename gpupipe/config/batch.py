"""The configuration of batches: how many clips, of which shapes, within which budget."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from gpupipe.config.stage import Misfit, StageConfig
from gpupipe.config.transform import Side

Frames = Annotated[int, Field(ge=1, le=4096)]
Step = Annotated[int, Field(ge=1, le=1024)]


class BucketsConfig(StageConfig):
    """Shapes that clips may have: each of the lengths with each of the sizes. Every video gets the one that fits it best."""

    example: ClassVar[str] = '{"frames": [16, 32], "multiple": 32}'

    frames: tuple[Frames, ...] = ()
    """Lengths in frames. A clip has the greatest that its video can fill as ``clip`` takes frames, else the least, padded. None
    given: ``clip.frames``."""
    sizes: tuple[tuple[Side, Side], ...] = ()
    """(height, width) in pixels. A clip has the one whose aspect ratio is nearest to its video's. None given:
    ``transform.size``, or what ``multiple`` makes."""
    multiple: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Aspect buckets, as for diffusion models: all sizes with sides that are multiples of this, of nearly the area of
    ``transform.size`` but no larger, with aspect ratios up to ``max_ratio``. In place of ``sizes``."""
    max_ratio: Annotated[float, Field(ge=1, le=16)] = 2.0
    """The longer side over the shorter one, at most, of the sizes that ``multiple`` makes."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.sizes and self.multiple is not None:
            raise Misfit("give sizes or multiple, not both", fix="leave one of them out")
        if not self.frames and not self.sizes and self.multiple is None:
            raise Misfit("buckets without frames, sizes or multiple make no difference", fix="give one of them")
        for name in ("frames", "sizes"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise Misfit(f"{name} names a value twice: {values}", fix="give each once")
        return self

    def sizes_for(self, size: tuple[int, int]) -> tuple[tuple[int, int], ...]:
        """The sizes that clips may have, where ``transform.size`` is ``size``.

        For each width that is a multiple, the greatest height that keeps the area within that of ``size``, as in the bucketing
        that NovelAI published for Stable Diffusion (2022); of heights likewise.
        """
        if self.multiple is None:
            return self.sizes or (size,)
        area, step = size[0] * size[1], self.multiple
        found = set()
        for one in range(step, int(math.sqrt(area * self.max_ratio)) + 1, step):
            other = area // one // step * step
            if other and max(one, other) <= self.max_ratio * min(one, other):
                found |= {(one, other), (other, one)}
        return tuple(sorted(found))


class BatchConfig(StageConfig):
    """How clips are grouped."""

    example: ClassVar[str] = '{"size": 8, "last": "partial"}'
    elsewhere: ClassVar[dict[str, str]] = {"drop_last": "write last='partial' for drop_last=False; 'drop' is the default"}

    size: Annotated[int, Field(ge=1)] = 8
    """Clips in a batch; with ``max_tokens`` or ``max_gib``, at most."""
    micro_size: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    """Clips of a micro-batch, at most, for gradient accumulation: a batch is a step of the optimizer, handed out in parts, each
    with its ``share``. ``auto``: as many as fit the GPU's memory beside what is in use, measured step by step; fewer after an
    out-of-memory error in ``VideoLoader.step_guard()``. None: whole batches."""
    last: Literal["drop", "partial", "fill"] = "drop"
    """What becomes of the samples at the end of an epoch that make no full batch for each rank. ``drop``: they are left out.
    ``partial``: a smaller batch, as large for one rank as for the other; what cannot be divided among the ranks is left out.
    ``fill``: the epoch's first samples come again, as other clips, so that no video is left out and all batches are full."""
    buckets: BucketsConfig | None = None
    """Clips of several shapes; those of a batch go together as ``layout`` says. The batches are planned from the videos'
    indices when the loader is made: their number is exact, and the same for all ranks, which get clips of like cost in each
    step."""
    layout: Literal["stack", "pad", "pack"] = "stack"
    """Which clips share a batch. ``stack``: those of one shape. ``pad``: those of one size; shorter ones are filled up with
    zeros to the longest, and ``mask`` is False there. ``pack``: any; the batch has ``tokens`` of ``patch`` one after the other
    instead of ``video``, with ``cu_seqlens`` and ``grid`` (Dehghani et al., Patch n' Pack, 2023)."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens in a batch, padding included, at most: patches of ``patch``, those at the edges counted whole. For ``pack``
    lengths and sizes must be multiples of the patch's."""
    patch: tuple[Step, Step, Step] = (1, 16, 16)
    """(frames, rows, columns) of a token."""
    max_gib: Annotated[float, Field(gt=0, le=1024)] | None = None
    """Memory of a batch's ``video`` or ``tokens`` in GiB, at most."""
    wait: Annotated[int, Field(ge=1)] = 4096
    """Samples of the epoch that go by, at most, until the clips of a rare shape are given as a smaller batch, provided that
    there is one for each rank."""

    @property
    def planned(self) -> bool:
        """Whether batches follow from the shapes of their clips, not from their number alone."""
        return bool(self.buckets or self.max_tokens or self.max_gib or self.layout != "stack")

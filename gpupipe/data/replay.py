"""A clip made again from its record, beside whatever epoch is under way."""

from __future__ import annotations

from typing import cast

import torch

from gpupipe.data import index as indices
from gpupipe.data.decode import Mode
from gpupipe.data.job import Job
from gpupipe.data.limit import within_limit
from gpupipe.data.single import Which, make_clip
from gpupipe.errors import ConfigError, SampleError
from gpupipe.types import ClipRecord, Entry


@within_limit("a clip cannot be made again")
def replay(job: Job, record: ClipRecord) -> torch.Tensor:
    """The clip of a record, made as the pipeline makes it, by the decoder that the record names.

    Returns:
        A tensor of the transform's ``clip_shape`` and ``dtype`` on the job's device, usable on the current stream.

    Raises:
        ConfigError: for what is no record, or one of clips of another length.
        SampleError: when the video has no such frames.
        OpenError, DecodeError, GraphError: when the clip cannot be made; the file is named.
    """
    if not isinstance(record, ClipRecord):
        raise ConfigError(
            f"a clip is made again from its record, not from a {type(record).__name__}", fix="give batch.clips[k]"
        )
    pick, transform = record.pick, job.makers.transform(record.request.shape)
    if len(pick.indices) != transform.frames:
        raise ConfigError(
            f"the record is of a clip of {len(pick.indices)} frames, this loader's have {transform.frames}",
            fix="use a loader with the configuration that the clip was made with",
        )
    entry = job.entries[record.request.entry] if record.request.entry < len(job.entries) else Entry(record.path)
    index = indices.load(job.file_of(entry if entry.path == record.path else Entry(record.path)))
    first, last = min(pick.decoded), max(pick.decoded)
    if not 0 <= first <= last < index.info.frames:
        raise SampleError(
            f"the record names frames {first} to {last}, {record.path} has 0 to {index.info.frames - 1}",
            fix="was the file replaced? Give the one that the record was made from",
            path=record.path,
        )
    which = Which(record.request, record.clip, pick)
    # Engines of the job belong to the threads of the epoch that may be under way.
    mode = cast(Mode, record.decoder)
    return make_clip(index, which, transform, job.custom, lambda _: record.params, job.device, mode)[0]

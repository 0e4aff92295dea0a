"""From a visit's planes to its clips, in their places in the batch."""

from __future__ import annotations

import torch

from gpupipe.config import LoaderConfig
from gpupipe.data.assembly import Arrival
from gpupipe.data.decode import DecodeEngine, Decoder
from gpupipe.data.draws import AUGMENT, clip_generator
from gpupipe.data.job import Job
from gpupipe.data.sample import shortage
from gpupipe.data.stop import Stop
from gpupipe.data.transform import ClipInput
from gpupipe.data.transform.custom import Watch
from gpupipe.data.visit import Visit
from gpupipe.device.stream import Mark, stage
from gpupipe.types import ClipRecord, Planes


def make_clips(
    job: Job, visit: Visit, planes: Planes, decoder: Decoder, engine: DecodeEngine, stop: Stop, watch: Watch
) -> list[Arrival]:
    """Draws the parameters of a visit's clips, makes them, and says what is to travel with each.

    Args:
        planes: of the frames of ``visit.plan``.
        decoder: that made them.
        engine: on whose stream they are complete, and the clips are made.
        stop: asked amid long work.
        watch: told of calls of the user's own transforms.

    Raises:
        Stopped: when ``stop()`` turned true.
        GraphError, CallFailed: when a user's transform fails.
    """
    info, task, stream = visit.index.info, visit.task, engine.stream
    transform = job.makers.transform(task.request.shape)
    maker = visit.kept.decoder if visit.kept is not None else decoder
    records, clips = [], []
    first = 0
    with stage("transform", visit.entry.path), torch.cuda.stream(stream), job.telemetry.span("transform"):
        for clip, (slot, pick) in enumerate(zip(task.slots, visit.picks, strict=True)):
            frames = visit.plan.frame_map[first : first + len(pick.decoded)]
            first += len(pick.decoded)
            source = job.custom.prepare(planes, info, frames, pick, task.request, clip, watch)
            generator = clip_generator(task.request, AUGMENT, clip)
            params = transform.draw(source.info, generator, clip, displayed=info.display_size)
            out = task.assembly.slot(slot, stream)
            records.append(ClipRecord(visit.entry.path, task.request, pick, params, maker, clip))
            clips.append(ClipInput(source.planes, source.info, params, source.frame_map, out, source.blend))
        transform.apply_batch(clips, stop, engine.scratch if stream is not None else None)
        for slot, each, record in zip(task.slots, clips, records, strict=True):
            job.custom.finish(each.out, info, record, transform, watch)
            task.assembly.canvas.written(slot, each.out)
        done = Mark(stream) if stream is not None else None
    arrivals = [Arrival(record, visit.index.seconds_shown(record.pick), visit.entry.columns, done) for record in records]
    job.telemetry.count("clips", len(arrivals))
    job.telemetry.count("cache_hits" if visit.decoded else f"{decoder}_clips", len(arrivals))
    if job.clips is not None and not visit.decoded:
        job.telemetry.count("cache_misses", len(arrivals))
    job.telemetry.count("frames_used", sum(len(set(pick.decoded)) for pick in visit.picks))
    padded = [pick for pick in visit.picks if not pick.mask[-1]]  # padding stands at the end
    if padded:
        job.telemetry.count("clips_padded", len(padded))
        if not _padding_is_meant(job.config):
            found = shortage(job.makers.clip(task.request.shape), info, min(padded[0].indices))
            job.telemetry.warn_once("padded", f"{visit.entry.path} has {found}")
    return arrivals


def _padding_is_meant(config: LoaderConfig) -> bool:
    """Whether a configuration asks for padding, by name or by what pads wherever videos are short."""
    clip, batch = config.clip, config.batch
    lengths = batch.buckets is not None and bool(batch.buckets.frames)
    return "pad" in clip.model_fields_set or clip.spans_video or batch.layout == "pad" or lengths

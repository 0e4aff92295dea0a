"""Ray: loaders of Ray Train's workers, in its checkpoints; and a stage of Ray Data that makes clips all over a cluster."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpupipe.config import LoaderConfig
from gpupipe.data.loader import VideoLoader
from gpupipe.data.transform.custom import UserTransform
from gpupipe.device.inventory import load
from gpupipe.errors import ConfigError, GpupipeError
from gpupipe.integrations.checks import one_state_serves_all
from gpupipe.types import Batch

load("ray.train.torch")  # that Ray, or its part for training, is not there is told in one line, with what to install

import ray.train
import ray.train.torch

Own = UserTransform | None
STATE = "gpupipe_state.json"  # in a checkpoint: where the loader stood


def worker_loader(videos: Any, **settings: Any) -> VideoLoader:
    """A loader for this worker of Ray Train, on its device; it goes on where the checkpoint stands that the run goes on from.

    Every worker must see the videos under the same paths. ``ray.train.torch.prepare_data_loader`` is not for it. ``videos`` and
    ``settings`` are those of :class:`gpupipe.VideoLoader`; device and ranks are the worker's.

    Raises:
        ConfigError: when batches come out of order, so that each worker would need a state of its own.
    """
    context = ray.train.get_context()
    known = {"rank": context.get_world_rank(), "world_size": context.get_world_size()}
    loader = VideoLoader(videos, **{**known, "device": str(ray.train.torch.get_device()), **settings})
    one_state_serves_all(loader)
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            file = Path(folder, STATE)
            if not file.is_file():
                raise ConfigError(f"{folder} has no {STATE}", fix="go on from a checkpoint that report() from here made")
            loader.load_state_dict(json.loads(file.read_text()))
    return loader


def report(metrics: Mapping[str, Any], loader: VideoLoader, write: Callable[[Path], None] | None = None) -> None:
    """``ray.train.report`` with a checkpoint in which the loader's place is. Every worker calls it; the first one's ``write``
    stores the rest in the folder that it is given."""
    if ray.train.get_context().get_world_rank() != 0:
        ray.train.report(dict(metrics))
        return
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, STATE).write_text(json.dumps(loader.state_dict()))
        if write is not None:
            write(Path(folder))
        ray.train.report(dict(metrics), checkpoint=ray.train.Checkpoint.from_directory(folder))


class ClipMaker:
    """Clips of the videos that rows name, for ``Dataset.map_batches``::

        rows.map_batches(ClipMaker, fn_constructor_kwargs={"clip": {"frames": 16}}, batch_size=32, concurrency=4, num_gpus=1)

    Each row gains ``video`` (a clip; float32 where the transform says bfloat16, which NumPy has not), ``pts_seconds`` and
    ``mask``. Rows whose video cannot be used are left out, unless ``on_bad_file`` says otherwise.

    Args:
        path_column: the column of paths, which every node must be able to open.
        before, after, settings: as for :class:`gpupipe.VideoLoader`, but for order and size of batches, which are Ray's. Random
            choices depend on ``seed`` and the paths of a batch, so that a task that Ray repeats makes the same clips.
    """

    def __init__(self, path_column: str = "path", *, before: Own = None, after: Own = None, **settings: Any) -> None:
        self.path_column, self.before, self.after = path_column, before, after
        base = LoaderConfig.parse(settings.pop("config", {"on_bad_file": "skip"}))
        self.config = base.override({**settings, "shuffle": False, "rank": 0, "world_size": 1})

    def __call__(self, rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        paths = [str(path) for path in rows[self.path_column]]
        known = f"{self.config.seed}\0" + "\0".join(paths)
        seed = int.from_bytes(hashlib.sha256(known.encode("utf-8", "surrogateescape")).digest()[:7], "little")
        size = len(paths) * self.config.clip.clips_per_video
        config = self.config.override({"seed": seed, "batch": size})
        with VideoLoader(paths, config=config, before=self.before, after=self.after) as loader:
            try:
                (batch,) = loader
            except GpupipeError:
                if len(loader.bad_files) < len(set(paths)):
                    raise
                batch = self._empty()
        kept = [clip.request.entry for clip in batch.clips]
        made = {name: tensor.float() if tensor.dtype == torch.bfloat16 else tensor for name, tensor in batch.items()}
        return {name: np.asarray(values)[kept] for name, values in rows.items()} | {
            name: tensor.cpu().numpy() for name, tensor in made.items()
        }

    def _empty(self) -> Batch:
        """No clips, in the form of clips: what becomes of rows of which no video can be used."""
        frames, transform = self.config.clip.frames, self.config.transform
        shape = (3, frames) if transform.layout == "NCTHW" else (frames, 3)
        video = torch.empty(0, *shape, *transform.size, dtype=getattr(torch, transform.dtype))
        times, mask = torch.empty(0, frames, dtype=torch.float64), torch.empty(0, frames, dtype=torch.bool)
        return Batch({"video": video, "pts_seconds": times, "mask": mask})

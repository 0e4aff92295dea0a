"""A loader as other tools want to see it: its sampler, its videos as a dataset, and itself as torch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from gpupipe.config import LoaderConfig
from gpupipe.config.stage import whole_number
from gpupipe.data import index as indices
from gpupipe.data.bytes import settings as remote
from gpupipe.data.bytes.name import of_entry
from gpupipe.data.makers import Makers
from gpupipe.data.prepare import prepare
from gpupipe.data.shape import Shape
from gpupipe.data.single import Which, drawn, make_clip
from gpupipe.data.source.arrays import filled
from gpupipe.data.source.columns import Kind, dtype_of, text_of
from gpupipe.data.transform.custom import Custom, UserTransform
from gpupipe.errors import ClosedError, SampleError
from gpupipe.types import Batch, ClipRequest, Entry


class Loader(Protocol):
    """A :class:`gpupipe.VideoLoader`, as far as views of it go."""

    def __iter__(self) -> Iterator[Batch]: ...

    def __len__(self) -> int: ...

    def set_epoch(self, epoch: int) -> None: ...

    def upcoming(self) -> list[int]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class EpochSampler:
    """Which videos this rank has in its next epoch; trainers look here for ``set_epoch``."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def set_epoch(self, epoch: int) -> None:
        """As :meth:`gpupipe.VideoLoader.set_epoch`."""
        self._loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        """Positions of the videos in ``loader.dataset.paths``, in the order in which they come."""
        return iter(self._loader.upcoming())

    def __len__(self) -> int:
        return len(self._loader.upcoming())


class ClipDataset(Dataset[dict[str, Any]]):
    """The videos of a loader as a map-style dataset, for code that brings a sampler and a DataLoader of its own.

    Item k is clip ``k % clips_per_video`` of video ``k // clips_per_video``, made in the thread that asks for it, which is far
    slower than the loader. ``video``, ``pts_seconds``, ``mask``, ``label`` and further columns are as in the loader's batches,
    without their leading dimension; text is ``str``. Random choices are keyed by (seed, epoch, k).

    On the CPU it may be used in worker processes. Fork them while no epoch is at work, since a lock that one of its threads
    holds in native code stays taken in the child; or start them by spawn.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        config: LoaderConfig,
        device: torch.device,
        kinds: Mapping[str, Kind],
        folder: str,
        before: UserTransform | None = None,
        after: UserTransform | None = None,
        shapes: Sequence[Shape | None] | None = None,
    ) -> None:
        self._entries = entries
        self._config = config
        self._device = device
        self._kinds = dict(kinds)
        self._folder = folder
        self._before, self._after = before, after
        self._shapes = shapes
        self._epoch = 0

    @property
    def paths(self) -> list[str]:
        """The paths of all videos, in source order."""
        return [entry.path for entry in self._entries]

    def set_epoch(self, epoch: int) -> None:
        """Makes the random choices those of ``epoch``."""
        self._epoch = int(epoch)

    def __len__(self) -> int:
        """Clips: ``clips_per_video`` of each video."""
        return len(self._entries) * self._config.clip.clips_per_video

    def __getitem__(self, number: int) -> dict[str, Any]:
        """
        Raises:
            IndexError: when there is no such clip.
            SampleError: for a slice, or when the video has not enough frames.
            OpenError, DecodeError, GraphError: when the clip cannot be made; the file is named.
            ClosedError: in a worker process where the device is a GPU.
        """
        position = whole_number(number)
        if position is None:
            raise SampleError(f"{number!r} is no number of a clip", fix="use dataset[7]")
        if not -len(self) <= position < len(self):
            raise IndexError(f"clip {position} of {len(self)}")
        if self._device.type == "cuda" and get_worker_info() is not None:
            raise ClosedError(
                "clips on a GPU cannot be made in a worker process: CUDA does not survive a fork, and each worker would hold a "
                "context of its own",
                fix="use num_workers=0, or iterate the VideoLoader itself, which has threads",
            )
        position %= len(self)
        video, clip = divmod(position, self._config.clip.clips_per_video)
        entry = filled(self._entries[video], self._kinds, self._folder)
        shape = self._shapes[video] if self._shapes is not None else None
        request = ClipRequest(self._config.seed, self._epoch, video, video, shape=shape)
        index = indices.load(of_entry(entry, self._folder))
        pick = prepare(self._makers.clip(shape), request, entry, index, self._config.transform.crops).picks[clip]
        which, transform = Which(request, clip, pick), self._makers.transform(shape)
        draw = drawn(transform, which, index)
        decoder = self._config.decode.decoder
        pixels, _, _ = make_clip(index, which, transform, self._custom, draw, self._device, decoder)
        item: dict[str, Any] = {
            "video": pixels,
            "pts_seconds": torch.tensor(index.seconds_shown(pick), dtype=torch.float64, device=self._device),
            "mask": torch.tensor(pick.mask, device=self._device),
        }
        for name, kind in self._kinds.items():
            value = entry.columns[name]
            item[name] = (
                text_of(value) if kind == "text" else torch.as_tensor(np.asarray(value, dtype_of(kind)), device=self._device)
            )
        return item

    @cached_property
    def _makers(self) -> Makers:
        return Makers(self._config)

    @cached_property
    def _custom(self) -> Custom:
        settings = self._config.transform
        return Custom(self._before, self._after, settings.untagged_matrix, settings.untagged_range)

    def __getstate__(self) -> dict[str, Any]:
        """Without what each process makes for itself."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_makers", "_custom")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In another process, which knows nothing of how stores far away are to be asked."""
        self.__dict__.update(state)
        remote.use(**self._config.remote.model_dump(exclude_none=True))


class BatchStream(IterableDataset[Batch]):
    """A loader's batches as an iterable dataset, whose items are whole batches."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """As :meth:`gpupipe.VideoLoader.set_epoch`."""
        self.loader.set_epoch(epoch)


class LoaderView(DataLoader[Any]):
    """A loader as a real ``torch.utils.data.DataLoader``, for tools that insist on one.

    It has no workers, pins nothing and changes no batch. Tools that put another sampler into a DataLoader or divide its batches
    among ranks must not do so here: the loader has taken its rank's share already.
    """

    _is_accelerate_prepared = True  # so accelerate leaves it as it is, which would divide it among ranks once more

    def __init__(self, loader: Loader) -> None:
        super().__init__(BatchStream(loader), batch_size=None, collate_fn=_as_it_is)
        self.loader = loader

    def set_epoch(self, epoch: int) -> None:
        """As :meth:`gpupipe.VideoLoader.set_epoch`."""
        self.loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """As :meth:`gpupipe.VideoLoader.state_dict`."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As :meth:`gpupipe.VideoLoader.load_state_dict`."""
        self.loader.load_state_dict(state)


def _as_it_is(batch: Any) -> Any:
    return batch

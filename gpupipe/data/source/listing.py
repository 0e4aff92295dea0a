"""What a loader reads: its videos, listed, labelled and checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpupipe.config import LoaderConfig, MixConfig, SourceConfig
from gpupipe.data.mixture import Mixture
from gpupipe.data.source.arrays import with_arrays
from gpupipe.data.source.collect import Videos, class_names, collect, label_names, name_labels, number_labels
from gpupipe.data.source.columns import Kind, column_kinds, start_frame, tell_of_label
from gpupipe.data.source.dataset import declared_classes
from gpupipe.data.source.filter import left_out
from gpupipe.errors import ConfigError
from gpupipe.types import Entry


@dataclass(frozen=True, slots=True)
class Listing:
    """A loader's videos.

    Attributes:
        entries: in source order.
        classes: the names of the classes in the order of their numbers, where labels are names or folders or
            ``source.classes`` names them; else none.
        kinds: what each column of a batch is.
        mixture: how often an epoch visits each; None: once.
        left_out: videos that ``source.filter`` left out, with the reason.
    """

    entries: list[Entry]
    classes: tuple[str, ...]
    kinds: dict[str, Kind]
    mixture: Mixture | None
    left_out: dict[str, str]


def list_videos(videos: Videos, config: LoaderConfig, processes: int = 1) -> Listing:
    """Lists the videos and checks their rows, so that a bad one is told of now, not when its turn comes.

    Args:
        processes: how many make the indices that ``source.filter`` asks for.

    Raises:
        SourceError: when the videos cannot be found or listed, a column is missing or cannot travel, or no video passes
            the filter.
        ConfigError: when labels do not fit ``transform.mix``, or ``source.weights`` the videos.
        DeviceError: when a package that reads them is not installed.
    """
    source = config.source
    entries = collect(videos, source, config.columns)
    declared = declared_classes(videos, source) if source.label_from == "column" else ()
    if declared and source.classes and source.classes != declared:
        entries = name_labels(entries, declared)
        declared = ()
    are_numbered = source.label_from == "folder" or (declared and source.classes)  # the places of labels among classes
    names = () if are_numbered else label_names(entries, source)
    if names:
        entries = number_labels(entries, names)
    for entry in entries:
        start_frame(entry)
    classes = (source.classes or class_names(entries)) if source.label_from == "folder" else names or declared
    kinds = column_kinds(entries, config.columns, source.npy_columns)
    if source.label_from != "none":
        tell_of_label(entries, (*config.columns, *source.npy_columns))
    if config.transform.mix is not None:
        _check_labels(entries, kinds, config.transform.mix)
    items = entries[-1].part + 1
    if source.weights and len(source.weights) != items:
        raise ConfigError(
            f"source.weights has {len(source.weights)} numbers, videos has {items} items",
            fix="give a list of videos, and a weight for each of its items, in its order",
        )
    out = left_out(entries, source.filter, processes, (config.rank or 0, config.world_size or 1))
    entries = with_arrays([entry for entry in entries if entry.path not in out] if out else entries, kinds)
    return Listing(entries, classes, kinds, _mixture(entries, source), out)


def _mixture(entries: Sequence[Entry], config: SourceConfig) -> Mixture | None:
    """How the items of the list of videos are mixed, where they are."""
    if config.weights:
        sizes = Counter(entry.part for entry in entries)
        return Mixture.of([sizes[part] for part in range(len(config.weights))], config.weights, config.epoch_length)
    return Mixture.of([len(entries)], [1.0], config.epoch_length) if config.epoch_length != "total" else None


def _check_labels(entries: Sequence[Entry], kinds: Mapping[str, Kind], mix: MixConfig) -> None:
    """Raises ConfigError unless every video has a label that ``mix`` knows."""
    if kinds.get("label") != "int":
        raise ConfigError("transform.mix needs a label for each video, a whole number", fix="see labels in the README's table")
    for entry in entries:
        if not 0 <= int(entry.columns["label"]) < mix.num_classes:
            raise ConfigError(
                f"{entry.path} has the label {entry.columns['label']}, transform.mix.num_classes is {mix.num_classes}",
                fix="labels go from 0 to num_classes - 1",
            )

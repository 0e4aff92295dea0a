"""A whole run in one file, which is there whole or not at all."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Mapping
from typing import Any

import torch

from gpupipe.device import autotune
from gpupipe.device.disk import replacing
from gpupipe.errors import ConfigError
from gpupipe.ops.sharded import is_sharded
from gpupipe.train.arguments import a_device, a_path

VERSION = 1
"""Of the form of the file. One of another version is refused."""
_OWN = ("version", "launches")
_PLAIN = (int, float, complex, bool, str, bytes, bytearray, type(None), torch.dtype, torch.device, torch.Size)
"""Kinds of values beside tensors, and mappings and lists of them, that are read without running anything."""


def save_checkpoint(path: str | os.PathLike[str], **parts: Any) -> None:
    """Writes the parts of a run: state_dicts of model, optimizer, loader and so on, numbers, text.

    The file takes the place of an earlier one only when it is complete, so that a run killed at any moment leaves one that
    loads. Which launches the kernels were tuned to goes in as well. Reading weights waits for the device.

    Args:
        path: of the file. One process writes it; the state of one rank's loader serves all ranks.
        parts: by name, made of tensors and plain data.

    Raises:
        ConfigError: for a name that the file needs itself, a part with anything else in it, which could not be read again, or
            a file that cannot be written.
    """
    if taken := set(parts) & set(_OWN):
        raise ConfigError(f"a checkpoint has {', '.join(sorted(taken))} of its own", fix="give the part another name")
    file_path = a_path(path)
    for name, part in parts.items():
        _check(part, name)
    try:
        with replacing(file_path) as file:
            torch.save({"version": VERSION, "launches": autotune.recorded(), **parts}, file)
    except OSError as error:
        raise ConfigError(f"cannot write the checkpoint {path}: {error}", fix="name a file in a folder with room") from error


def _whole(path: str | os.PathLike[str]) -> None:
    """Reads all of a file once and holds it against its checksums: torch does not, and turned bits would be other weights."""
    with zipfile.ZipFile(path) as file:
        damaged = file.testzip()
    if damaged is not None:
        raise ValueError(f"it is damaged: {damaged} is not what was written")


def _check(part: Any, place: str) -> None:
    """Refuses what :func:`load_checkpoint` would not read, before an earlier file is replaced."""
    if isinstance(part, Mapping):
        for name, value in part.items():
            _check(name, f"a key of {place}")
            _check(value, f"{place}[{name!r}]")
    elif type(part) in (list, tuple, set, torch.Size):
        for number, value in enumerate(part):
            _check(value, f"{place}[{number}]")
    elif is_sharded(part):
        raise ConfigError(
            f"{place} is a DTensor, of which this rank has a part alone", fix="give whole(state) of gpupipe.train.parallel"
        )
    elif not isinstance(part, torch.Tensor) and type(part) not in _PLAIN:
        fix = (
            "give its state_dict()"
            if hasattr(part, "state_dict")
            else "give tensors and plain data: float(…), .tolist(), vars(…)"
        )
        raise ConfigError(
            f"{place} is a {type(part).__module__}.{type(part).__qualname__}, which a checkpoint cannot hold", fix=fix
        )


def load_checkpoint(path: str | os.PathLike[str], *, device: torch.device | str = "cpu") -> dict[str, Any]:
    """The parts that :func:`save_checkpoint` wrote. Kernels are launched as in the run that wrote it.

    Nothing in the file is run: only tensors and plain data are read.

    Args:
        device: where its tensors are put; what is loaded from them is copied to where it belongs.

    Raises:
        ConfigError: for a file that is not there or is no checkpoint of this version.
    """
    where = a_device(device)
    a_path(path)
    try:
        _whole(path)
        found: Any = torch.load(path, map_location=where, weights_only=True)
    except (OSError, RuntimeError, EOFError, LookupError, ValueError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"cannot read the checkpoint {path}: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            fix="give a file that save_checkpoint() wrote",
        ) from error
    if not isinstance(found, Mapping) or found.get("version") != VERSION:
        version = found.get("version") if isinstance(found, Mapping) else None
        raise ConfigError(
            f"{path} is a checkpoint of version {version!r}, this gpupipe reads {VERSION}",
            fix="give a file that save_checkpoint() wrote, or go on with the gpupipe that wrote it",
        )
    if not isinstance(found.get("launches"), Mapping):
        raise ConfigError(f"{path} has no record of launches", fix="give a file that save_checkpoint() wrote")
    autotune.recall(dict(found["launches"]))
    return {name: part for name, part in found.items() if name not in _OWN}

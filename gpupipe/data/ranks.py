"""Which rank a loader is, of how many, and how many share its machine."""

from __future__ import annotations

import os

import torch

from gpupipe.config import LoaderConfig
from gpupipe.errors import ConfigError


def place(config: LoaderConfig) -> tuple[int, int]:
    """(rank, number of ranks): as configured, else torch.distributed's, else the environment's, else one alone.

    Raises:
        ConfigError: when the environment's are no such numbers.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    elif config.rank is not None and config.world_size is not None:  # then the environment's do not count, whatever they are
        rank, ranks = config.rank, config.world_size
    else:
        given = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
        if "RANK" not in os.environ and given[1] != "1" and config.rank is None and config.world_size != 1:
            raise ConfigError(f"WORLD_SIZE={given[1]} is set and RANK is not", fix="give rank= and world_size=")
        if not all(number.isdecimal() for number in given) or int(given[0]) >= int(given[1]):
            raise ConfigError(f"RANK={given[0]} and WORLD_SIZE={given[1]} do not fit", fix="give rank= and world_size=")
        rank, ranks = int(given[0]), int(given[1])
    world_size = config.world_size or ranks
    if config.rank is not None:
        rank = config.rank
    elif world_size == 1:  # each rank has all
        rank = 0
    elif world_size != ranks:  # only the user knows which of them this one is
        raise ConfigError(f"world_size={world_size} of {ranks} rank(s) that there are needs rank= too", fix="give both")
    if rank >= world_size:
        raise ConfigError(f"rank={rank} needs world_size > {rank}, got {world_size}", fix="give both")
    return rank, world_size


def local_ranks(device: torch.device) -> int:
    """Ranks that share this machine, as far as they are known: those that the launcher tells of (``LOCAL_WORLD_SIZE``), else
    those of torch.distributed, of which there are no more here than GPUs.

    Raises:
        ConfigError: when ``LOCAL_WORLD_SIZE`` is no number of ranks.
    """
    told = os.environ.get("LOCAL_WORLD_SIZE")
    if told is not None:
        if not told.isdecimal() or int(told) < 1:
            raise ConfigError(f"LOCAL_WORLD_SIZE={told} is no number of ranks", fix="unset it, or give decode.cpu_workers")
        return int(told)
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 1
    ranks = torch.distributed.get_world_size()
    return min(ranks, torch.cuda.device_count()) if device.type == "cuda" else ranks

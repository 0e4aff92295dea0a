"""How a matrix is cut into tiles, each element of which is worked out alone: launches to try, and what each should cost."""

from __future__ import annotations

from gpupipe.device.autotune import Config, Machine, streaming_us, unlike

_WIDTHS = (128, 256, 512, 1024)
_SMALLEST = 4
"""Dropout draws for four columns at a time."""


def _tiles(columns: int) -> list[dict[str, int]]:
    """Tiles of 8 or 16 elements a thread, which are loads of 16 bytes; a narrow matrix takes more rows at a time."""
    fits = max(_SMALLEST, 1 << (columns - 1).bit_length())
    found = [
        {"ROWS": max(1, each * warps * 32 // across), "COLS": across, "num_warps": warps}
        for warps in (4, 8)
        for each in (8, 16)
        for across in dict.fromkeys(min(width, fits) for width in _WIDTHS)
    ]
    return [dict(pairs) for pairs in dict.fromkeys(tuple(config.items()) for config in found)]


def forward_candidates(columns: int) -> list[dict[str, int]]:
    """Rows and columns of a tile, and warps."""
    return [{**tile, "num_stages": 1} for tile in _tiles(columns)]


def forward_us(gpu: Machine, config: Config, count: int, columns: int, row_bytes: int, reads: int) -> float:
    """Estimated time of the forward kernel.

    Args:
        row_bytes: read and written for a row, all tensors together.
        reads: tensors of the result's size that are read.
    """
    elements = config["ROWS"] * config["COLS"]
    slow = 0.006 * config["num_warps"] + 0.001 * config["ROWS"]  # few warps make way sooner; each row lies elsewhere in memory
    return (_unfit(config, columns) + slow) * streaming_us(
        gpu,
        total_bytes=count * row_bytes,
        programs=-(-count // config["ROWS"]) * -(-columns // config["COLS"]),
        tile_bytes=elements * row_bytes // columns * reads // (reads + 1),
        warps=config["num_warps"],
        registers=int(20 + elements / (config["num_warps"] * 32) * (1 + reads)),
    )


def backward_candidates(gpu: Machine, columns: int, group: int, groups: int, summing: bool) -> list[dict[str, int]]:
    """The same, and how many programs share the rows of a group: all that the GPU holds if they keep sums, else one a tile."""
    found = []
    for tile in _tiles(columns):
        for per_sm in (2, 4, 8) if summing else (0,):
            if tile["num_warps"] * per_sm > gpu.warps:
                continue
            found += [{**tile, "PER_SM": per_sm, "num_stages": stages} for stages in ((1, 2) if summing else (1,))]
    return unlike(found, lambda config: programs(gpu, config, columns, group, groups))


def programs(gpu: Machine, config: Config, columns: int, group: int, groups: int) -> int:
    """How many share the rows of a group: one a tile where ``PER_SM`` is 0, else as many as the GPU is to hold."""
    steps, across = -(-group // config["ROWS"]), -(-columns // config["COLS"])
    return max(1, min(steps, -(-gpu.sms * config["PER_SM"] // (across * groups)))) if config["PER_SM"] else steps


def backward_us(
    gpu: Machine,
    config: Config,
    group: int,
    groups: int,
    columns: int,
    row_bytes: int,
    reads: int,
    writes: int,
    sums: int,
    held: int,
) -> float:  # fmt: skip
    """Estimated time of the backward kernel, with ``sums`` values a column kept in registers and written once a program.

    ``held``: other values that a thread needs at a time for an element.
    """
    elements = config["ROWS"] * config["COLS"]
    each = elements / (config["num_warps"] * 32)
    sharing = programs(gpu, config, columns, group, groups)
    started = sharing * groups * -(-columns // config["COLS"])
    tile_bytes = elements * row_bytes // columns * reads // (reads + writes)
    uneven = -(-started // gpu.sms) * gpu.sms / started  # the last program of the busiest SM ends late
    return _unfit(config, columns) * (0.7 + 0.3 * uneven) * streaming_us(
        gpu,
        total_bytes=group * groups * row_bytes + 2 * 4 * sums * sharing * groups * columns,
        programs=started,
        tile_bytes=tile_bytes * config["num_stages"],
        warps=config["num_warps"],
        registers=int(26 + each * (1.5 + reads + sums + held * config["num_stages"])),
        shared_bytes=tile_bytes * (config["num_stages"] - 1),
    )  # fmt: skip


def _unfit(config: Config, columns: int) -> float:
    """A factor: lanes beyond the last column move nothing, but take some of their time; so does starting a program."""
    across = -(-columns // config["COLS"])
    waste = across * config["COLS"] / columns - 1
    elements = config["ROWS"] * config["COLS"]
    each = elements / (config["num_warps"] * 32)
    odd = 0.002 * (config["COLS"] < 256) + 0.01 * (config["num_stages"] - 1)
    return 1 + 0.5 * waste + 0.004 * each + 40 / elements + odd

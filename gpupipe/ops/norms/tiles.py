"""How rows are cut and shared out: the parts of a row, the tiles that may serve, and what each should cost."""

from __future__ import annotations

from gpupipe.device.autotune import Config, Machine, streaming_us, unlike
from gpupipe.ops.layout import parts

LARGEST = 16384
"""Elements in a row; longer ones do not fit in the registers of a program."""


def forward_candidates(size: int) -> list[dict[str, int]]:
    """Rows a program and warps. Each row in as many tiles as keeps 4 to 64 elements in a thread."""
    first, second = parts(size)
    found = []
    for tile_rows in (1, 2, 4, 8, 16, 32):
        for warps in (1, 2, 4, 8, 16):
            per_thread = tile_rows * (first + second) / (warps * 32)
            if 4 <= per_thread <= 64 or (tile_rows == 1 and warps == 1):
                found.append({"ROWS": tile_rows, "FIRST": first, "SECOND": second, "num_warps": warps, "num_stages": 1})
    return found


def forward_us(gpu: Machine, config: Config, count: int, size: int, item_bytes: int, passes: int, modulations: int) -> float:
    """Estimated time of the forward kernel: ``passes`` reads and writes of the whole input, and the modulations of each row."""
    tile_rows, warps = config["ROWS"], config["num_warps"]
    per_thread = tile_rows * (config["FIRST"] + config["SECOND"]) / (warps * 32)
    reads = (passes + 1) // 2
    return streaming_us(
        gpu,
        total_bytes=count * size * item_bytes * passes,
        programs=-(-count // tile_rows),
        tile_bytes=tile_rows * size * item_bytes * reads,
        warps=warps,
        registers=int(28 + per_thread * (1.5 + reads + modulations)),
    )


def backward_candidates(gpu: Machine, size: int, group: int, groups: int) -> list[dict[str, int]]:
    """Rows a step, programs a group, warps, and how many steps are loaded ahead."""
    first, second = parts(size)
    found = []
    for tile_rows in (1, 2, 4, 8, 16):
        for warps in (1, 2, 4, 8, 16):
            per_thread = tile_rows * (first + second) / (warps * 32)
            if not (4 <= per_thread <= 32 or (tile_rows == 1 and warps == 16)):
                continue
            for per_sm in (1, 2, 4, 8):
                if warps * per_sm > gpu.warps:
                    continue
                config = {"ROWS": tile_rows, "FIRST": first, "SECOND": second, "PER_SM": per_sm, "num_warps": warps}
                found += [{**config, "num_stages": stages} for stages in (1, 2)]
    return unlike(found, lambda config: programs(gpu, config, group, groups))


def programs(gpu: Machine, config: Config, group: int, groups: int) -> int:
    """How many share the rows of a group: as many as the GPU is to hold, but no more than there are tiles."""
    return max(1, min(-(-group // config["ROWS"]), gpu.sms * config["PER_SM"] // groups))


def backward_us(
    gpu: Machine, config: Config, group: int, groups: int, size: int, item_bytes: int, passes: int, sums: int
) -> float:
    """Estimated time of the backward kernel: ``passes`` over the input, and the partial sums written and read."""
    tile_rows, warps, sharing = config["ROWS"], config["num_warps"], programs(gpu, config, group, groups)
    per_thread = tile_rows * (config["FIRST"] + config["SECOND"]) / (warps * 32)
    reads = (passes + 1) // 2
    ahead = config["num_stages"]
    return streaming_us(
        gpu,
        total_bytes=group * groups * size * item_bytes * passes + 2 * 4 * sums * sharing * groups * size,
        programs=sharing * groups,
        tile_bytes=tile_rows * size * item_bytes * reads * ahead,
        warps=warps,
        registers=int(40 + per_thread * (sums + 2 + reads)),
        shared_bytes=int(tile_rows * size * item_bytes * reads * (ahead - 1)),
    )

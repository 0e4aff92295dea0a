"""How rows are cut and shared out: the parts of a row, the tiles that may serve, and what each should cost."""

from __future__ import annotations

from gpupipe.device.autotune import Config, Machine, issue_us, overlapped_us, resident, streaming_us, unlike
from gpupipe.ops.layout import equal_parts

LARGEST = 16384
"""Elements in a row; longer ones do not fit in the registers of a program."""


def forward_candidates(size: int) -> list[dict[str, int]]:
    """Rows a program and warps. Each row in as many tiles as keeps 4 to 64 elements in a thread."""
    parts, width = equal_parts(size)
    found = []
    for tile_rows in (1, 2, 4, 8, 16, 32):
        for warps in (1, 2, 4, 8, 16):
            per_thread = tile_rows * parts * width / (warps * 32)
            if 4 <= per_thread <= 64 or (tile_rows == 1 and warps == 1):
                found.append({"ROWS": tile_rows, "PARTS": parts, "WIDTH": width, "num_warps": warps, "num_stages": 1})
    return found


def forward_us(gpu: Machine, config: Config, count: int, size: int, item_bytes: int, passes: int, modulations: int) -> float:
    """Estimated time of the forward kernel: ``passes`` reads and writes of the whole input, and the modulations of each row."""
    tile_rows, warps = config["ROWS"], config["num_warps"]
    per_thread = tile_rows * config["PARTS"] * config["WIDTH"] / (warps * 32)
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
    parts, width = equal_parts(size)
    found = []
    for tile_rows in (1, 2, 4, 8, 16):
        for warps in (1, 2, 4, 8, 16):
            per_thread = tile_rows * parts * width / (warps * 32)
            if not (4 <= per_thread <= 32 or (tile_rows == 1 and warps == 16)):
                continue
            for per_sm in (1, 2, 3, 4, 8):
                if warps * per_sm > gpu.warps:
                    continue
                config = {"ROWS": tile_rows, "PARTS": parts, "WIDTH": width, "PER_SM": per_sm, "num_warps": warps}
                found += [{**config, "num_stages": stages} for stages in (1, 2, 3)]
    return unlike(found, lambda config: programs(gpu, config, group, groups))


def programs(gpu: Machine, config: Config, group: int, groups: int) -> int:
    """How many share the rows of a group: as many as the GPU is to hold, but no more than there are tiles."""
    return max(1, min(-(-group // config["ROWS"]), gpu.sms * config["PER_SM"] // groups))


def backward_us(
    gpu: Machine, config: Config, group: int, groups: int, size: int, item_bytes: int, passes: int, sums: int
) -> float:
    """Estimated time of the backward kernel: ``passes`` over the input, and the partial sums written and read."""
    tile_rows, warps, sharing = config["ROWS"], config["num_warps"], programs(gpu, config, group, groups)
    per_thread = tile_rows * config["PARTS"] * config["WIDTH"] / (warps * 32)
    reads = (passes + 1) // 2
    ahead = config["num_stages"]
    registers = int(20 + per_thread * (sums + 3 + reads))
    shared_bytes = int(tile_rows * size * item_bytes * reads * (ahead - 1))
    streaming = streaming_us(
        gpu,
        total_bytes=group * groups * size * item_bytes * passes + 2 * 4 * sums * sharing * groups * size,
        programs=sharing * groups,
        tile_bytes=tile_rows * size * item_bytes * reads * ahead,
        warps=warps,
        registers=registers,
        shared_bytes=shared_bytes,
    )
    steps = groups * sharing * -(-group // (sharing * tile_rows))
    held = resident(gpu, warps, registers, shared_bytes)
    issuing = issue_us(
        gpu,
        instructions=steps * warps * (90 + per_thread * (15 + 5 * (passes - 3))),
        warps=warps * min(config["PER_SM"], held),
    )
    narrow = tile_rows * config["WIDTH"] * item_bytes < 8 * 32 * warps
    alone = min(config["PER_SM"], held) == 1  # nobody works while a program waits for its own warps
    unlikely = (1.15 if narrow else 1.0) * (1.05 if config["PER_SM"] > held else 1.0) * (1.2 if alone else 1.0)
    return overlapped_us(streaming, issuing) * unlikely * {1: 1.3, 2: 1.05}.get(ahead, 1.0)

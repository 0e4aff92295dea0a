"""Launches of group norm at the benchmark's shapes, for compiling without a GPU: (name, kernel, arguments, options)."""

from __future__ import annotations

from typing import Any

import torch

from gpupipe.device.autotune import machine
from gpupipe.ops.group_norm import backward, forward
from gpupipe.ops.planes import chunks, map_candidates, map_us, sum_candidates, sum_us, tile_of

SHAPES = (("C128", 128, 16 * 128 * 128), ("C256", 256, 16 * 64 * 64), ("C512", 512, 8 * 32 * 32), ("C320", 320, 16 * 40 * 64))
GROUPS = 32


def launches(*, best: int = 1, act: str = "silu") -> list[tuple[str, Any, dict[str, Any], dict[str, int]]]:
    """Of each kernel the ``best`` candidates that the model ranks highest, in both memory orders."""
    gpu = machine(torch.device("cpu"))
    narrow, wide = torch.empty(1, dtype=torch.bfloat16), torch.empty(1)
    found = []
    for name, channels, size in SHAPES:
        each = channels // GROUPS
        for last in (True, False):
            common = {
                "x_ptr": narrow, "dy_ptr": narrow, "y_ptr": narrow, "dx_ptr": narrow, "weight_ptr": narrow, "bias_ptr": narrow,
                "partial_ptr": wide, "mean_ptr": wide, "rstd_ptr": wide, "dweight_ptr": narrow, "dbias_ptr": narrow,
                "channel_ptr": wide, "size": size, "eps": 1e-5, "C": channels, "EACH": each,
                "EACH_PADDED": 1 << (each - 1).bit_length(), "ACT": act, "ROUND": False, "LAST": last, "TILE": 64,
            }  # fmt: skip
            common["AT_ONCE"] = forward.FINISH // common["EACH_PADDED"]
            for tensor in ("x", "dy", "y", "dx"):
                common |= {f"{tensor}_batch": size * channels, f"{tensor}_channel": 1 if last else size}
                common |= {f"{tensor}_position": channels if last else 1}

            def add(kernel: Any, config: dict[str, int], **more: int) -> None:
                args = {**common, **config, **more, "blocks": -(-channels // config.get("CHANNELS", 1))}  # noqa: B023
                what = f"{kernel.__name__}-{name}-{'last' if last else 'first'}-{config}"  # noqa: B023
                found.append((what, kernel, {k: args[k] for k in kernel.arg_names}, {"num_warps": config["num_warps"]}))

            for kernel, reads, unrolls in (
                (forward.group_norm_stats, 1, (2, 4, 8)), (backward.group_norm_sums, 2, (1, 2, 4)),
            ):  # fmt: skip
                ranked = sorted(
                    sum_candidates(channels, size, 2, last, unrolls=unrolls),
                    key=lambda c: sum_us(gpu, c, 1, channels, size, 2, each, reads=reads, writes=0, sums=2),
                )
                for config in ranked[:best]:
                    add(kernel, tile_of(config), chunks=chunks(gpu, config, 1, channels, size, each))
            for kernel, passes in ((forward.group_norm_apply, 2), (backward.group_norm_dx, 3)):
                ranked = sorted(
                    map_candidates(channels, size, 2, last),
                    key=lambda c: map_us(gpu, c, 1, channels, size, 2, passes),
                )
                for config in ranked[:best]:
                    add(kernel, config, tiles=-(-size // config["POSITIONS"]))
            add(forward.group_norm_finish, {"num_warps": 4}, chunks=528)
            add(backward.group_norm_finish_sums, {"num_warps": 4}, chunks=528)
    return found

"""The engines of a loader: how many threads and processes decode, by what the device and the machine have."""

from __future__ import annotations

import torch

from gpupipe.config import DecodeConfig, LoaderConfig
from gpupipe.data.decode.engine import DecodeEngine, Fallbacks
from gpupipe.data.decode.process import DecodeProcess
from gpupipe.data.ranks import local_ranks
from gpupipe.device.inventory import cpu_quota, load, nvdec_caps
from gpupipe.device.numa import cores_near
from gpupipe.errors import DeviceError
from gpupipe.telemetry import Telemetry

_NICE = 10
"""How much lower the priority of processes that decode beside NVDEC is: its threads and the user's loop win the cores."""


def index_workers(device: torch.device) -> int:
    """Processes that index ahead: half the cores beside NVDEC; none on the CPU, where decoding has use for every core."""
    return 0 if device.type == "cpu" else max(1, min(8, cpu_quota() // 2))


def cores_of(config: LoaderConfig, device: torch.device) -> frozenset[int] | None:
    """The cores of this device's threads; None: any."""
    if device.type != "cuda" or not config.decode.numa:
        return None
    return cores_near(device.index or 0, local_ranks(device))


def _hardware_threads(decode: DecodeConfig, device: torch.device, telemetry: Telemetry) -> int:
    """Threads that keep this device's NVDEC engines busy, through PyNvVideoCodec or DALI; 0 where software decodes.

    Raises:
        DeviceError: when ``decode.decoder`` cannot be had here.
    """
    if device.type != "cuda":
        if decode.decoder in ("nvdec", "dali"):
            message = f"decoder={decode.decoder!r} needs a CUDA device, this loader is on the CPU"
            raise DeviceError(message, fix="use device='cuda'")
        return 0
    load("cupy")
    caps = nvdec_caps(device.index or 0, "h264", "4:2:0", 8)
    if decode.decoder == "dali":
        load("nvidia.dali")
    elif not caps.supported:
        if decode.decoder == "nvdec":
            raise DeviceError(f"decoder='nvdec' cannot be had: {caps.reason}", fix="see `gpupipe doctor`")
        telemetry.warn_once("no nvdec", f"videos are decoded on the CPU: {caps.reason}")
        return 0
    return 0 if decode.decoder == "cpu" else caps.engines + max(1, caps.engines // 2)


def engines_of(
    config: LoaderConfig, device: torch.device, telemetry: Telemetry
) -> tuple[list[DecodeEngine], list[DecodeEngine]]:
    """The engines, one a thread, and those that decode in software beside NVDEC.

    On the CPU one for each core. On CUDA half again as many as NVDEC has, so that while one thread waits for its last frames,
    or has none yet, another keeps the hardware busy. ``cpu_workers="auto"`` goes by this rank's share of the cores. Beside
    NVDEC it leaves half a core to each of these threads, and a quarter of all to the user: where a cgroup bounds the cores, one
    process too many holds up all threads.
    """
    decode = config.decode
    hardware = _hardware_threads(decode, device, telemetry)
    fallbacks = Fallbacks()

    def engines(count: int, *, processes: bool = False, nice: int = 0) -> list[DecodeEngine]:
        return [
            DecodeEngine(
                device,
                mode=decode.decoder,
                keep=decode.decoders_per_thread,
                fallbacks=fallbacks,
                telemetry=telemetry,
                process=DecodeProcess(nice) if processes else None,
                damaged=decode.damaged,
            )
            for _ in range(count)
        ]

    cores = cpu_quota()
    if decode.cpu_workers == "auto":
        workers = max(1, cores * 3 // (4 * local_ranks(device)))
    else:
        workers = decode.cpu_workers
    if not hardware:
        return engines(workers or decode.threads or cores, processes=workers > 0), []
    threads = decode.threads or hardware
    if decode.cpu_workers == "auto":
        workers = max(1, workers - (threads + 1) // 2)
    beside = 0 if decode.decoder in ("nvdec", "dali") else workers or max(1, min(4, cores // 4))
    return engines(threads), engines(beside, processes=True, nice=_NICE)

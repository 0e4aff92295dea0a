"""What this machine has. Absence is a value with a reason, never an exception at import."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gpupipe.device import driver
from gpupipe.errors import DeviceError

if TYPE_CHECKING:
    import torch

GPU_PACKAGES = "pip install '.[cuda13]' in a checkout of gpupipe ('.[cuda12]' for a CUDA 12 driver)"
"""How to get CuPy, PyNvVideoCodec and DALI."""
OBSERVE_PACKAGES = "pip install '.[observe]' in a checkout of gpupipe"
"""How to get what a monitor's sinks need."""
_FIXES = {
    "cupy": GPU_PACKAGES,
    "PyNvVideoCodec": f"{GPU_PACKAGES}; in containers set NVIDIA_DRIVER_CAPABILITIES=compute,utility,video",
    "nvidia.dali": GPU_PACKAGES,
    "pyarrow.parquet": "pip install pyarrow (gpupipe's extra 'parquet')",
    "tensorboard": f"pip install tensorboard, or {OBSERVE_PACKAGES}",
    "transformers.trainer": "pip install transformers accelerate",
    "torchtitan.components.dataloader": "pip install torchtitan",
    "ray.train.torch": "pip install 'ray[train,data]'",
    "prometheus_client": f"pip install prometheus-client, or {OBSERVE_PACKAGES}",
}


@dataclass(frozen=True, slots=True)
class Package:
    """An optional package: its version, or the reason why it cannot be used."""

    name: str
    version: str | None
    reason: str | None

    @property
    def present(self) -> bool:
        return self.reason is None


@dataclass(frozen=True, slots=True)
class GpuInfo:
    """One CUDA device as torch numbers it, so ``CUDA_VISIBLE_DEVICES`` is respected."""

    index: int
    name: str
    memory_bytes: int
    capability: tuple[int, int]
    driver: str


@dataclass(frozen=True, slots=True)
class DecoderCaps:
    """What NVDEC does with one codec, chroma format and bit depth; sizes are in pixels."""

    supported: bool
    engines: int
    min_width: int
    min_height: int
    max_width: int
    max_height: int
    reason: str | None


@functools.cache
def _import(name: str) -> tuple[ModuleType | None, str | None]:
    noisy = logging.getLogger(name)
    level = noisy.level
    noisy.setLevel(logging.CRITICAL)  # PyNvVideoCodec logs its own account of a failed import
    try:
        return importlib.import_module(name), None
    except (ImportError, RuntimeError, OSError) as error:
        return None, f"{type(error).__name__}: {str(error).strip() or 'no message'}"
    finally:
        noisy.setLevel(level)


@functools.cache
def package(name: str) -> Package:
    """Looks once for an importable package and keeps what was found."""
    module, reason = _import(name)
    return Package(name, None if module is None else _version(name, module), reason)


def _version(name: str, module: ModuleType) -> str:
    version = getattr(module, "__version__", None)
    if version is None:
        top = name.split(".")[0]
        homes = importlib.metadata.packages_distributions().get(top, [top])
        try:
            version = importlib.metadata.version(homes[0])
        except importlib.metadata.PackageNotFoundError:
            version = "unknown"
    return str(version)


def load(name: str) -> ModuleType:
    """The module of an optional package.

    Raises:
        DeviceError: when it cannot be imported, with the reason and what to install.
    """
    module, reason = _import(name)
    if module is None:
        raise DeviceError(f"{name} cannot be used: {reason}", fix=_FIXES.get(name, f"pip install {name}"))
    return module


def cuda_reason() -> str | None:
    """None when torch can use a CUDA device, else why not."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    if not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = f" (CUDA_VISIBLE_DEVICES={visible!r})" if visible is not None else ""
        return f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no usable NVIDIA GPU or driver{hidden}"
    return None


@functools.cache
def gpus() -> list[GpuInfo]:
    """The CUDA devices that torch sees; empty without CUDA."""
    import torch

    if cuda_reason() is not None:
        return []
    driver = driver_version() or "unknown"
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        found.append(GpuInfo(index, properties.name, properties.total_memory, capability, driver))
    return found


@functools.cache
def driver_version() -> str | None:
    """The NVIDIA driver's version as NVML tells it, None without one."""
    module, _ = _import("pynvml")
    if module is None:
        return None
    try:
        module.nvmlInit()
        version = module.nvmlSystemGetDriverVersion()
    except module.NVMLError:
        return None
    return version.decode() if isinstance(version, bytes) else str(version)


def resolve_device(device: str) -> torch.device:
    """Turns ``auto``, ``cpu``, ``cuda`` or ``cuda:N`` into a device that exists; ``cuda`` is torch's current one.

    Raises:
        DeviceError: when it is not there, with what is.
    """
    import torch

    if device in ("cpu", "cpu:0") or (device == "auto" and cuda_reason() is not None):
        return torch.device("cpu")
    match = re.fullmatch(r"auto|cuda(?::(\d+))?", device)
    if match is None:
        raise DeviceError(f"device={device!r} is not a device", fix="use 'auto', 'cpu', 'cuda' or 'cuda:N'")
    reason = cuda_reason()
    if reason is not None:
        raise DeviceError(f"device={device!r} is not there: {reason}", fix="use device='cpu', or see `gpupipe doctor`")
    index = int(match[1]) if match[1] else torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        names = ", ".join(f"cuda:{gpu.index} ({gpu.name})" for gpu in gpus())
        raise DeviceError(f"device={device!r} is not there; this process sees {names}", fix="use one of those")
    return torch.device("cuda", index)


def cpu_quota() -> int:
    """Cores that this process may use, at least 1: its CPU affinity, bounded by a cgroup's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(cores, _cgroup_cores())))


def _cgroup_cores() -> float:
    def read(path: str) -> list[str]:
        try:
            return Path(path).read_text().split()
        except OSError:
            return []

    quota = read("/sys/fs/cgroup/cpu.max")  # cgroup v2: "max 100000" or "250000 100000"
    if not quota:
        quota = read("/sys/fs/cgroup/cpu/cpu.cfs_quota_us") + read("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
    if len(quota) != 2 or quota[0] in ("max", "-1"):
        return math.inf
    return int(quota[0]) / int(quota[1])


_CODECS = {
    "h264": "H264", "hevc": "HEVC", "vp8": "VP8", "vp9": "VP9", "av1": "AV1",
    "mpeg1video": "MPEG1", "mpeg2video": "MPEG2", "mpeg4": "MPEG4", "vc1": "VC1",
}  # fmt: skip


def nvdec_codec(codec: str) -> Any | None:
    """PyNvVideoCodec's number for FFmpeg's codec name; None where NVDEC has no such codec."""
    name = _CODECS.get(codec)
    return None if name is None else getattr(load("PyNvVideoCodec").cudaVideoCodec, name, None)


class _Unanswered(Exception):
    """The driver gave no answer, as where memory is short; another time it may."""


def nvdec_caps(gpu: int, codec: str, chroma: str, bits: int) -> DecoderCaps:
    """What NVDEC of this GPU does with ``codec`` (FFmpeg's name), ``chroma`` ("4:2:0" …) and ``bits`` a sample."""
    try:
        return _nvdec_caps(gpu, codec, chroma, bits)
    except _Unanswered as error:
        return _no_caps(str(error))


def _no_caps(reason: str) -> DecoderCaps:
    return DecoderCaps(False, 0, 0, 0, 0, 0, reason)


@functools.cache
def _nvdec_caps(gpu: int, codec: str, chroma: str, bits: int) -> DecoderCaps:
    why_not = cuda_reason()
    if why_not is not None:
        return _no_caps(why_not)
    found = package("PyNvVideoCodec")
    if not found.present:
        return _no_caps(f"PyNvVideoCodec cannot be used: {found.reason}")
    number = nvdec_codec(codec)
    chroma_number = {"4:0:0": 0, "4:2:0": 1, "4:2:2": 2, "4:4:4": 3}.get(chroma)
    if number is None or chroma_number is None:
        return _no_caps(f"NVDEC has no {codec} {chroma}")
    try:
        caps = driver.decode_caps(gpu, int(number), chroma_number, bits)
    except (RuntimeError, OSError) as error:
        raise _Unanswered(f"the driver's answer for {codec} {chroma} {bits} bit: {error}") from error
    if not caps.supported:
        return _no_caps(f"this GPU's NVDEC does not decode {codec} {chroma} {bits} bit")
    sizes = (caps.least_width, caps.least_height, caps.most_width, caps.most_height)
    return DecoderCaps(True, max(1, caps.engines), *sizes, None)

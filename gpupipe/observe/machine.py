"""What a measurement ran on, and what its process uses while it runs: NVML, psutil and torch's own counters."""

from __future__ import annotations

import os
import platform
import threading
import time
from dataclasses import asdict, dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def machine_facts() -> dict[str, Any]:
    """The ``machine`` block of a result file: GPU, driver, cores that may be used, versions; ``None`` for what is absent."""
    from gpupipe import __version__
    from gpupipe.device import inventory

    found = inventory.gpus()
    versions = {key: inventory.package(name).version for key, name in (
        ("torch", "torch"), ("cupy", "cupy"), ("triton", "triton"), ("pynvvideocodec", "PyNvVideoCodec"), ("av", "av"),
    )}  # fmt: skip
    return {
        "gpu": found[0].name if found else None,
        "driver": inventory.driver_version(),
        "cpu": _cpu_name(),
        "cpu_cores": inventory.cpu_quota(),
        **versions,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "gpupipe": __version__,
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


@dataclass(frozen=True)
class ResourceSample:
    """One look at the process and its GPU. Shares are percent as NVML gives them; None where it does not."""

    seconds: float
    """Since the sampler started."""
    cpu_cores: float
    """Cores kept busy since the last sample by this process, its threads and its children."""
    host_bytes: int
    """Resident memory of this process and its children. Pages that they share count in each."""
    gpu_percent: float | None = None
    nvdec_percent: float | None = None
    device_bytes: int | None = None
    """Device memory in use on the GPU, by this and any other process."""


@dataclass(frozen=True)
class ResourceUse:
    """Means and peaks over a stretch of time. None where there is no GPU or NVML does not say."""

    cpu_cores_mean: float = 0.0
    cpu_cores_max: float = 0.0
    peak_host_bytes: int = 0
    gpu_percent_mean: float | None = None
    nvdec_percent_mean: float | None = None
    nvdec_percent_max: float | None = None
    peak_device_bytes: int | None = None
    """Peak of the GPU's memory in use, by this and any other process."""
    peak_torch_bytes: int | None = None
    """Peak of what torch's allocator handed out in this process."""
    samples: tuple[ResourceSample, ...] = field(default=(), repr=False)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class ResourceSampler:
    """A thread that looks at process and GPU every ``interval`` seconds; use it as a context manager.

    Args:
        device: a CUDA device adds what NVML says of that GPU; the CPU or None leaves those fields None.
        interval: seconds between samples. NVML itself averages engine use over up to one second.
    """

    def __init__(self, device: torch.device | None = None, interval: float = 0.2) -> None:
        import psutil

        self._interval = interval
        self._device = device if device is not None and device.type == "cuda" else None
        self._gpu = _GpuCounters.open(self._device) if self._device is not None else None
        self._process = psutil.Process(os.getpid())
        self._samples: list[ResourceSample] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpupipe-resource-sampler", daemon=True)
        self._start = 0.0
        self._last = (0.0, 0.0)
        self._began = (0.0, 0.0)

    def __enter__(self) -> ResourceSampler:
        if self._device is not None:
            import torch

            torch.cuda.reset_peak_memory_stats(self._device)
        self._start = time.perf_counter()
        self._began = self._last = (self._start, self._usage()[0])
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()  # so that even the shortest stretch has one

    def result(self) -> ResourceUse:
        """Means and peaks from entering to leaving; call it after leaving."""
        samples = tuple(self._samples)
        seconds, cpu = self._last[0] - self._began[0], self._last[1] - self._began[1]
        gpu = [s.gpu_percent for s in samples if s.gpu_percent is not None]
        nvdec = [s.nvdec_percent for s in samples if s.nvdec_percent is not None]
        peak_torch = None
        if self._device is not None:
            import torch

            peak_torch = torch.cuda.max_memory_allocated(self._device)
        return ResourceUse(
            cpu_cores_mean=cpu / seconds if seconds > 0 else 0.0,
            cpu_cores_max=max((s.cpu_cores for s in samples), default=0.0),
            peak_host_bytes=max((s.host_bytes for s in samples), default=0),
            gpu_percent_mean=sum(gpu) / len(gpu) if gpu else None,
            nvdec_percent_mean=sum(nvdec) / len(nvdec) if nvdec else None,
            nvdec_percent_max=max(nvdec, default=None),
            peak_device_bytes=max((s.device_bytes for s in samples if s.device_bytes is not None), default=None),
            peak_torch_bytes=peak_torch,
            samples=samples,
        )

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self._sample()

    def _sample(self) -> None:
        now = time.perf_counter()
        cpu, resident = self._usage()
        before, spent = self._last
        # A child that ends takes its time with it, so the sum can fall; and two looks can be too close to divide by.
        cores = max(0.0, cpu - spent) / (now - before) if now - before > 0.01 else 0.0
        self._last = (now, max(cpu, spent))
        gpu = self._gpu.read() if self._gpu is not None else (None, None, None)
        self._samples.append(ResourceSample(now - self._start, cores, resident, *gpu))

    def _usage(self) -> tuple[float, int]:
        """CPU seconds and resident bytes of this process and its living children."""
        import psutil

        seconds, resident = 0.0, 0
        for process in (self._process, *self._process.children(recursive=True)):
            try:
                times, memory = process.cpu_times(), process.memory_info()
            except psutil.Error:  # it ended between the two calls
                continue
            seconds += times.user + times.system
            resident += memory.rss
        return seconds, resident


def open_nvml(device: torch.device) -> tuple[ModuleType, Any] | None:
    """NVML and its handle of one GPU or MIG partition; None where there is no NVML or it does not know the GPU."""
    import torch

    from gpupipe.device import inventory

    if not inventory.package("pynvml").present:
        return None
    nvml = inventory.load("pynvml")
    try:
        nvml.nvmlInit()
        # By UUID: torch counts the GPUs that CUDA_VISIBLE_DEVICES leaves, NVML counts all.
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        uuid = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        return nvml, nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError:
        return None


class _GpuCounters:
    """NVML's view of one GPU. A counter that this GPU, driver or partition does not have reads None."""

    def __init__(self, nvml: ModuleType, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle

    @classmethod
    def open(cls, device: torch.device) -> _GpuCounters | None:
        opened = open_nvml(device)
        return None if opened is None else cls(*opened)

    def read(self) -> tuple[float | None, float | None, int | None]:
        """(GPU use in percent, NVDEC use in percent, bytes in use)."""

        def ask(question: Any) -> Any:
            try:
                return question(self._handle)
            except self._nvml.NVMLError:
                return None

        use = ask(self._nvml.nvmlDeviceGetUtilizationRates)
        decoder = ask(self._nvml.nvmlDeviceGetDecoderUtilization)
        memory = ask(self._nvml.nvmlDeviceGetMemoryInfo)
        return (
            float(use.gpu) if use is not None else None,
            float(decoder[0]) if decoder is not None else None,
            int(memory.used) if memory is not None else None,
        )


class BusCounters:
    """PCIe throughput of one GPU, as NVML measures it. One reading takes about 40 ms, which the driver measures for."""

    def __init__(self, nvml: ModuleType, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle

    @classmethod
    def open(cls, device: torch.device) -> BusCounters | None:
        """None for the CPU, and where there is no NVML."""
        opened = open_nvml(device) if device.type == "cuda" else None
        return None if opened is None else cls(*opened)

    def read(self) -> tuple[float | None, float | None]:
        """Bytes a second (from the GPU, to the GPU), of all processes together; None where this GPU does not tell."""

        def ask(counter: int) -> float | None:
            try:
                return 1024.0 * float(self._nvml.nvmlDeviceGetPcieThroughput(self._handle, counter))  # it counts KiB
            except self._nvml.NVMLError:
                return None

        return ask(self._nvml.NVML_PCIE_UTIL_TX_BYTES), ask(self._nvml.NVML_PCIE_UTIL_RX_BYTES)

"""What this machine has for gpupipe, tried out rather than looked up, and what to do about what it lacks. Never raises."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gpupipe.device import inventory
from gpupipe.errors import GpupipeError
from gpupipe.observe.support import Support, software_decoder, support_matrix

if TYPE_CHECKING:
    import torch

State = Literal["ok", "warn", "missing", "not needed"]

_GPU_PARTS = (
    "NVIDIA driver", "GPUs", "CuPy", "kernel trial compile", "PyNvVideoCodec", "NVDEC trial decode", "DALI",
    "DALI trial decode",
)  # fmt: skip
"""What a machine without an NVIDIA driver does without."""
_TRIAL_FRAMES = 32
_TRIAL_SIZE = 256
"""Side of the trial clip in pixels: above NVDEC's minimum for H.264."""


@dataclass(frozen=True)
class Check:
    """One finding: what was looked at, how it stands, what was found and what the user can do about it."""

    name: str
    state: State
    detail: str
    fix: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All findings.

    Attributes:
        ok: True when videos can be loaded on this machine, if only on the CPU.
        device: what ``device="auto"`` is here.
        decoder: the decoder that ``auto`` takes for ordinary H.264 video, and ``decoder_reason`` why.
    """

    ok: bool
    device: str
    decoder: str
    decoder_reason: str
    checks: list[Check] = field(default_factory=list)
    support: list[Support] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def diagnose() -> Diagnosis:
    """Looks at everything that gpupipe uses and tries the parts that can be tried. Takes a few seconds with a GPU."""
    from gpupipe.observe.machine import machine_facts

    checks = [_guarded(name, look) for name, look in _CHECKS]
    if inventory.driver_version() is None:
        unneeded = {check.name for check in checks if check.state == "missing" and check.name in _GPU_PARTS}
        checks = [replace(check, state="not needed") if check.name in unneeded else check for check in checks]
    support: list[Support] = []
    machine: dict[str, Any] = {}
    device, decoder, reason = "cpu", "none", "see the checks"
    try:
        machine = machine_facts()
        found = inventory.resolve_device("auto")
        device = str(found)
        support = support_matrix(found)
        ordinary = next(row for row in support if (row.codec, row.chroma, row.bits) == ("h264", "4:2:0", 8))
        decoder = ordinary.decoder
        reason = ordinary.reason or f"NVDEC of {found} decodes it to the same bits as software"
    except Exception as error:
        checks.append(Check("support matrix", "missing", _one_line(error)))
    cpu_works = all(check.state == "ok" for check in checks if check.name in ("torch", "CPU trial decode"))
    return Diagnosis(cpu_works, device, decoder, reason, checks, support, machine)


def _guarded(name: str, look: Callable[[], Check]) -> Check:
    try:
        return look()
    except GpupipeError as error:
        return Check(name, "missing", error.message, error.fix or "")
    except Exception as error:  # whatever a broken installation throws is a finding
        return Check(name, "missing", _one_line(error))


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _python() -> Check:
    version = platform.python_version()
    if sys.version_info < (3, 11):  # noqa: UP036 - an installation forced past requires-python
        return Check("Python", "missing", version, "use Python 3.11 or newer")
    return Check("Python", "ok", f"{version}, {platform.system()} {platform.machine()}")


def _torch() -> Check:
    import torch

    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    detail = f"{torch.__version__}, built {'for ' if torch.version.cuda else ''}{built}"
    if torch.version.cuda is None and inventory.driver_version() is not None:
        return Check("torch", "ok", f"{detail}, but this machine has an NVIDIA driver",
                     "install a CUDA build of torch to use the GPU: PyTorch's installation page names the command")  # fmt: skip
    return Check("torch", "ok", detail)


def _driver() -> Check:
    version = inventory.driver_version()
    if version is None:
        return Check("NVIDIA driver", "missing", "NVML finds no NVIDIA driver",
                     "not needed on the CPU; else install the driver, or start the container with --gpus all")  # fmt: skip
    return Check("NVIDIA driver", "ok", version)


def _gpus() -> Check:
    found = inventory.gpus()
    if not found:
        return Check("GPUs", "missing", inventory.cuda_reason() or "torch lists no device", "videos load on the CPU")
    names = (f"cuda:{g.index} {g.name}, {g.memory_bytes / 2**30:.0f} GiB, sm_{g.capability[0]}{g.capability[1]}" for g in found)
    return Check("GPUs", "ok", "; ".join(names))


def _optional(name: str, label: str, fix: str) -> Check:
    found = inventory.package(name)
    if found.present:
        return Check(label, "ok", found.version or "version unknown")
    return Check(label, "missing", found.reason or "not importable", fix)


def _cupy() -> Check:
    return _optional("cupy", "CuPy", f"{inventory.GPU_PACKAGES}; not needed on the CPU")


def _nvrtc() -> Check:
    name = "kernel trial compile"
    why_not = inventory.cuda_reason()
    if why_not is not None:
        return Check(name, "missing", f"not tried: {why_not}", "needed on a GPU only")
    import torch

    from gpupipe.data.transform.resize import compile_for

    compile_for(1, torch.bfloat16)
    return Check(name, "ok", "NVRTC compiled the clip transform")


def _nvcodec() -> Check:
    found = inventory.package("PyNvVideoCodec")
    if found.present:
        return Check("PyNvVideoCodec", "ok", found.version or "version unknown")
    reason = found.reason or "not importable"
    if inventory.driver_version() is None and not reason.startswith(("ModuleNotFoundError", "ImportError: No module")):
        fix = "it needs an NVIDIA driver; without one videos are decoded on the CPU"
    elif any(library in reason for library in ("libnvcuvid", "libnvidia-encode")) or reason.startswith("RuntimeError"):
        fix = ("the driver's video libraries (libnvcuvid, libnvidia-encode) are not here: start the container with --gpus "
               "all and NVIDIA_DRIVER_CAPABILITIES=compute,utility,video; outside of one install the driver's decode and "
               "encode packages")  # fmt: skip
    else:
        fix = f"{inventory.GPU_PACKAGES}; not needed on the CPU"
    return Check("PyNvVideoCodec", "missing", reason, fix)


def _ffmpeg() -> Check:
    import av

    version = ".".join(str(part) for part in av.library_versions["libavcodec"])
    wanted = ("h264", "hevc", "vp8", "vp9", "av1", "mpeg2video", "mpeg4")
    have = {codec: software_decoder(codec) for codec in wanted}
    lacking = [codec for codec, name in have.items() if name is None]
    names = ", ".join(codec if name == codec else f"{codec} ({name})" for codec, name in have.items() if name)
    detail = f"PyAV {av.__version__}, libavcodec {version}; decodes {names}"
    if lacking:
        return Check("FFmpeg", "warn", f"{detail}; not {', '.join(lacking)}", "pip install av (its wheels have them all)")
    return Check("FFmpeg", "ok", detail)


def _av1() -> Check:
    name = software_decoder("av1")
    if name is None:
        return Check("AV1 in software", "warn", "this FFmpeg has no libdav1d", "pip install av (its wheels bring it)")
    return Check("AV1 in software", "ok", name)


def _cpu_decode() -> Check:
    codec, frames = _trial("cpu", "cpu")
    return Check("CPU trial decode", "ok", f"{len(frames)} frames of {codec} in software")


def _nvdec_decode() -> Check:
    return _hardware_decode("NVDEC", "nvdec", "PyNvVideoCodec", "videos are decoded on the CPU")


def _dali_decode() -> Check:
    return _hardware_decode("DALI", "dali", "nvidia.dali", "optional: only decoder='dali' uses it")


def _hardware_decode(label: str, decoder: Literal["nvdec", "dali"], package: str, otherwise: str) -> Check:
    """Luma of a tiny clip, through one decoder and in software."""
    name = f"{label} trial decode"
    why_not = inventory.cuda_reason()
    if why_not is None:
        needs = {package: label if decoder == "dali" else package, "cupy": "CuPy"}
        why_not = next((f"{shown} cannot be used" for it, shown in needs.items() if not inventory.package(it).present), None)
    if why_not is not None:
        return Check(name, "missing", f"not tried: {why_not}", otherwise)
    import torch

    codec, found = _trial("cuda", decoder)
    if codec != "h264":
        return Check(name, "warn", "not tried: this FFmpeg cannot make an H.264 clip", "pip install av")
    _, expected = _trial("cpu", "cpu")
    same = all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))
    if not same:
        return Check(name, "warn", f"{label}'s luma differs from the software decoder's", "report it with the driver's version")
    return Check(name, "ok", f"{len(found)} frames of h264, the same luma as software")


def _trial(device: str, decoder: Literal["cpu", "nvdec", "dali"]) -> tuple[str, list[torch.Tensor]]:
    """Makes a tiny clip, reads it through VideoReader and gives (codec, luma planes)."""
    from gpupipe.data.bytes import Identity
    from gpupipe.data.reader import VideoReader
    from gpupipe.data.scan.store import file_of

    with tempfile.TemporaryDirectory(prefix="gpupipe-doctor-") as folder:
        file = Path(folder) / "trial.mp4"
        codec = _write_trial(file)
        kept = file_of(Identity.of(str(file)))
        try:
            if codec != "h264" and decoder != "cpu":
                return codec, []
            with VideoReader(file, device=device, decoder=decoder) as reader:
                lumas = [planes.y for planes in reader.planes(range(len(reader)))]
        finally:
            with contextlib.suppress(OSError):  # there is none, or the cache cannot be written
                kept.unlink()  # nobody will ask for this file's index again
    if len(lumas) != _TRIAL_FRAMES:
        raise GpupipeError(f"{len(lumas)} of {_TRIAL_FRAMES} frames came out", fix="report it with `gpupipe doctor --json`")
    return codec, lumas


def _write_trial(file: Path) -> str:
    import av
    import numpy as np

    encoder = "libx264" if "libx264" in av.codecs_available else "mpeg4"
    ramp = np.add.outer(np.arange(_TRIAL_SIZE), np.arange(_TRIAL_SIZE))
    with av.open(str(file), "w") as container:
        stream: Any = container.add_stream(encoder, rate=25)
        stream.width = stream.height = _TRIAL_SIZE
        stream.pix_fmt = "yuv420p"
        for index in range(_TRIAL_FRAMES):
            grey = ((ramp + 8 * index) % 256).astype(np.uint8)
            frame = av.VideoFrame.from_ndarray(np.repeat(grey[..., None], 3, axis=2), format="rgb24")
            frame.pts = index
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return "h264" if encoder == "libx264" else "mpeg4"


def _dali() -> Check:
    return _optional("nvidia.dali", "DALI", f"optional: {inventory.GPU_PACKAGES}")


def _cores() -> Check:
    quota, present = inventory.cpu_quota(), os.cpu_count() or 1
    limits = "" if quota == present else f" of {present} present (affinity or cgroup quota)"
    if quota < 2:
        return Check("CPU cores", "warn", f"{quota}{limits}", "give the container more cores: decoding and training share them")
    return Check("CPU cores", "ok", f"{quota}{limits}")


def _cache() -> Check:
    from gpupipe.device.disk import cache_dir

    folder = cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Check("cache folder", "warn", f"{folder} cannot be written: {error.strerror or error}",
                     "set GPUPIPE_CACHE to a folder that can; without one every video is indexed again each run")  # fmt: skip
    return Check("cache folder", "ok", str(folder))


_CHECKS: tuple[tuple[str, Callable[[], Check]], ...] = (
    ("Python", _python),
    ("torch", _torch),
    ("NVIDIA driver", _driver),
    ("GPUs", _gpus),
    ("CuPy", _cupy),
    ("kernel trial compile", _nvrtc),
    ("PyNvVideoCodec", _nvcodec),
    ("NVDEC trial decode", _nvdec_decode),
    ("DALI", _dali),
    ("DALI trial decode", _dali_decode),
    ("FFmpeg", _ffmpeg),
    ("AV1 in software", _av1),
    ("CPU trial decode", _cpu_decode),
    ("CPU cores", _cores),
    ("cache folder", _cache),
)

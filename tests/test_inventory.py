"""What this machine has: absence is a value with a reason, and a device that is not there is named."""

from __future__ import annotations

import ctypes
import importlib
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpupipe.device import driver, inventory
from gpupipe.errors import DeviceError


@pytest.fixture(autouse=True)
def looked_anew() -> Iterator[None]:
    """Each test looks for itself, and leaves nothing that it faked behind."""
    caches = (inventory._import, inventory.package, inventory.gpus, inventory.driver_version, inventory._nvdec_caps)

    def clear() -> None:
        for cache in caches:
            cache.cache_clear()

    clear()
    yield
    clear()


@pytest.fixture
def importing(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, object], list[str]]:
    """Makes the import of a package raise an error, or give a module; returns the list of imports made."""

    def fake(name: str, outcome: object) -> list[str]:
        original, made = importlib.import_module, []

        def import_module(wanted: str, package: str | None = None) -> Any:
            if wanted != name:
                return original(wanted, package)
            made.append(wanted)
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        monkeypatch.setattr(inventory.importlib, "import_module", import_module)
        return made

    return fake


@pytest.mark.parametrize(
    "error",
    [ImportError("libnvcuvid.so.1: cannot open"), RuntimeError("no driver"), OSError("libcuda.so.1 not found"), ImportError()],
)
def test_absence_has_a_reason(error: Exception, importing: Callable[[str, object], list[str]]) -> None:
    made = importing("PyNvVideoCodec", error)
    found = inventory.package("PyNvVideoCodec")
    assert not found.present
    assert found.version is None
    assert found.reason == f"{type(error).__name__}: {error}" if str(error) else "ImportError: no message"
    with pytest.raises(DeviceError) as caught:
        inventory.load("PyNvVideoCodec")
    assert str(error) in str(caught.value)
    assert "PyNvVideoCodec cannot be used" in str(caught.value)
    assert "pip install '.[cuda13]'" in str(caught.value)
    assert "NVIDIA_DRIVER_CAPABILITIES" in str(caught.value)
    assert made == ["PyNvVideoCodec"], "it is looked for once"


def test_other_errors_are_not_hidden(importing: Callable[[str, object], list[str]]) -> None:
    importing("cupy", KeyError("a bug of ours"))
    with pytest.raises(KeyError):
        inventory.package("cupy")


def test_presence_has_a_version(importing: Callable[[str, object], list[str]]) -> None:
    module = SimpleNamespace(__version__="14.1")
    importing("cupy", module)
    assert inventory.package("cupy") == inventory.Package("cupy", "14.1", None)
    assert inventory.load("cupy") is module


def test_a_module_without_a_version_is_looked_up_by_its_distribution() -> None:
    assert inventory.package("yaml").present
    importlib.import_module("pynvml")
    assert inventory.package("pynvml").version not in (None, "unknown")


def test_an_unknown_package_names_itself_in_the_fix() -> None:
    with pytest.raises(DeviceError, match="pip install no_such_package"):
        inventory.load("no_such_package")


def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def two_gpus(monkeypatch: pytest.MonkeyPatch, current: int = 0) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    properties = SimpleNamespace(name="H200", total_memory=7, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(inventory, "driver_version", lambda: "580.1")


def test_the_cpu_is_always_there(monkeypatch: pytest.MonkeyPatch) -> None:
    no_cuda(monkeypatch)
    for name in ("cpu", str(torch.device("cpu", 0))):
        assert inventory.resolve_device(name) == torch.device("cpu")
    assert inventory.resolve_device("auto") == torch.device("cpu")
    assert inventory.gpus() == []
    two_gpus(monkeypatch)
    assert inventory.resolve_device("cpu") == torch.device("cpu"), "asked for, with a GPU beside it"


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_missing_gpu_is_named_with_the_reason(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    no_cuda(monkeypatch)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(DeviceError, match=rf"device='{device}' is not there: .*build without CUDA"):
        inventory.resolve_device(device)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    with pytest.raises(DeviceError, match=r"no usable NVIDIA GPU or driver \(CUDA_VISIBLE_DEVICES='-1'\)"):
        inventory.resolve_device(device)


def test_devices_are_resolved_as_torch_numbers_them(monkeypatch: pytest.MonkeyPatch) -> None:
    two_gpus(monkeypatch, current=1)
    assert inventory.cuda_reason() is None
    assert inventory.resolve_device("auto") == inventory.resolve_device("cuda") == torch.device("cuda", 1)
    assert inventory.resolve_device("cuda:0") == torch.device("cuda", 0)
    with pytest.raises(DeviceError, match=r"'cuda:2' is not there; this process sees cuda:0 \(H200\), cuda:1 \(H200\)"):
        inventory.resolve_device("cuda:2")
    assert [(gpu.index, gpu.capability, gpu.driver) for gpu in inventory.gpus()] == [(0, (9, 0), "580.1"), (1, (9, 0), "580.1")]


@pytest.mark.parametrize("device", ["tpu", "cuda:", "cuda:x", "cuda:-1", "CUDA", "", "gpu"])
def test_what_is_no_device_is_named(device: str) -> None:
    with pytest.raises(DeviceError, match=rf"device='{device}' is not a device"):
        inventory.resolve_device(device)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"/sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ({"/sys/fs/cgroup/cpu.max": "250000 100000\n"}, 3),
        ({"/sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ({"/sys/fs/cgroup/cpu.max": "9900000 100000\n"}, 8),
        ({"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000\n", "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, 2),
        ({"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000\n"}, 8),
    ],
)
def test_the_cores_of_a_container_are_bounded_by_its_quota(
    files: dict[str, str], cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_text(path: Path, *_: object, **__: object) -> str:
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(inventory.Path, "read_text", read_text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert inventory.cpu_quota() == cores


def test_this_machines_quota_is_sane() -> None:
    assert 1 <= inventory.cpu_quota() <= (os.cpu_count() or 1)
    assert inventory._cgroup_cores() > 0 or math.isinf(inventory._cgroup_cores())


NVC = SimpleNamespace(__version__="2.1", cudaVideoCodec=SimpleNamespace(H264=4, HEVC=8))


CAPS = {
    "supported": 1, "engines": 7, "least_width": 48, "least_height": 16, "most_width": 4096, "most_height": 4095,
}  # fmt: skip


@pytest.mark.parametrize(
    ("package", "answer", "codec", "chroma", "says"),
    [
        (NVC, CAPS, "h264", "4:2:0", None),
        (NVC, {**CAPS, "supported": 0}, "h264", "4:2:0", "this GPU's NVDEC does not decode h264 4:2:0 8 bit"),
        (NVC, CAPS, "prores", "4:2:0", "NVDEC has no prores 4:2:0"),
        (NVC, CAPS, "vp9", "4:2:0", "NVDEC has no vp9 4:2:0"),
        (NVC, CAPS, "h264", "4:1:1", "NVDEC has no h264 4:1:1"),
        (NVC, RuntimeError("CUDA_ERROR_OUT_OF_MEMORY"), "h264", "4:2:0", "CUDA_ERROR_OUT_OF_MEMORY"),
        (NVC, OSError("libnvcuvid.so.1: cannot open"), "h264", "4:2:0", "libnvcuvid.so.1: cannot open"),
        (ImportError("not installed"), CAPS, "h264", "4:2:0", "PyNvVideoCodec cannot be used: ImportError: not installed"),
    ],
)
def test_what_nvdec_can_do_is_said_with_a_reason(
    package: object,
    answer: dict[str, int] | Exception,
    codec: str,
    chroma: str,
    says: str | None,
    importing: Callable[[str, object], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two_gpus(monkeypatch)
    importing("PyNvVideoCodec", package)
    asked = []

    def decode_caps(*question: int) -> driver.DecodeCaps:
        asked.append(question)
        if isinstance(answer, Exception):
            raise answer
        return driver.DecodeCaps(**answer)

    monkeypatch.setattr(driver, "decode_caps", decode_caps)
    caps = inventory.nvdec_caps(0, codec, chroma, 8)
    assert caps.supported == (says is None)
    if says is None:
        assert caps == inventory.DecoderCaps(True, 7, 48, 16, 4096, 4095, None)
        assert asked == [(0, 4, 1, 8)]
    else:
        assert says in str(caps.reason)
        assert caps.engines == 0


def test_a_driver_that_gave_no_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory may be short just now, which must not keep a process on the CPU for life."""
    monkeypatch.setattr(inventory, "cuda_reason", lambda: None)
    monkeypatch.setattr(inventory, "package", lambda name: SimpleNamespace(present=True))
    monkeypatch.setattr(inventory, "nvdec_codec", lambda codec: 4)
    answers = [RuntimeError("CUDA_ERROR_OUT_OF_MEMORY"), driver.DecodeCaps(supported=1, engines=7)]

    def decode_caps(*_: int) -> driver.DecodeCaps:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(driver, "decode_caps", decode_caps)
    assert "OUT_OF_MEMORY" in str(inventory.nvdec_caps(0, "h264", "4:2:0", 8).reason)
    assert [inventory.nvdec_caps(0, "h264", "4:2:0", 8).engines for _ in range(2)] == [7, 7], "an answer is kept"


def test_the_drivers_answer_lies_as_cuviddec_h_says() -> None:
    """CUVIDDECODECAPS: the driver writes all 88 bytes, and reads what is asked for from the first 12."""
    places = {name: getattr(driver.DecodeCaps, name).offset for name, *_ in driver.DecodeCaps._fields_}
    assert ctypes.sizeof(driver.DecodeCaps) == 88
    assert (places["codec"], places["chroma"], places["bits_above_8"]) == (0, 4, 8)
    assert (places["supported"], places["engines"], places["output_formats"]) == (24, 25, 26)
    assert [places[f"most_{name}"] for name in ("width", "height", "macroblocks")] == [28, 32, 36]
    assert [places[f"least_{name}"] for name in ("width", "height")] == [40, 42]


def test_without_cuda_there_is_no_nvdec(monkeypatch: pytest.MonkeyPatch) -> None:
    no_cuda(monkeypatch)
    caps = inventory.nvdec_caps(0, "h264", "4:2:0", 8)
    assert (caps.supported, caps.reason) == (False, inventory.cuda_reason())

"""The doctor never raises, gives a reason for all that is absent, and says what to do about it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpupipe.cli import main
from gpupipe.device import inventory
from gpupipe.errors import DecodeError
from gpupipe.observe import doctor
from gpupipe.observe.doctor import Check, diagnose
from gpupipe.observe.support import KINDS, software_decoder


@pytest.fixture
def forget() -> Iterator[None]:
    """Lets the inventory look again, before and after the test."""
    caches = (inventory._import, inventory.package, inventory._nvdec_caps)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def plant(folder: Path, monkeypatch: pytest.MonkeyPatch, package: str, source: str) -> None:
    """Puts a package of that name first on the path."""
    (folder / f"{package}.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, package, raising=False)


def found(checks: list[Check], name: str) -> Check:
    return next(check for check in checks if check.name == name)


def test_every_finding_says_what_and_what_to_do() -> None:
    diagnosis = diagnose()
    assert diagnosis.ok
    assert {check.state for check in diagnosis.checks} <= {"ok", "warn", "missing", "not needed"}
    for check in diagnosis.checks:
        assert check.detail, check
        assert check.state == "ok" or check.fix, check
    assert "32 frames" in found(diagnosis.checks, "CPU trial decode").detail
    assert [(row.codec, row.chroma, row.bits) for row in diagnosis.support] == list(KINDS)
    for row in diagnosis.support:
        assert (row.decoder == "nvdec") == (row.reason is None), row
        assert (row.decoder == "nvdec") == (row.max_size is not None), row


def test_json_and_exit_code(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit) as left:
        main(["doctor", "--json"])
    assert not left.value.code
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    assert report["decoder"] in ("cpu", "nvdec")

    with pytest.raises(SystemExit) as left:
        main(["doctor"])
    out = capsys.readouterr().out
    assert not left.value.code
    assert "videos can be loaded          yes" in out
    assert "\x1b" not in out

    def broken(*_: object) -> None:
        raise DecodeError("no frame came out")

    monkeypatch.setattr("gpupipe.data.reader.VideoReader.planes", broken)
    with pytest.raises(SystemExit) as left:
        main(["doctor"])
    assert left.value.code == 1
    assert "no frame came out" in capsys.readouterr().out


@pytest.mark.parametrize(
    "message",
    [
        "libnvcuvid.so.1: cannot open shared object file: No such file or directory",
        "libnvidia-encode.so.1: cannot open shared object file: No such file or directory",
        "Failed to load the driver's video libraries",
    ],
)
def test_a_container_without_the_video_capability(
    message: str, forget: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(tmp_path, monkeypatch, "PyNvVideoCodec", f"raise RuntimeError({message!r})")
    monkeypatch.setattr(inventory, "driver_version", lambda: "580.65.06")
    check = found(diagnose().checks, "PyNvVideoCodec")
    assert check.state == "missing"
    assert message in check.detail
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility,video" in check.fix
    assert "--gpus all" in check.fix


def test_the_same_fault_without_any_driver(forget: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path, monkeypatch, "PyNvVideoCodec", "raise RuntimeError('libnvcuvid.so.1: cannot open shared object file')")
    monkeypatch.setattr(inventory, "driver_version", lambda: None)
    check = found(diagnose().checks, "PyNvVideoCodec")
    assert "needs an NVIDIA driver" in check.fix


@pytest.mark.parametrize(("package", "name"), [("cupy", "CuPy"), ("PyNvVideoCodec", "PyNvVideoCodec"), ("nvidia.dali", "DALI")])
def test_absent_packages_have_a_reason(
    package: str, name: str, forget: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = package.split(".")[0]
    plant(tmp_path, monkeypatch, top, f"raise ModuleNotFoundError(\"No module named '{top}'\")")
    monkeypatch.setattr(inventory, "driver_version", lambda: "580.65.06")
    check = found(diagnose().checks, name)
    assert check.state == "missing"
    assert f"No module named '{top}'" in check.detail
    assert "pip install '.[cuda13]'" in check.fix


def test_nothing_that_breaks_gets_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Check:
        raise ZeroDivisionError("a fault\nin two lines")

    monkeypatch.setattr(doctor, "_CHECKS", (("broken", broken), *doctor._CHECKS))
    monkeypatch.setattr(doctor, "support_matrix", lambda device: broken())
    diagnosis = diagnose()
    assert diagnosis.ok, "what is broken is not needed to decode on the CPU"
    assert found(diagnosis.checks, "broken") == Check("broken", "missing", "ZeroDivisionError: a fault in two lines")
    assert found(diagnosis.checks, "support matrix").state == "missing"
    assert diagnosis.support == []


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("GPUPIPE_CACHE", str(tmp_path / "file" / "cache"))
    diagnosis = diagnose()
    check = found(diagnosis.checks, "cache folder")
    assert (check.state, diagnosis.ok) == ("warn", True)
    assert "GPUPIPE_CACHE" in check.fix


def test_the_trial_leaves_nothing_in_the_cache(fresh_cache: Path) -> None:
    diagnose()
    assert not [path for path in fresh_cache.rglob("*") if path.is_file()]


def test_software_decoders_are_those_that_decode() -> None:
    assert software_decoder("h264") == "h264"
    assert software_decoder("av1") in ("libdav1d", None), "FFmpeg's own av1 decodes nothing without hardware"
    assert software_decoder("no such codec") is None


@pytest.mark.gpu
def test_a_gpu_machine_is_tried_out() -> None:
    diagnosis = diagnose()
    for name in ("NVIDIA driver", "GPUs", "CuPy", "kernel trial compile", "PyNvVideoCodec", "NVDEC trial decode"):
        assert found(diagnosis.checks, name).state == "ok", found(diagnosis.checks, name)
    assert diagnosis.decoder == "nvdec"
    assert diagnosis.device.startswith("cuda")
    plain = next(row for row in diagnosis.support if (row.codec, row.chroma, row.bits) == ("h264", "4:2:0", 8))
    assert plain.engines >= 1
    assert plain.max_size is not None
    assert plain.max_size[0] >= 4096

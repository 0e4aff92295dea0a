"""Fixtures that all tests share, and the rules that a GPU run and CI refuse to skip what they are there for."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

hypothesis.settings.register_profile("gpupipe", deadline=None)  # a busy machine is no fault of the code under test
hypothesis.settings.load_profile("gpupipe")

ROOT = Path(__file__).resolve().parent.parent

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores. Threads of their own would wait for each other in busy loops, for minutes on few cores.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background, from where it reaches all that we start
    signal.signal(signal.SIGINT, signal.default_int_handler)
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton: its kernels run on the CPU


def _gpu_required() -> bool:
    return os.environ.get("GPUPIPE_REQUIRE_GPU") == "1"


def _trainer_required(path: Path) -> bool:
    """True for the tests of the trainers where their packages have to be: in CI, or where it is asked for."""
    asked = os.environ.get("CI") == "true" or os.environ.get("GPUPIPE_REQUIRE_TRAINERS") == "1"
    return asked and path.parent.name == "integrations"


@functools.cache
def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and _gpu_required() and item.get_closest_marker("gpu"):
        report.outcome = "failed"
        report.longrepr = f"GPUPIPE_REQUIRE_GPU=1, but this GPU test was skipped: {report.longrepr}"
    if report.skipped and _trainer_required(item.path):
        report.outcome = "failed"
        report.longrepr = f"its trainer has to be here, but this test was skipped: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.skipped and _gpu_required() and "mark.gpu" in collector.path.read_text(encoding="utf-8"):
        report.outcome = "failed"
        report.longrepr = f"GPUPIPE_REQUIRE_GPU=1, but a file with GPU tests was skipped: {report.longrepr}"
    if report.skipped and _trainer_required(collector.path):
        report.outcome = "failed"
        report.longrepr = f"their trainer has to be here, but these tests were skipped: {report.longrepr}"
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Writes each failure to the file that GPUPIPE_FAILURES names as soon as it is known: a run may be ended before its end."""
    file = os.environ.get("GPUPIPE_FAILURES")
    if file and report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(file, "a", encoding="utf-8") as told:
            told.write(f"{'=' * 20} {report.nodeid} ({report.when})\n{report.longreprtext}\n")


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keeps gpupipe's caches of this run away from the user's."""
    folder = tmp_path_factory.mktemp("gpupipe-cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPUPIPE_CACHE", str(folder))
        yield folder


@pytest.fixture
def fresh_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder for one test."""
    folder = tmp_path_factory.mktemp("fresh-cache")
    monkeypatch.setenv("GPUPIPE_CACHE", str(folder))
    return folder


def _own_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("gpupipe")}


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """Every thread of gpupipe that a test started has ended when the test has."""
    before = _own_threads()
    yield
    deadline = time.monotonic() + 5
    while (left := _own_threads() - before) and time.monotonic() < deadline:
        gc.collect()  # a loader that the test dropped without closing it ends when it is collected
        for thread in left:
            thread.join(0.1)
    assert not left, f"threads left behind: {sorted(thread.name for thread in left)}"


@pytest.fixture(autouse=True)
def torch_threads_as_before() -> Iterator[None]:
    """What a test or a command in it sets is not for the tests after it: several workers' threads would wait in busy loops."""
    count = getattr(sys.modules.get("torch"), "get_num_threads", None)
    before = count() if count is not None else None
    yield
    if count is not None and count() != before:
        sys.modules["torch"].set_num_threads(before)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of sample media that lies beside the checkout, or where GPUPIPE_SHARED says."""
    folder = Path(os.environ.get("GPUPIPE_SHARED", ROOT.parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"no folder of sample media at {folder}; GPUPIPE_SHARED names another")
    return folder


@pytest.fixture(scope="session")
def media(shared: Path) -> Path:
    """Folder of three real videos."""
    return shared / "media"


@pytest.fixture(scope="session")
def tricky(shared: Path) -> Path:
    """Folder of small files, each the shape of a fault that video loaders meet."""
    return shared / "tricky"


@pytest.fixture(scope="session")
def clips(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Clips of 60 frames by name (see tests/clips.py); ``frame_number`` of display frame k is k."""
    from clips import write_set

    return write_set(tmp_path_factory.mktemp("clips"))


@pytest.fixture(scope="session")
def host_kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ctypes.CDLL]:
    """The kernels that make clips, compiled for the host: once a process, for it takes seconds."""
    from host_kernels import all_compiled

    return all_compiled(tmp_path_factory.mktemp("host"))


@pytest.fixture
def launches(host_kernels: dict[str, ctypes.CDLL], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Has every clip made by the kernels where these serve it, on the host; those that were launched."""
    from host_kernels import send_to_host

    return send_to_host(host_kernels, monkeypatch)

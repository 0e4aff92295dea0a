"""VideoLoader where something is scarce: shared memory, cores, threads, memory.

It works, or says in one clear error what it lacks; that is never taken for a fault of the videos.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpupipe import VideoLoader
from gpupipe.data import limit
from gpupipe.data.scan import demux
from gpupipe.errors import DecodeError, DeviceError, DeviceMemoryError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits, namespaces and affinity are Linux's")

SMALL: dict[str, Any] = {"clip": {"frames": 8}, "transform": {"size": 32}, "device": "cpu", "batch": 4}


def run(code: str, *args: object, prefix: tuple[str, ...] = ()) -> str:
    """What a program prints in a process of its own."""
    command = [*prefix, sys.executable, "-c", code, *map(str, args)]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}  # threads of torch's own wait for each other in busy loops
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, env=alone)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def decoding() -> list[int]:
    """The processes of this test run that decode."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # of a test before, and no more
            found += [child.pid] if "gpupipe.data.decode.worker" in child.cmdline() else []
    return found


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A video of which a picture takes more than what is left over of the smallest limits."""
    from clips import write_clip

    return write_clip(tmp_path_factory.mktemp("large") / "large.mp4", width=960, height=720, frames=20)


# Shared memory

EPOCH = """
import os, sys
from pathlib import Path
from gpupipe import VideoLoader
assert not os.statvfs("/dev/shm").f_bavail * os.statvfs("/dev/shm").f_frsize > 65536
files = [sys.argv[1], Path(sys.argv[1]).read_bytes()] * 4
with VideoLoader(files, clip={"frames": 8}, batch=2, device="cpu", decode={"cpu_workers": 2}) as loader:
    print(sum(len(batch.clips) for batch in loader), len(loader.bad_files))
"""


@pytest.mark.parametrize("options", ["size=64k", "size=64k,ro"])
def test_a_small_or_unwritable_dev_shm_is_enough(clips: dict[str, Path], options: str) -> None:
    """Containers have 64 MB of it. Frames of processes and videos in memory take none, so 64 KiB, or none, serve as well."""
    mount = f'mount -t tmpfs -o {options} none /dev/shm && exec "$@"'
    prefix = ("unshare", "-rm", "sh", "-c", mount, "sh")
    if not shutil.which("unshare") or subprocess.run([*prefix, "true"], capture_output=True, timeout=30).returncode:
        pytest.skip("no mount namespaces here")
    assert run(EPOCH, clips["h264"], prefix=prefix) == "8 0"


def test_processes_share_frames_outside_of_dev_shm(clips: dict[str, Path]) -> None:
    """As the test above, where there are no namespaces: neither this process nor its own has anything open or mapped there."""
    held = clips["vp9"].read_bytes()
    with VideoLoader([clips["h264"], held] * 4, **{**SMALL, "batch": 1}, decode={"cpu_workers": 1}) as loader:
        next(iter(loader))
        workers = decoding()
        assert workers
        own = {path.inode() for path in os.scandir("/dev/shm")}
        for process in workers:
            maps = Path(f"/proc/{process}/maps").read_text(encoding="utf-8")
            assert "memfd:gpupipe-planes" in maps
            assert "/dev/shm" not in maps
            files = [os.stat(f"/proc/{process}/fd/{name}").st_ino for name in os.listdir(f"/proc/{process}/fd")]
            assert not own & set(files)


# Cores

QUOTA = """
import os, sys, threading
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
from gpupipe import VideoLoader
from gpupipe.device.inventory import cpu_quota
import psutil
made = []
for workers in (0, "auto"):
    with VideoLoader([sys.argv[1]] * 160, clip={"frames": 2}, transform={"size": 16}, batch=4, device="cpu",
                     decode={"cpu_workers": workers}) as loader:
        running = iter(loader)
        next(running)
        names = [thread.name for thread in threading.enumerate()]
        at_work = sum(name.startswith("gpupipe-clips") and not name.endswith("watch") for name in names)
        processes = sum("gpupipe.data.decode.worker" in child.cmdline() for child in psutil.Process().children())
        made.append((cpu_quota(), at_work, processes, 1 + len(list(running))))
print(made)
"""


def test_decoding_follows_the_cores_that_there_are(clips: dict[str, Path]) -> None:
    """One core: one thread decodes, or one process; more would only take turns. More batches than are made ahead."""
    assert run(QUOTA, clips["h264"]) == "[(1, 1, 0, 40), (1, 1, 1, 40)]"


# Threads and memory

LITTLE_MEMORY = """
import faulthandler, json, resource, sys, threading
faulthandler.dump_traceback_later(100, exit=True)
from gpupipe import VideoLoader, errors
workers = int(sys.argv[2])
outcomes = []

def held():
    for line in open("/proc/self/status"):
        if line.startswith("VmData"):
            return int(line.split()[1]) << 10

for room in (None, 0, 3, 12, 50):
    with VideoLoader([sys.argv[1]] * 32, clip={"frames": 8}, transform={"size": 256}, batch=4, device="cpu",
                     decode={"cpu_workers": workers, "threads": 2}) as loader:
        running = iter(loader)
        kept = [next(running)]
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if room is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (held() + (room << 20), hard))
        try:
            kept += running
            outcome = "all" if len(kept) == 8 else f"{len(kept)} batches of 8"
        except Exception as error:
            outcome = type(error).__name__
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
        if loader.bad_files or loader.stats()["damaged_frames"]:
            outcome = f"blamed {loader.bad_files}"
    del kept, running
    outcomes.append(outcome)
left = [thread.name for thread in threading.enumerate() if thread.name.startswith("gpupipe")]
print(json.dumps([outcomes, left]))
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_memory_that_ends_amid_an_epoch_is_one_clear_error(large: Path, workers: int) -> None:
    """However much is left: the loader goes on or says that memory is short, blames no video, and leaves no thread."""
    import json

    outcomes, left = json.loads(run(LITTLE_MEMORY, large, workers))
    assert outcomes[0] == "all", "without a limit"
    assert set(outcomes) <= {"all", "DeviceMemoryError", "DeviceError"}
    assert "DeviceMemoryError" in outcomes
    assert not left


FRESH = """
import resource, sys
from gpupipe import VideoLoader, errors
loader = VideoLoader([sys.argv[1]] * 8, clip={"frames": 2}, transform={"size": 16}, batch=4, device="cpu")
held = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData"))
_, hard = resource.getrlimit(resource.RLIMIT_DATA)
for room in (0, 4 << 20):
    resource.setrlimit(resource.RLIMIT_DATA, (held + room, hard))
    try:
        print(len(list(loader)))
    except errors.GpupipeError as error:
        print(type(error).__name__)
resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
print(len(list(loader)))
"""


def test_no_memory_for_the_first_epoch_is_one_clear_error_and_the_next_one_is_whole(clips: dict[str, Path]) -> None:
    """Then not even libraries that are loaded late, and the stacks of threads, find room."""
    *short, whole = run(FRESH, clips["h264"]).split()
    assert set(short) <= {"DeviceMemoryError", "DeviceError"}
    assert whole == "2"


def test_a_process_that_runs_out_of_memory_blames_no_video(large: Path) -> None:
    """What FFmpeg makes of it looks like damage, so that videos would be replaced by others, silently."""
    import resource

    with VideoLoader([large] * 16, **{**SMALL, "batch": 1}, jitter={"depth": 1}, decode={"cpu_workers": 1}) as loader:
        running = iter(loader)
        next(running)
        (worker,) = decoding()
        held = next(
            int(line.split()[1]) << 10
            for line in Path(f"/proc/{worker}/status").read_text(encoding="utf-8").splitlines()
            if line.startswith("VmData")
        )
        resource.prlimit(worker, resource.RLIMIT_DATA, (held // 2, held // 2))
        with pytest.raises(DeviceMemoryError, match=r"out of memory"):
            list(running)
        assert not loader.bad_files


def test_an_error_of_ffmpegs_is_the_videos_only_where_there_is_memory(
    clips: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its H.264 decoder says of both that the data are invalid."""
    import av

    def refused(context: Any, packet: Any, faulty: set[int] | None = None) -> list[Any]:
        class Context:
            def decode(self, _: Any) -> Any:
                raise av.error.InvalidDataError(1094995529, "Invalid data found")

        return original(Context() if threading.current_thread().name.startswith("gpupipe-clips") else context, packet, faulty)

    from gpupipe.data.decode import cpu

    original = demux.decoded
    monkeypatch.setattr(cpu, "decoded", refused)
    options = {**SMALL, "on_bad_file": "raise"}
    with VideoLoader([clips["h264"]] * 4, **options) as loader, pytest.raises(DecodeError, match="could not be decoded"):
        next(iter(loader))
    monkeypatch.setattr(limit, "_SPARE_BYTES", 1 << 60)
    with VideoLoader([clips["h264"]] * 4, **options) as loader:
        with pytest.raises(DeviceMemoryError, match="this machine is out of memory"):
            next(iter(loader))
        assert not loader.bad_files


def test_a_thread_too_many_is_told_with_what_to_do(clips: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with VideoLoader([clips["h264"]] * 4, **SMALL) as loader:
        monkeypatch.setattr(threading.Thread, "start", start)
        with pytest.raises(DeviceError, match=r"can't start new thread\n.*ulimit -u"):
            iter(loader)
        monkeypatch.undo()
        assert len(list(loader)) == 1

"""Files kept open: no more than allowed, never another version of one, none closed under a reader, none left behind."""

from __future__ import annotations

import gc
import os
import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from gpupipe import VideoLoader
from gpupipe.data import files as files_room
from gpupipe.data import index as indices
from gpupipe.data.bytes import Identity, LocalFile
from gpupipe.data.bytes import local as local_files
from gpupipe.data.decode.feed import PacketFeed
from gpupipe.data.files import UNKEPT, OpenFiles
from gpupipe.data.plan import make_plan
from gpupipe.errors import DeviceError, OpenError


@pytest.fixture
def some(tmp_path: Path) -> list[Identity]:
    """Six files, the n-th of which holds its number."""
    for number in range(6):
        (tmp_path / str(number)).write_text(str(number))
    return [Identity.of(str(tmp_path / str(number))) for number in range(6)]


def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of files in the order in which they are opened from now on."""
    names: list[str] = []
    original = LocalFile.__init__

    def watched(self: LocalFile, path: str) -> None:
        names.append(Path(path).name)
        original(self, path)

    monkeypatch.setattr(LocalFile, "__init__", watched)
    return names


def read(files: OpenFiles, identity: Identity) -> str:
    with files.lend(identity) as file:
        return file.read(0, 10).decode()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_the_least_recently_used_is_closed_first(some: list[Identity], monkeypatch: pytest.MonkeyPatch) -> None:
    names = opened(monkeypatch)
    files, before = OpenFiles(3), descriptors()
    for number in (0, 1, 2, 0, 3, 0, 2, 1):
        assert read(files, some[number]) == str(number)
        assert descriptors() - before == len(files) <= 3
    assert names == ["0", "1", "2", "3", "1"]
    files.close()
    assert descriptors() == before


def test_none_is_kept_with_a_limit_of_0(some: list[Identity], monkeypatch: pytest.MonkeyPatch) -> None:
    names, before = opened(monkeypatch), descriptors()
    for _ in range(2):
        assert read(OpenFiles(0), some[0]) == read(UNKEPT, some[0]) == "0"
    assert len(names) == 4
    assert descriptors() == before


def test_a_file_in_use_stays_open_when_others_push_it_out(some: list[Identity]) -> None:
    files, before = OpenFiles(1), descriptors()
    with files.lend(some[0]) as first, files.lend(some[0]) as same:
        assert same is first
        for identity in some[1:]:
            read(files, identity)
        assert first.read(0, 1) == b"0"
        files.close()
        assert first.read(0, 1) == b"0"
    assert descriptors() == before


def test_a_new_version_is_opened_anew(some: list[Identity], tmp_path: Path) -> None:
    files = OpenFiles(4)
    assert read(files, some[0]) == "0"
    (tmp_path / "new").write_text("new")
    os.replace(tmp_path / "new", some[0].path)
    now = Identity.of(some[0].path)
    assert now != some[0]
    assert read(files, now) == "new"


def test_a_file_that_changes_in_place_is_noticed_though_it_was_open(clips: dict[str, Path], tmp_path: Path) -> None:
    path = shutil.copy(clips["h264"], tmp_path / "video.mp4")
    index = indices.load(str(path))
    files = OpenFiles(4)
    with PacketFeed(index, files) as feed:
        assert len(list(feed.packets(make_plan(index, [0]).passes[0]))) == 1
    with open(path, "ab") as file:
        file.write(b"more")
    with pytest.raises(OpenError, match="replaced or changed"):
        PacketFeed(index, files)
    assert len(files) == 1
    assert all(entry.users == 0 for entry in files._open.values()), "given back in spite of the error"
    files.close()


def test_running_out_of_descriptors_closes_those_kept(some: list[Identity], monkeypatch: pytest.MonkeyPatch) -> None:
    files = OpenFiles(4)
    read(files, some[0])
    original, refused = os.open, [True]

    def full(path: Any, *rest: Any, **options: Any) -> int:
        if len(files) and refused:
            raise OSError(24, "Too many open files")
        return original(path, *rest, **options)

    monkeypatch.setattr(local_files.os, "open", full)
    assert read(files, some[1]) == "1"
    monkeypatch.setattr(local_files.os, "open", lambda *_, **__: (_ for _ in ()).throw(OSError(24, "Too many open files")))
    with pytest.raises(DeviceError, match="ulimit"):
        read(files, some[2])
    monkeypatch.undo()
    files.close()


def test_most_of_the_process_own_limit_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (40, 100))
    assert OpenFiles(1000)._limit == 10
    assert OpenFiles(5)._limit == 5
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert files_room.OpenFiles(1000)._limit == 1000


def test_threads_share_descriptors(some: list[Identity]) -> None:
    files, before, wrong = OpenFiles(2), descriptors(), []

    def work(shift: int) -> None:
        for number in range(600):
            which = (number * 7 + shift) % 6
            if read(files, some[which]) != str(which):
                wrong.append(which)

    threads = [threading.Thread(target=work, args=(shift,)) for shift in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(files) <= 2
    files.close()
    assert descriptors() == before


def test_a_loader_keeps_files_open_between_epochs_and_closes_them(
    clips: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    videos = [clips["h264"], clips["vp9"], clips["h264_odd"]] * 2
    options: dict[str, Any] = {"clip": {"frames": 4}, "transform": {"size": 32}, "batch": 2, "device": "cpu"}
    with VideoLoader(videos, **options) as loader:
        expected = [batch.video for _ in range(2) for batch in loader]
    before, names = descriptors(), opened(monkeypatch)
    with VideoLoader(videos, **options, decode={"threads": 3}, cache={"open_files": 8}) as loader:
        ours = [batch.video for _ in range(2) for batch in loader]
        assert len(loader._job.files) == 3
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    assert len(names) <= 2 * 3, "three files, each opened once, or by two threads at once"
    assert descriptors() == before


def test_a_kept_file_that_the_file_system_has_let_go_of_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    identity, files = Identity.of(str(path)), OpenFiles(4)
    with files.lend(identity) as kept:
        number = kept._fd
    kept._fd = 1 << 20  # as a stale handle: every question to it fails
    assert not kept.usable
    with pytest.raises(OpenError, match="can no longer be read"):
        kept.is_still(identity)
    with files.lend(identity) as again:
        assert again is not kept
        assert again.read(0, 7) == b"content"
    os.close(number)
    files.close()


def test_a_file_that_is_dropped_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    files = OpenFiles(4)
    with files.lend(Identity.of(str(path))) as file:
        number = file._fd
    del file, files
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


FEW_FILES = """
import resource, sys
from gpupipe import VideoLoader, VideoReader
from gpupipe.errors import DeviceError

_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
def loaded(**decode):
    options = {"clip": {"frames": 2}, "transform": {"size": 16}, "batch": 2, "device": "cpu", "decode": decode}
    with VideoLoader([sys.argv[1]] * 4, **options) as loader:
        assert len(list(loader)) == 2 and not loader.bad_files

for limit in [*range(3, 14), 40]:
    for use in (lambda: loaded(), lambda: loaded(cpu_workers=1), lambda: VideoReader(sys.argv[1], device="cpu").frames([3])):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            use()
            told = "ok"
        except DeviceError as error:
            told = str(error).replace(chr(10), " ")
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        print(limit, told, flush=True)
"""


def test_few_open_files_are_one_clear_error(clips: dict[str, Path]) -> None:
    """Whatever opens the one too many, a module that is loaded late included: no OSError, no bad file, no hang."""
    command = [sys.executable, "-c", FEW_FILES, str(clips["h264"])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    lines = [line.split(" ", 1) for line in done.stdout.splitlines()]
    assert len(lines) == 3 * 12
    for limit, told in lines:
        assert told == "ok" or f"this process may have {limit} (ulimit -n)" in told or f"may be {limit}: ulimit -n" in told
    assert lines[0][1] != "ok"
    assert [told for _, told in lines[-3:]] == ["ok"] * 3

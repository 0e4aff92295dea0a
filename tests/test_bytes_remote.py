"""Stores far away: the same pixels, few requests, failures tried again and then told, and a local cache within its bound."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import fsspec.asyn
import pytest
import torch
from stores import Store, served
from test_bytes_shard import write_shard

from gpupipe import VideoLoader, VideoReader
from gpupipe.cli.cache import CacheCommandConfig, cache
from gpupipe.cli.probe import ProbeConfig, probe
from gpupipe.config import ClipConfig, SourceConfig
from gpupipe.data import index as indices
from gpupipe.data.bytes import Identity, blocks, open_file, remote, settings
from gpupipe.data.bytes import store as far
from gpupipe.data.bytes.name import join, plain
from gpupipe.data.bytes.remote import RemoteFile
from gpupipe.data.decode import DecodeProcess
from gpupipe.data.decode.cpu import decode
from gpupipe.data.files import UNKEPT
from gpupipe.data.plan import make_plan
from gpupipe.data.prepare import ReadAhead
from gpupipe.data.scan import store as index_files
from gpupipe.data.source import collect
from gpupipe.data.stop import Stopped, stoppable
from gpupipe.device import disk
from gpupipe.errors import ClosedError, ConfigError, DeviceError, OpenError, SourceError
from gpupipe.types import ClipRequest, Entry

pytest.importorskip("aiohttp", reason="URLs over HTTP are read through aiohttp: pip install 'fsspec[http]'")
CONFIG = SourceConfig()
OPTIONS: dict[str, Any] = {"clip": {"frames": 4}, "transform": {"size": 32}, "batch": 2, "device": "cpu", "shuffle": False}


@pytest.fixture(autouse=True)
def fresh(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of any store, and failures are tried again at once."""
    forget(monkeypatch)
    monkeypatch.setattr(settings, "_current", settings.Remote(attempts=3, timeout_seconds=20))
    monkeypatch.setattr(far, "_PAUSE_SECONDS", 0.001)


@pytest.fixture
def web(clips: dict[str, Path], tmp_path: Path) -> Iterator[Store]:
    """The clips in a folder, served; and random bytes, of which blocks can be told apart."""
    folder = tmp_path / "web"
    folder.mkdir()
    for clip in clips.values():
        shutil.copy(clip, folder)
    (folder / "bytes.bin").write_bytes(os.urandom(5 * blocks.BLOCK_BYTES + 1000))
    with served(folder) as store:
        yield store


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    for room in (far, remote):
        monkeypatch.setattr(room, "_shared", room._Shared())


@pytest.mark.parametrize("name", ["h264.mp4", "vp9.webm", "mpeg4.avi", "hevc.mp4"])
def test_a_url_has_the_pixels_of_the_file(name: str, web: Store) -> None:
    with VideoReader(web.folder / name, device="cpu") as plain, VideoReader(f"{web.url}/{name}", device="cpu") as ours:
        assert torch.equal(ours.frames([0, 31, 59]), plain.frames([0, 31, 59]))
        assert ours._index.mapped == plain._index.mapped
    assert len(web.gets) == 1, "a small file is one request, for its index and for all reads"


def test_a_member_of_a_remote_shard_has_them_too(web: Store, clips: dict[str, Path]) -> None:
    write_shard(web.folder / "s.tar", {"a/1.mp4": clips["h264"], "a/1.cls": "4", "a/2.webm": clips["vp9"]})
    entries = collect(f"{web.url}/s.tar", CONFIG)
    assert [entry.path for entry in entries] == [f"{web.url}/s.tar::a/1.mp4", f"{web.url}/s.tar::a/2.webm"]
    assert entries[0].columns == {"label": 4}
    with VideoReader(clips["vp9"], device="cpu") as plain, VideoReader(entries[1].path, device="cpu") as ours:
        assert torch.equal(ours.frames([0, 59]), plain.frames([0, 59]))


def test_a_demuxer_reads_remote_files(web: Store, tricky: Path) -> None:
    """MPEG-TS is demuxed anew for each clip, through Python, at the same times and to the same pixels."""
    videos = sorted(tricky.glob("*.ts"))
    if not videos:
        pytest.skip("no MPEG-TS among the sample media")
    shutil.copy(videos[0], web.folder / "a.ts")
    with VideoReader(videos[0], device="cpu") as plain, VideoReader(f"{web.url}/a.ts", device="cpu") as ours:
        assert not ours._index.mapped
        assert torch.equal(ours.frames([0, len(plain) // 2]), plain.frames([0, len(plain) // 2]))


def test_a_loader_and_its_processes_read_urls(web: Store) -> None:
    videos = [web.folder / "h264.mp4", web.folder / "vp9.webm"]
    with VideoLoader(videos, **OPTIONS) as loader:
        (expected,) = [batch["video"] for batch in loader]
    urls = [f"{web.url}/h264.mp4", f"{web.url}/vp9.webm"]
    remote._shared.blocks._has_room(0)  # the folder is counted: while that is done, blocks are not kept on disk
    for more in ({}, {"decode": {"cpu_workers": 1}}, {"cache": {"read_ahead": 8, "open_files": 4}}):
        with VideoLoader(urls, **OPTIONS, **more) as loader:
            (ours,) = [batch["video"] for batch in loader]
            assert loader.bad_files == {}
        assert torch.equal(ours, expected)
    assert len(web.gets) == 2, "what is at hand is not fetched again, by a process either"
    assert probe(ProbeConfig(file=urls[0], device="cpu"))["codec"] == "h264"


def test_folders_and_patterns_are_listed(web: Store, tmp_path: Path) -> None:
    (web.folder / "sub").mkdir()
    (web.folder / "sub/b.mp4").touch()
    (web.folder / "sub/a.mp4").touch()
    assert [entry.path for entry in collect(f"{web.url}/sub/", CONFIG)] == [f"{web.url}/sub/{name}.mp4" for name in "ab"]
    assert [entry.path for entry in collect(f"{web.url}/sub/*.mp4", CONFIG)] == [f"{web.url}/sub/{name}.mp4" for name in "ab"]
    assert [entry.path for entry in collect([f"{web.url}/x{{1..2}}.mp4"], CONFIG)] == [f"{web.url}/x{n}.mp4" for n in (1, 2)]
    memory = fsspec.filesystem("memory")
    try:
        for name in ("set/b/2.mp4", "set/a/1.MP4", "set/a/notes.txt"):
            memory.pipe(f"/{name}", b"x")
        assert [entry.path for entry in collect("memory://set", CONFIG)] == ["memory:///set/a/1.MP4", "memory:///set/b/2.mp4"]
        assert [entry.path for entry in collect("memory://set/*/2.mp4", CONFIG)] == ["memory:///set/b/2.mp4"]
        with pytest.raises(SourceError, match=r"no file matches 'memory://set/\*\.mkv'"):
            collect("memory://set/*.mkv", CONFIG)
        with pytest.raises(SourceError, match=r"memory://none does not exist"):
            collect("memory://none", CONFIG)
    finally:
        memory.rm("/set", recursive=True)


def test_stores_without_coroutines_serve_as_well(clips: dict[str, Path]) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/v/clip.mp4", clips["h264"].read_bytes())
    try:
        with VideoReader("memory://v/clip.mp4", device="cpu") as ours, VideoReader(clips["h264"], device="cpu") as plain:
            assert torch.equal(ours.frames([7, 59]), plain.frames([7, 59]))
    finally:
        memory.rm("/v", recursive=True)
    with VideoReader(f"file://{clips['h264']}", device="cpu") as ours:
        assert ours.info.path == str(clips["h264"]), "a file:// URL is the path that it names"


@pytest.mark.parametrize("name", ["a b#%20.mp4", "ä?.mp4", os.fsdecode(b"\xff.mp4")])
def test_a_file_url_is_read_as_pathlib_writes_it(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.touch()
    for url in (path.as_uri(), path.as_uri().replace("file:///", "FILE://localhost/")):
        assert [plain(url), join("/set", url), Identity.of(url).path] == [str(path)] * 3
        for videos in (url, [url], [{"path": url}]):
            assert [entry.path for entry in collect(videos, CONFIG)] == [str(path)]
    shard = (tmp_path / "a b.tar").as_uri()
    assert plain(f"{shard}::c%20d.mp4") == f"{tmp_path}/a b.tar::c%20d.mp4", "a member's name is no part of the URL"


def test_paths_of_a_table_may_be_urls(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("path,label\ns3://bucket/a.mp4,1\nb.mp4,2\n")
    assert [entry.path for entry in collect(tmp_path / "t.csv", CONFIG)] == ["s3://bucket/a.mp4", str(tmp_path / "b.mp4")]
    assert join("s3://bucket/set", "a.mp4") == "s3://bucket/set/a.mp4"


def test_a_table_may_lie_in_a_store_itself(web: Store) -> None:
    (web.folder / "t.csv").write_text("\ufeffpath,caption\nh264.mp4,ä\nsub/b.mp4,b\n", encoding="utf-8")
    entries = collect(f"{web.url}/t.csv", CONFIG)
    assert [entry.path for entry in entries] == [f"{web.url}/h264.mp4", f"{web.url}/sub/b.mp4"], "beside the table"
    assert entries[0].columns == {"caption": "ä"}
    with pytest.raises(SourceError, match=rf"cannot read the table {web.url}/none\.csv: .* does not exist"):
        collect(f"{web.url}/none.csv", CONFIG)


def test_bytes_are_right_wherever_a_range_begins_and_ends(web: Store) -> None:
    content, size = (web.folder / "bytes.bin").read_bytes(), blocks.BLOCK_BYTES
    file = open_file(f"{web.url}/bytes.bin")
    for begin, length in ((0, 1), (size - 1, 2), (size, size), (3 * size + 5, size), (5 * size + 990, 100), (len(content), 5)):
        assert file.read(begin, length) == content[begin : begin + length]
        memory = bytearray(length)
        assert file.read_into(begin, memoryview(memory)) == len(content[begin : begin + length])
    assert file.read(0, len(content) + 10) == content


def test_blocks_that_lie_together_are_one_request(web: Store) -> None:
    size = blocks.BLOCK_BYTES
    file = open_file(f"{web.url}/bytes.bin")
    file.read(size + 10, 3 * size - 20)
    assert web.gets == [f"bytes={size}-{4 * size - 1}"]
    file.read(0, 6 * size)
    assert sorted(web.gets[1:]) == [f"bytes=0-{size - 1}", f"bytes={4 * size}-{5 * size + 999}"], "what is at hand is left out"


def test_what_is_under_way_is_waited_for_and_not_asked_again(web: Store) -> None:
    """A read after a hint, and readers of one block at once, share one request."""
    web.failures = ["stall"]
    file = open_file(f"{web.url}/bytes.bin")
    file.will_need([(0, 100), (50, 200)])
    assert web.asked.wait(30)
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(file.read(10, 100))) for _ in range(4)]
    for thread in threads:
        thread.start()
    web.go_on.set()
    for thread in threads:
        thread.join()
    assert found == [(web.folder / "bytes.bin").read_bytes()[10:110]] * 4
    assert len(web.gets) == 1


def test_read_ahead_asks_for_the_ranges_of_a_plan(web: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"{web.url}/h264.mp4"
    indices.load(url)
    forget(monkeypatch)
    shutil.rmtree(disk.cache_dir() / disk.REMOTE)
    web.requests.clear()
    request = ClipRequest(0, 0, 0, 0)
    ahead = ReadAhead(
        [request], lambda _: ClipConfig(frames=4), lambda _: Entry(url), lambda entry: entry.path, UNKEPT, lambda _: True, 4
    )
    ahead.start()
    ahead.join()
    deadline = time.monotonic() + 30
    while not list((disk.cache_dir() / disk.REMOTE).rglob("*.blk")) and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    assert len(web.gets) == 1
    prepared = ahead.take(request)
    assert prepared is None or prepared.index.identity.path == url


class Shelf(fsspec.asyn.AsyncFileSystem):
    """A store with coroutines whose ``cat_file`` has a further parameter in front of the range, as that of s3fs has."""

    protocol = "shelf"
    content: ClassVar[dict[str, bytes]] = {}

    async def _info(self, path: str, **_: Any) -> dict[str, Any]:
        if path not in self.content:
            raise FileNotFoundError(path)
        return {"name": path, "size": len(self.content[path]), "type": "file", "LastModified": "today"}

    async def _cat_file(
        self, path: str, version_id: str | None = None, start: int | None = None, end: int | None = None
    ) -> bytes:
        assert version_id is None
        return self.content[path][start:end]


def test_a_store_is_asked_by_the_names_of_its_parameters(clips: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("shelf", Shelf, clobber=True)
    monkeypatch.setitem(Shelf.content, "a/clip.mp4", clips["h264"].read_bytes())
    with VideoReader("shelf://a/clip.mp4", device="cpu") as ours, VideoReader(clips["h264"], device="cpu") as plain:
        assert torch.equal(ours.frames([7, 59]), plain.frames([7, 59]))
        assert ours._index.identity.tag == "today", "the time of change tells versions apart where there is no etag"


def test_remote_videos_are_read_ahead_unless_told_otherwise(web: Store, clips: dict[str, Path]) -> None:
    far, near = f"{web.url}/h264.mp4", clips["vp9"]
    for videos, chosen, ahead in (([near, far], {}, 32), ([near, near], {}, 0), ([far, far], {"read_ahead": 0}, 0)):
        with VideoLoader(videos, **OPTIONS, cache=chosen) as loader:
            assert loader._job.read_ahead == ahead


def test_one_look_serves_all_who_ask_at_once(web: Store) -> None:
    """Threads and the read-ahead want to know the version of one video at a time: the store is asked once."""
    url = f"{web.url}/h264.mp4"
    remote.look_ahead(url)
    found: list[Identity] = []
    threads = [threading.Thread(target=lambda: found.append(Identity.of(url))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 8
    assert [method for method, _, _ in web.requests] == ["HEAD"]


@pytest.mark.parametrize("failure", ["reset", "truncate", "500", "429"])
def test_a_failure_is_tried_again(failure: str, web: Store) -> None:
    file = open_file(f"{web.url}/bytes.bin")
    web.failures = [failure] * 2
    assert file.read(0, 1000) == (web.folder / "bytes.bin").read_bytes()[:1000]
    assert len(web.gets) == 3, "and no more often than it failed"


@pytest.mark.parametrize(
    ("failure", "says"), [("reset", ""), ("truncate", ""), ("503", "503"), ("stall", "no answer within 0.2 s")]
)
def test_a_failure_that_lasts_is_one_error_with_the_url(
    failure: str, says: str, web: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{web.url}/bytes.bin"
    file = open_file(url)
    web.always = failure
    if failure == "stall":
        monkeypatch.setattr(settings, "_current", settings.Remote(attempts=3, timeout_seconds=0.2))
    with pytest.raises(OpenError) as caught:
        file.read(0, 1000)
    assert f"{url} cannot be read" in str(caught.value)
    assert says in str(caught.value)
    assert "3 times" in str(caught.value)
    assert caught.value.path == url
    assert 3 <= len(web.gets) <= 6, "aiohttp asks once more by itself where a connection that was kept turns out closed"
    web.always = ""
    web.go_on.set()
    assert file.read(0, 10) == (web.folder / "bytes.bin").read_bytes()[:10], "a later read begins anew"


@pytest.mark.parametrize(("status", "says"), [("404", "does not exist"), ("403", "may not be read"), ("410", "does not exist")])
def test_what_would_fail_again_is_not_tried_again(status: str, says: str, web: Store) -> None:
    file = open_file(f"{web.url}/bytes.bin")
    web.always = status
    with pytest.raises(OpenError, match=rf"{web.url}/bytes\.bin {says}"):
        file.read(0, 1000)
    assert len(web.gets) == 1


def test_a_url_that_is_not_there_is_a_bad_file(web: Store) -> None:
    with pytest.raises(OpenError, match=rf"{web.url}/none\.mp4 does not exist"):
        VideoReader(f"{web.url}/none.mp4", device="cpu")
    with VideoLoader([f"{web.url}/none.mp4", f"{web.url}/h264.mp4"], **OPTIONS) as loader:
        assert len(list(loader)) == 1
        assert list(loader.bad_files) == [f"{web.url}/none.mp4"]


def test_a_store_that_fails_amid_a_scan_is_no_damaged_video(web: Store, clips: dict[str, Path]) -> None:
    """FFmpeg takes a failed read for the end of the file: an index of half a video must not be kept."""
    path = web.folder / "long.ts"
    shutil.copy(clips["h264"], path)
    data = path.read_bytes()
    shard = write_shard(web.folder / "far.tar", {"pad": os.urandom(3 << 20), "a.mp4": data})
    url = f"{web.url}/{shard.name}::a.mp4"
    identity = Identity.of(url)
    assert identity.size_bytes == len(data)
    shutil.rmtree(disk.cache_dir() / disk.REMOTE)
    remote._shared.blocks = blocks.Blocks()
    web.always = "reset"
    with pytest.raises(OpenError, match=rf"far\.tar::a\.mp4 cannot be read: {web.url}/far\.tar cannot be read"):
        indices.load(url)
    assert not index_files.file_of(identity).exists()
    web.always = ""
    assert indices.load(url).info.damage is None


def test_a_version_that_changes_is_noticed(web: Store, clips: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"{web.url}/bytes.bin"
    file, before = open_file(url), Identity.of(url)
    file.read(0, 10)
    (web.folder / "bytes.bin").write_bytes(os.urandom(5 * blocks.BLOCK_BYTES + 1000))
    assert file.read(0, 10), "what is at hand is of the version that was opened"
    with pytest.raises(OpenError, match=rf"{url} was replaced or changed while it was read"):
        file.read(2 * blocks.BLOCK_BYTES, 10)
    deadline = time.monotonic() + 30
    while Identity.of(url) == before and time.monotonic() < deadline:  # the end of the request is told by another thread
        threading.Event().wait(0.01)
    assert Identity.of(url) != before
    assert not open_file(url).is_still(before)
    assert open_file(url).read(0, 100) == (web.folder / "bytes.bin").read_bytes()[:100]
    monkeypatch.setattr(remote, "_TRUSTED_SECONDS", 0.0)
    with VideoReader(f"{web.url}/h264.mp4", device="cpu") as reader:
        shutil.copy(clips["hevc"], web.folder / "h264.mp4")
        with pytest.raises(OpenError, match=r"h264\.mp4 was replaced or changed"):
            reader.frames([0])


def test_a_server_without_ranges_is_refused(web: Store) -> None:
    web.ranges = False
    with pytest.raises(OpenError, match=rf"{web.url}/bytes\.bin is not served in ranges"):
        open_file(f"{web.url}/bytes.bin").read(0, 10)
    assert len(web.gets) == 1


def test_waiting_for_a_store_ends_when_the_work_is_given_up(web: Store) -> None:
    file = open_file(f"{web.url}/bytes.bin")
    web.always = "stall"
    with stoppable(web.asked.is_set), pytest.raises(Stopped):
        file.read(0, 10)
    assert len(web.gets) == 1


def test_closing_a_loader_does_not_wait_for_a_store(web: Store) -> None:
    videos = [f"{web.url}/h264.mp4"] * 4
    indices.load(videos[0])
    shutil.rmtree(disk.cache_dir() / disk.REMOTE)
    remote._shared.blocks = blocks.Blocks()
    web.always = "stall"
    with VideoLoader(videos, **OPTIONS, remote={"timeout_seconds": 300}) as loader:
        batches = iter(loader)
        assert web.asked.wait(60)
        begin = time.monotonic()
    with pytest.raises(ClosedError):
        next(batches)
    assert time.monotonic() - begin < 20, "the request itself would take minutes"


def test_many_threads_read_many_videos(web: Store) -> None:
    content = (web.folder / "bytes.bin").read_bytes()
    web.failures = ["reset", "500", "truncate"] * 2
    settings.use(attempts=9)
    wrong: list[int] = []

    def work(shift: int) -> None:
        file = open_file(f"{web.url}/bytes.bin")
        for number in range(60):
            begin = (number * 77_777 + shift * 31_337) % len(content)
            if file.read(begin, 90_000) != content[begin : begin + 90_000]:
                wrong.append(begin)

    threads = [threading.Thread(target=work, args=(shift,)) for shift in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert remote._shared.flying == {} or all(future.done() for future in remote._shared.flying.values())


def test_blocks_outlive_the_process_and_are_counted_and_cleared(web: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"{web.url}/bytes.bin"
    content = open_file(url).read(0, 6 * blocks.BLOCK_BYTES)
    forget(monkeypatch)
    assert open_file(url).read(0, 6 * blocks.BLOCK_BYTES) == content
    assert len(web.gets) == 1
    listed = cache(CacheCommandConfig(action="ls"))
    assert listed["blocks"] == 6
    assert listed["block_bytes"] == len(content) + 6 * 4
    first = min((disk.cache_dir() / disk.REMOTE).rglob("*.blk"))
    first.write_bytes(first.read_bytes()[:-1] + b"?")
    forget(monkeypatch)
    assert open_file(url).read(0, 6 * blocks.BLOCK_BYTES) == content
    assert len(web.gets) == 2, "a damaged block is fetched again"
    assert cache(CacheCommandConfig(action="clear"))["removed"] >= 6
    assert not disk.stored(disk.REMOTE)


def test_the_cache_keeps_its_bound_and_what_came_first(web: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = 3 * blocks.BLOCK_BYTES + 1000
    monkeypatch.setattr(settings, "_current", settings.Remote(cache_gib=bound / 2**30))
    file = open_file(f"{web.url}/bytes.bin")
    for number in range(6):
        file.read(number * blocks.BLOCK_BYTES, 10)
    kept = disk.stored(disk.REMOTE)
    assert sorted(path.name for path in kept) == ["0.blk", "1.blk", "2.blk"]
    assert sum(kept.values()) <= bound
    for path in kept:  # nobody has used them for a week
        os.utime(path, (0, time.time() - 7 * 86400))
    forget(monkeypatch)
    open_file(f"{web.url}/bytes.bin").read(4 * blocks.BLOCK_BYTES, 10)
    names = sorted(path.name for path in disk.stored(disk.REMOTE))
    assert "4.blk" in names
    assert len(names) == 3


def test_no_cache_on_disk_still_reads_each_block_once_at_a_time(web: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_current", settings.Remote(cache_gib=0))
    with VideoReader(f"{web.url}/h264.mp4", device="cpu") as reader:
        reader.frames([0, 59])
    assert not disk.stored(disk.REMOTE)
    assert len(web.gets) == 1


def test_a_full_disk_is_told_once_and_costs_only_time(
    web: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
    content = (web.folder / "bytes.bin").read_bytes()
    file = open_file(f"{web.url}/bytes.bin")
    assert file.read(0, len(content)) == content
    assert file.read(0, len(content)) == content
    assert caplog.text.count("No space left on device") == 1
    assert not disk.stored(disk.REMOTE), "no half written blocks are left"


def test_settings_reach_processes_and_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_current", None)
    assert settings.current() == settings.Remote()
    monkeypatch.setenv(settings.VARIABLE, json.dumps({"cache_gib": 2, "attempts": 7}))
    assert settings.current() == settings.Remote(cache_gib=2.0, attempts=7)
    settings.use(timeout_seconds=4.0)
    monkeypatch.setenv(settings.VARIABLE, settings.environment()[settings.VARIABLE])
    monkeypatch.setattr(settings, "_current", None)
    assert settings.current() == settings.Remote(cache_gib=2.0, attempts=7, timeout_seconds=4.0)
    monkeypatch.setenv(settings.VARIABLE, '{"cache_gb": 2}')
    with pytest.raises(ConfigError, match=r"GPUPIPE_REMOTE=.*cache_gb.*cannot be read"):
        settings.current()


def test_stores_without_a_package_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(protocol: str) -> Any:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(DeviceError, match=r"s3://bucket/a\.mp4 cannot be read: Install s3fs(.|\n)*pip install s3fs"):
        Identity.of("s3://bucket/a.mp4")
    monkeypatch.undo()
    with pytest.raises(OpenError, match=r"nosuch://host/a\.mp4 cannot be read"):
        Identity.of("nosuch://host/a.mp4")


def test_a_decode_process_reads_a_url(web: Store) -> None:
    video = indices.load(f"{web.url}/h264.mp4")
    plan = make_plan(video, [3, 40])
    process = DecodeProcess()
    try:
        ours, expected = process.decode(video, plan), decode(video, plan)
        assert all(torch.equal(a, b) for a, b in zip(ours.parts, expected.parts, strict=True))
    finally:
        process.close()
    assert isinstance(open_file(video.identity.path), RemoteFile)

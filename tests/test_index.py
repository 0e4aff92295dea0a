"""The index: facts of files of many shapes, and a cache that survives damage, rivals and a folder that cannot be written."""

from __future__ import annotations

import logging
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from clips import write_clip
from streams import FRAMES, STREAMS

from gpupipe.data import index
from gpupipe.data.bytes import Identity
from gpupipe.data.index import VideoIndex
from gpupipe.data.scan import store
from gpupipe.data.scan.demux import whole_packets
from gpupipe.data.scan.record import record
from gpupipe.data.scan.scan import scan
from gpupipe.data.stop import Stopped
from gpupipe.device import disk
from gpupipe.errors import ConfigError, OpenError

FACTS: dict[str, dict[str, Any]] = {
    "t01_opengop_h264.mp4": {"frames": 120, "codec": "h264", "pix_fmt": "yuv420p", "interlaced": False, "rotation": 0},
    "t02_opengop_hevc.mp4": {"frames": 120, "codec": "hevc"},
    "t05_vfr.mp4": {"frames": 52, "variable_rate": True},
    "t06_start8s.ts": {"frames": 60, "container": "mpegts", "start_seconds": pytest.approx(8.333, abs=1e-3)},
    "t07_rot.mp4": {"frames": 30, "rotation": 270, "width": 320, "height": 240, "display_size": (320, 240)},
    "t08_bt709_tv.mp4": {"frames": 30, "color_matrix": "bt709", "color_range": "limited", "variable_rate": False},
    "t08_smpte170m_pc.mp4": {"frames": 30, "color_matrix": "bt601", "color_range": "full"},
    "t08_untagged.mp4": {"frames": 30, "color_matrix": None, "color_range": None, "transfer": None},
    "t09_hevc10_pq.mp4": {
        "frames": 30,
        "bit_depth": 10,
        "pix_fmt": "yuv420p10le",
        "color_matrix": "bt2020",
        "transfer": "smpte2084",
    },
    "t09_h264_hi10.mp4": {"frames": 30, "bit_depth": 10, "codec": "h264"},
    "t10_odd_vp9.mp4": {"frames": 25, "width": 321, "height": 241, "codec": "vp9"},
    "t10_odd_h264_444.mp4": {"frames": 25, "width": 321, "height": 241, "pix_fmt": "yuv444p"},
    "t13_bitflip.mp4": {"frames": 120},
    "t15_1frame.mp4": {"frames": 1, "variable_rate": False},
    "t15_two_streams.mp4": {"frames": 30},
    "t16_interlaced_h264.mp4": {"frames": 25, "interlaced": True},
    "t17_av1.mp4": {"frames": 30, "codec": "av1"},
    "t18_longgop.mp4": {"frames": 600},
    "t18_tiny32.mp4": {"frames": 30, "width": 32, "height": 32},
    "t18_intra.mp4": {"frames": 60},
}


@pytest.mark.parametrize("name", FACTS)
def test_facts_of_files_of_many_shapes(name: str, tricky: Path) -> None:
    found = index.load(str(tricky / name))
    assert {fact: getattr(found.info, fact) for fact in FACTS[name]} == FACTS[name]
    assert found.mapped == (found.info.container != "mpegts")
    assert len(found.display) == len(found.seconds) == found.info.frames
    assert (np.diff(found.seconds) > 0).all()
    assert found.info.start_seconds == found.seconds[0]
    assert found.info.path == str(tricky / name)


def test_times_equal_those_of_a_sequential_decode(tricky: Path, media: Path) -> None:
    for path in (tricky / "t05_vfr.mp4", tricky / "t06_start8s.ts", tricky / "t02_opengop_hevc.mp4", *media.glob("*.mp4")):
        with av.open(str(path)) as container:
            times = [float(frame.pts * frame.time_base) for frame in container.decode(video=0) if frame.pts is not None]
        np.testing.assert_allclose(index.load(str(path)).seconds, times, rtol=0, atol=1e-9)


def test_variable_steps_are_kept(tricky: Path) -> None:
    found = index.load(str(tricky / "t05_vfr.mp4"))
    steps = {round(1 / step) for step in np.diff(found.seconds)}
    assert steps <= {30, 10, 6}
    assert len(steps) == 3
    assert found.info.fps == pytest.approx(51 / (found.seconds[-1] - found.seconds[0]))


def test_the_frame_on_show_is_the_last_one_at_or_before(tricky: Path) -> None:
    found = index.load(str(tricky / "t05_vfr.mp4"))
    for frame, time_ in enumerate(found.seconds):
        assert found.at(float(time_)) == frame
        assert found.at(float(time_) - 1e-3) == max(0, frame - 1)
    assert found.at(-5.0) == 0
    assert found.at(1e9) == 51


def test_a_cut_file_gives_the_frames_before_the_cut(tricky: Path) -> None:
    found = index.load(str(tricky / "t13_truncated.mp4"))
    assert 71 <= found.info.frames <= 73, "71 decode; two more are whole but need what was cut off"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("t13_empty.mp4", "cannot be opened as a video"),
        ("t15_audio_only.mp4", "has no video stream"),
        ("README.md", "cannot be opened as a video"),
        ("none.mp4", "No such file"),
        ("", "is a folder, not a video"),
    ],
)
def test_what_is_no_video_is_named(name: str, says: str, tricky: Path) -> None:
    with pytest.raises(OpenError, match=says) as caught:
        index.load(str(tricky / name))
    assert str(tricky / name) in str(caught.value)
    assert caught.value.fix


def test_start_points_are_those_from_which_a_decode_is_exact(tricky: Path, clips: dict[str, Path]) -> None:
    open_gop = index.load(str(tricky / "t01_opengop_h264.mp4"))
    assert open_gop.key.sum() == open_gop.start.sum() == 4
    assert (index.load(str(tricky / "t18_intra.mp4")).start).all()
    assert index.load(str(tricky / "t18_longgop.mp4")).start.sum() == 1
    assert index.load(str(clips["h264"])).keyframes.tolist() == [0, 30]
    assert index.load(str(clips["vp9"])).keyframes.tolist() == [0, 30]


def test_leading_pictures_belong_to_the_start_point_before(tricky: Path) -> None:
    for name in ("t01_opengop_h264.mp4", "t02_opengop_hevc.mp4"):
        found = index.load(str(tricky / name))
        starts = np.flatnonzero(found.start)
        leading = 0
        for frame, packet in enumerate(found.display):
            nearest = starts[starts <= packet].max()
            shown = int(np.flatnonzero(found.display == nearest)[0])
            begin = found.start_for(frame)
            if shown > frame:
                leading += 1
                assert begin < nearest
            else:
                assert begin == nearest
        assert leading > 0, f"{name} has no leading pictures: the test tests nothing"


def test_intra_refresh_has_no_start_point_but_its_first(tmp_path: Path) -> None:
    options = {"x264-params": "intra-refresh=1:keyint=20:log-level=none"}
    found = index.load(str(write_clip(tmp_path / "refresh.mp4", options=options, gop=20, bframes=0)))
    assert found.start.sum() == 1
    assert found.start[0]


def test_a_stream_that_begins_amid_a_group_of_pictures(tmp_path: Path, clips: dict[str, Path]) -> None:
    path = tmp_path / "cut.ts"
    with av.open(str(clips["h264"])) as source, av.open(str(path), "w") as target:
        stream = source.streams.video[0]
        copy = target.add_stream_from_template(stream)
        for number, packet in enumerate(source.demux(stream)):
            if packet.size and number >= 10:
                packet.stream = copy
                target.mux(packet)
    found = index.load(str(path))
    assert all(found.start_for(frame) <= packet for frame, packet in enumerate(found.display))


def test_edit_lists_hide_their_packets(tmp_path: Path, clips: dict[str, Path]) -> None:
    with av.open(str(clips["h264"])) as container:
        shown = [packet for packet in container.demux(video=0) if packet.size]
    found = index.load(str(clips["h264"]))
    assert found.info.frames == sum(not packet.is_discard for packet in shown) == 60
    assert found.info.start_seconds == 0


# The cache


@pytest.fixture
def video(tmp_path: Path, clips: dict[str, Path], fresh_cache: Path) -> Path:
    return Path(shutil.copy(clips["h264"], tmp_path / "video.mp4"))


def load_anew(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[VideoIndex, bool]:
    """The index as a new process would get it, and whether it had to be made."""
    built: list[Identity] = []
    with monkeypatch.context() as patch:
        patch.setattr(index, "_indices", type(index._indices)())
        found = index.load(str(path), lambda identity: (built.append(identity), store.make(identity))[1])
    return found, bool(built)


def same(one: VideoIndex, other: VideoIndex) -> bool:
    arrays = ("position", "size", "pts", "key", "start", "droppable", "display", "seconds")
    return (
        all(np.array_equal(getattr(one, name), getattr(other, name)) for name in arrays)
        and (one.info, one.identity, one.stream) == (other.info, other.identity, other.stream)
        and (one.extradata, one.length_size) == (other.extradata, other.length_size)
    )


def test_a_second_process_takes_the_index_from_the_cache(video: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, built = load_anew(video, monkeypatch)
    assert built
    second, built = load_anew(video, monkeypatch)
    assert not built
    assert same(first, second)
    assert isinstance(second.info.time_base, Fraction)
    assert index.load(str(video)) is index.load(os.path.relpath(video)), "kept in memory"


def test_a_changed_file_is_indexed_again(video: Path, clips: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    assert index.load(str(video)).info.width == 320
    shutil.copy(clips["h264_odd"], video)
    assert index.load(str(video)).info.width == 178, "in the same process too"
    os.utime(video, ns=(0, 10**18))
    _, built = load_anew(video, monkeypatch)
    assert built


@pytest.mark.parametrize("damage", ["cut", "flip-head", "flip-middle", "flip-end", "empty", "old", "rubbish"])
def test_a_damaged_cache_file_is_made_again(
    damage: str, video: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, _ = load_anew(video, monkeypatch)
    file = store.file_of(Identity.of(str(video)))
    data = bytearray(file.read_bytes())
    at = {"flip-head": 30, "flip-middle": len(data) // 2, "flip-end": len(data) - 1}.get(damage)
    if at is not None:
        data[at] ^= 4
    elif damage == "old":
        data[:16] = b"gpupipe-index-0\n"
    else:
        data = {"cut": data[: len(data) // 2], "empty": bytearray(), "rubbish": bytearray(b"\xff" * 500)}[damage]
    file.write_bytes(data)
    with caplog.at_level(logging.WARNING, "gpupipe"):
        again, built = load_anew(video, monkeypatch)
    assert built
    assert same(first, again)
    assert (str(video) in caplog.text) == (damage != "old"), "an older gpupipe's index is no damage"
    assert not load_anew(video, monkeypatch)[1], "and stored whole"


def test_a_cache_folder_that_is_deleted_meanwhile_ends_nothing(tmp_path: Path) -> None:
    """Files are counted now and then, for the bound: a folder that goes just then ended the index that was being stored."""
    for name in "abc":
        (tmp_path / "cache" / name).mkdir(parents=True)
        (tmp_path / "cache" / name / "one.gpx").write_bytes(b"1")
    found = disk._files(tmp_path / "cache")
    next(found)
    shutil.rmtree(tmp_path / "cache")
    assert not list(found)
    assert disk.tidied(tmp_path / "cache", 0) == 0


def test_a_cache_that_cannot_be_written_is_no_error(video: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("GPUPIPE_CACHE", str(tmp_path / "file" / "below"))  # fails for root as well
    assert load_anew(video, monkeypatch)[0].info.frames == 60
    assert load_anew(video, monkeypatch)[1]


def test_a_full_disk_leaves_no_half_file(video: Path, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk.os, "replace", full)
    assert load_anew(video, monkeypatch)[1]
    assert not [path for path in fresh_cache.rglob("*") if path.is_file()]


def test_index_files_keep_their_bound_and_what_is_idle_makes_room(
    video: Path, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    identity = Identity.of(str(video))
    size = len(store.make(identity)[0])
    file = store.file_of(identity)
    monkeypatch.setattr(store, "_A_LOOK", 1)
    monkeypatch.setattr(store, "_full_until", -math.inf)
    monkeypatch.setenv(store.BOUND, repr(256 * 2.5 * size / 2**30))
    neighbours = [file.with_name(f"{number}.gpx") for number in range(3)]
    for neighbour in neighbours:
        neighbour.write_bytes(bytes(size))
    file.unlink()
    for neighbour in neighbours[:2]:
        os.utime(neighbour, (0, time.time() - 7 * 86400))
    assert store.make(identity)[1] == ""
    assert [path.exists() for path in neighbours] == [False, False, True], "what nobody used for a week makes room"

    neighbours[0].write_bytes(bytes(size))
    file.unlink()
    assert store.BOUND in store.make(identity)[1]
    assert not file.exists()
    assert neighbours[0].exists(), "what has been used of late stays"
    load_anew(video, monkeypatch)
    assert store.BOUND in caplog.text, "that it is not kept is told"
    monkeypatch.setattr(store, "_full_until", -math.inf)
    monkeypatch.setenv(store.BOUND, "much")
    with pytest.raises(ConfigError, match=r"GPUPIPE_INDEX_GIB='much' is no number"):
        store.make(identity)


def test_an_index_that_is_read_is_marked_as_used(video: Path, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_anew(video, monkeypatch)
    file = store.file_of(Identity.of(str(video)))
    os.utime(file, (0, time.time() - 7 * 86400))
    load_anew(video, monkeypatch)
    assert time.time() - file.stat().st_mtime < 3600


def test_the_folder_is_chosen_by_what_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUPIPE_CACHE", "/chosen")
    assert disk.cache_dir() == Path("/chosen")
    monkeypatch.delenv("GPUPIPE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert disk.cache_dir() == tmp_path / "gpupipe"
    monkeypatch.setattr(disk.os, "access", lambda *_: False)
    assert disk.cache_dir().parent == Path(tempfile.gettempdir())


def test_users_without_a_home_or_with_somebody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may run as a user that no file knows, or keep root's HOME for another user."""
    for name in ("GPUPIPE_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert disk.cache_dir().parent == Path(tempfile.gettempdir())
    monkeypatch.setenv("HOME", str(tmp_path / "closed"))
    real = os.stat

    def refused(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        if "closed" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr("os.stat", refused)
    assert disk.cache_dir().parent == Path(tempfile.gettempdir())
    monkeypatch.setenv("GPUPIPE_CACHE", "~/mine")
    assert disk.cache_dir() == tmp_path / "closed" / "mine"


def test_a_cache_that_cannot_be_written_is_told_once(
    video: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "plain").touch()
    monkeypatch.setenv("GPUPIPE_CACHE", str(tmp_path / "plain"))
    other = Path(shutil.copy(video, tmp_path / "other.mp4"))
    for path in (video, other, video):
        load_anew(path, monkeypatch)
    told = [record for record in caplog.records if "plain" in record.getMessage() and record.levelno == logging.WARNING]
    assert len(told) == 1


WRITER = """
import sys
from gpupipe.data.bytes import Identity
from gpupipe.data.index import cached
from gpupipe.data.scan import store
identity = Identity.of(sys.argv[1])
for _ in range(60):
    store.make(identity)
    assert cached(identity) is not None
"""


def test_rivals_write_the_same_index_without_harm(video: Path, fresh_cache: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(video)]) for _ in range(2)]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    files = [path for path in fresh_cache.rglob("*") if path.is_file()]
    assert files == [store.file_of(Identity.of(str(video)))], "no partial file is left"
    assert index.cached(Identity.of(str(video))) is not None


def test_names_that_are_no_utf8_work(tmp_path: Path, clips: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    odd = os.fsencode(tmp_path) + b"/caf\xe9 \xf0\x9f\x8e\xac.mp4"
    shutil.copy(clips["h264"], odd)
    path = Path(os.fsdecode(odd))
    assert load_anew(path, monkeypatch)[0].info.frames == 60
    assert not load_anew(path, monkeypatch)[1]


def test_threads_that_want_the_same_index_make_it_once(video: Path) -> None:
    made: list[Identity] = []

    def make(identity: Identity) -> tuple[bytes, str]:
        made.append(identity)
        time.sleep(0.05)  # the others arrive meanwhile
        return store.make(identity)

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda _: index.load(str(video), make), range(6)))
    assert len(made) == 1
    assert all(one is found[0] for one in found)


def test_a_bad_file_is_told_to_every_thread_that_wants_it(tmp_path: Path, fresh_cache: Path) -> None:
    (tmp_path / "empty.mp4").touch()

    def attempt(_: int) -> str:
        try:
            index.load(str(tmp_path / "empty.mp4"))
        except OpenError as error:
            return str(error)
        return "opened"

    with ThreadPoolExecutor(4) as pool:
        assert all("cannot be opened" in outcome for outcome in pool.map(attempt, range(8)))
    assert not index._being_made


def test_a_cached_index_loads_fast(tricky: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tricky / "t18_longgop.mp4"
    load_anew(path, monkeypatch)
    best = 1.0
    for _ in range(5):
        begin = time.perf_counter()
        _, built = load_anew(path, monkeypatch)
        best = min(best, time.perf_counter() - begin)
        assert not built
    assert best < 0.02, "an index of 600 packets must load in milliseconds"


class Container:
    """Gives packets until it fails, and knows how many it gave."""

    def __init__(self, packets: int) -> None:
        self.given = 0
        self._packets = packets

    def demux(self, stream: object) -> Iterator[av.Packet]:
        for _ in range(self._packets):
            self.given += 1
            yield av.Packet(5)
        raise av.error.InvalidDataError(0, "the file is cut here")


def test_packets_are_looked_at_one_at_a_time() -> None:
    container: Any = Container(100)
    next(whole_packets(container, container))
    assert container.given == 1, "a film of gigabytes must not be held in memory"


def test_packets_before_a_cut_are_kept() -> None:
    whole: Any = Container(3)
    assert len(list(whole_packets(whole, whole))) == 3
    nothing: Any = Container(0)
    with pytest.raises(av.error.InvalidDataError):
        list(whole_packets(nothing, nothing))


def test_replacing_info_keeps_an_index_comparable(video: Path) -> None:
    found = index.load(str(video))
    assert same(found, replace(found, info=replace(found.info)))
    assert not same(found, replace(found, length_size=2))


def test_a_cut_file_says_what_is_missing(tricky: Path) -> None:
    assert index.load(str(tricky / "t13_truncated.mp4")).info.damage == "120 frames promised, 73 found (a damaged packet)"
    assert index.load(str(tricky / "t01_opengop_h264.mp4")).info.damage is None


@pytest.mark.parametrize("name", ["t18_longgop.mp4", "t16_interlaced_h264.mp4"])
def test_a_scan_can_be_given_up(name: str, tricky: Path) -> None:
    asked = []
    with pytest.raises(Stopped):
        scan(Identity.of(str(tricky / name)), lambda: len(asked) > 20 or bool(asked.append(None)))
    assert len(asked) == 21
    assert scan(Identity.of(str(tricky / name))).packets.size


def test_a_new_configuration_that_cannot_be_taken_over_cuts_the_file_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a decode tells the frames: what lies behind is no packet of the index."""
    path = STREAMS["h264_two_configurations"].make(tmp_path, "h264_two_configurations")
    monkeypatch.setattr("gpupipe.data.scan.scan._CONFIGURED", ())
    for told in (True, False):
        if not told:
            monkeypatch.setattr("gpupipe.data.scan.scan._times_tell", lambda *_: False)
        found = scan(Identity.of(str(path)))
        assert len(found.packets.size) == FRAMES
        assert found.display is None or max(found.display) < FRAMES
        assert "configured anew" in found.faults[0]
        assert record(found)


@pytest.mark.parametrize("name", STREAMS)
def test_facts_told_by_headers_are_those_of_the_decoded_frame(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if STREAMS[name].codec not in av.codecs_available:
        pytest.skip(f"this PyAV has no encoder {STREAMS[name].codec}")
    identity = Identity.of(str(STREAMS[name].make(tmp_path, name)))
    told = scan(identity)
    monkeypatch.setattr("gpupipe.data.scan.scan._without_picture", lambda *_: None)
    assert told == scan(identity)

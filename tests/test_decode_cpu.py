"""Software decode: any frames in any order are those of a sequential decode, bit for bit, in every container and format."""

from __future__ import annotations

import functools
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from clips import frame_number, spoilt, write_changing_sets, write_clip
from remux import FRAGMENTED, remux

from gpupipe.data import index as indices
from gpupipe.data.decode import choose, cpu
from gpupipe.data.index import VideoIndex
from gpupipe.data.plan import make_plan
from gpupipe.data.scan.demux import whole_packets
from gpupipe.data.stop import Stopped
from gpupipe.errors import DecodeError, OpenError
from gpupipe.types import Planes

Frames = list[list[np.ndarray]]

TRICKY = (
    "t01_opengop_h264.mp4", "t02_opengop_hevc.mp4", "t05_vfr.mp4", "t06_start8s.ts", "t07_rot.mp4", "t08_smpte170m_pc.mp4",
    "t09_hevc10_pq.mp4", "t09_h264_hi10.mp4", "t10_odd_vp9.mp4", "t10_odd_h264_444.mp4", "t13_truncated.mp4",
    "t15_1frame.mp4", "t15_two_streams.mp4", "t16_interlaced_h264.mp4", "t17_av1.mp4", "t18_tiny32.mp4", "t18_intra.mp4",
)  # fmt: skip


@functools.cache
def sequential(path: Path) -> Frames:
    """Planes of every frame that PyAV gives when it plays the file from its start."""
    frames: Frames = []
    with av.open(str(path)) as container:
        stream = container.streams.best("video")
        assert isinstance(stream, av.VideoStream)
        stream.codec_context.thread_count = 1
        for packet in container.demux(stream):
            try:
                frames += [[np.array(plane) for plane in cpu.frame_planes(frame)[1]] for frame in packet.decode()]
            except av.error.FFmpegError:
                continue
    return frames


def read(index: VideoIndex, wanted: list[int], damaged: list[int] | None = None) -> Planes:
    plan = make_plan(index, wanted)
    planes = cpu.decode(index, plan, damaged=damaged)
    return Planes(planes.data[list(plan.frame_map)], planes.format)


def read_or_why(index: VideoIndex, wanted: list[int]) -> Planes | str:
    """The frames, or the text of the error that says why not."""
    try:
        return read(index, wanted)
    except DecodeError as error:
        return str(error)


def check_random_access(path: Path, *, trials: int = 6, seed: int = 0) -> VideoIndex:
    index, frames = indices.load(str(path)), sequential(path)
    count = index.info.frames
    assert len(frames) == count
    rng = random.Random(seed)
    for trial in range(trials):
        low = rng.randrange(count)
        span = range(low, min(count, low + 16)) if trial % 2 else range(count)
        wanted = [rng.choice(span) for _ in range(rng.choice([1, 3, 8]))]
        if trial == 0:
            wanted = [count - 1, 0, count - 1, count // 2]
        faulty: list[int] = []
        planes = read(index, wanted, faulty)
        assert not faulty, "nothing is called damaged that is not"
        for k, number in enumerate(wanted):
            for ours, theirs in zip((planes.y, planes.u, planes.v), frames[number], strict=True):
                assert np.array_equal(ours[k].numpy(), theirs), f"frame {number} of {wanted}"
    return index


@pytest.mark.parametrize("name", TRICKY)
def test_random_access_equals_sequential_decode(name: str, tricky: Path) -> None:
    check_random_access(tricky / name)


def test_random_access_to_a_real_film(media: Path) -> None:
    check_random_access(media / "bikes.mp4", trials=4)


def test_random_access_to_a_long_group_of_pictures(tricky: Path) -> None:
    check_random_access(tricky / "t18_longgop.mp4", trials=3)


@pytest.mark.parametrize("name", ["h264", "h264_odd", "hevc", "vp9", "vp9_odd", "mpeg4"])
def test_frames_tell_their_own_number(name: str, clips: dict[str, Path]) -> None:
    index = check_random_access(clips[name], trials=3)
    wanted = [59, 0, 31, 30, 29, 30]
    assert [frame_number(plane) for plane in read(index, wanted).y] == wanted


@pytest.mark.parametrize("codec", ["libx264", "libx265"])
def test_parameter_sets_that_come_once_amid_the_stream(codec: str, tmp_path: Path) -> None:
    index = check_random_access(write_changing_sets(tmp_path, codec), trials=8)
    assert len(index.in_force) == 2
    assert index.info.uniform
    for start in np.flatnonzero(index.start):  # each start by itself, by a decoder that has seen nothing else
        frame = int(np.flatnonzero(index.display == start)[0])
        assert frame_number(read(index, [frame]).y[0]) == frame % 40


@pytest.mark.parametrize(
    ("codec", "container", "pix_fmt"),
    [
        ("qtrle", "mov", "rgb24"),
        ("utvideo", "avi", "yuv420p"),
        ("huffyuv", "avi", "yuv422p"),
        ("rawvideo", "avi", "yuv420p"),
        ("prores", "mov", "yuv422p10le"),
        ("wmv2", "avi", "yuv420p"),
        ("ffv1", "mkv", "yuv420p"),
        ("mjpeg", "mov", "yuvj420p"),
    ],
)
def test_codecs_that_need_what_the_container_says(codec: str, container: str, pix_fmt: str, tmp_path: Path) -> None:
    path = write_clip(tmp_path / f"clip.{container}", codec, frames=24, gop=12, bframes=0, pix_fmt=pix_fmt)
    check_random_access(path, trials=3)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("x.mkv", {}),
        ("x.ts", {}),
        ("x.flv", {}),
        ("x.mov", {}),
        ("x.mp4", {"options": FRAGMENTED}),
        ("x.h264", {"format": "h264"}),
        ("live.mkv", {"options": {"live": "1"}}),
    ],
)
def test_the_container_changes_nothing(name: str, options: dict[str, Any], clips: dict[str, Path], tmp_path: Path) -> None:
    path = remux(clips["h264"], tmp_path / name, **options)
    index = check_random_access(path)
    assert index.info.frames == 60
    assert index.mapped == (not name.endswith(".ts"))
    reference = sequential(clips["h264"])
    assert np.array_equal(read(index, [41]).y[0].numpy(), reference[41][0])


@pytest.mark.parametrize(
    ("name", "codec", "options"),
    [
        ("x.ts", "libx265", {}),
        ("x.ts", "mpeg2video", {"gop": 12}),
        ("x.mpg", "mpeg2video", {"gop": 12}),
        ("x.mpg", "mpeg1video", {"gop": 12}),
        ("x.flv", "flv1", {"bframes": 0}),
        ("x.avi", "msmpeg4", {"bframes": 0}),
        ("x.wmv", "wmv2", {"bframes": 0}),
        ("x.avi", "mpeg4", {"bframes": 2}),
        ("x.webm", "libvpx", {"bframes": 0, "options": {"deadline": "realtime", "cpu-used": "8"}}),
    ],
)
def test_other_codecs_and_containers(name: str, codec: str, options: dict[str, Any], tmp_path: Path) -> None:
    fields = {"width": 128, "height": 96, "frames": 40, "gop": 20, **options}
    check_random_access(write_clip(tmp_path / name, codec, **fields))


@pytest.mark.parametrize(
    ("codec", "pix_fmt", "chroma", "bits"),
    [
        ("libx264", "yuv420p", (48, 64), 8),
        ("libx264", "yuv420p10le", (48, 64), 10),
        ("libx264", "yuv422p", (96, 64), 8),
        ("libx264", "yuv422p10le", (96, 64), 10),
        ("libx264", "yuv444p", (96, 128), 8),
        ("ffv1", "yuv420p12le", (48, 64), 12),
        ("ffv1", "yuv444p16le", (96, 128), 16),
        ("ffv1", "gray", (96, 128), 8),
        ("ffv1", "gray10le", (96, 128), 16),
        ("ffv1", "yuv411p", (96, 128), 8),
        ("ffv1", "bgr0", (96, 128), 8),
        ("ffv1", "gbrp10le", (96, 128), 16),
        ("libx264rgb", "rgb24", (96, 128), 8),
        ("png", "rgb24", (96, 128), 8),
    ],
)
def test_planes_of_every_sample_format(codec: str, pix_fmt: str, chroma: tuple[int, int], bits: int, tmp_path: Path) -> None:
    bframes = 2 if codec == "libx264" else 0
    path = tmp_path / ("x.mov" if codec == "png" else "x.mkv")
    write_clip(path, codec, width=128, height=96, frames=12, pix_fmt=pix_fmt, bframes=bframes)
    index = check_random_access(path, trials=3)
    planes = read(index, [7, 3])
    assert planes.y.shape == (2, 96, 128)
    assert planes.u.shape == planes.v.shape == (2, *chroma)
    assert planes.format.bits == bits
    assert planes.data.dtype == (torch.uint8 if bits == 8 else torch.uint16)
    luma = planes.y.to(torch.float32) / 2 ** (bits - 8)
    assert [frame_number(plane) for plane in luma] == [7, 3]
    with av.open(str(path)) as container:
        frame = list(container.decode(video=0))[7]
    if frame.format.name.startswith("yuv4") and "411" not in pix_fmt:
        assert np.array_equal(planes.y[0].numpy(), cpu.frame_planes(frame)[1][0])
    elif frame.format.is_rgb:
        rgb = frame.reformat(format="rgb48le" if bits > 8 else "rgb24").to_ndarray().astype(np.float64)
        weights = np.array([0.299, 0.587, 0.114])  # ITU-R BT.601, limited range, as the index says of RGB codecs
        expected = 16 + 219 * (rgb @ weights) / (2.0 ** max(bits, 8) - 1)
        assert np.abs(luma[0].numpy() - expected).max() < 1.1
        assert (index.info.color_matrix, index.info.color_range) == ("bt601", "limited")
    elif pix_fmt == "gray":
        expected = 16 + 219 * frame.to_ndarray().astype(np.float64) / 255  # untagged grey is full range to FFmpeg
        assert np.abs(luma[0].numpy() - expected).max() < 1.1
        assert (planes.u == 128).all()


def test_odd_sizes_keep_their_last_row_and_column(clips: dict[str, Path]) -> None:
    planes = read(indices.load(str(clips["vp9_odd"])), [10])
    assert planes.y.shape == (1, 143, 175)
    assert planes.u.shape == (1, 72, 88)


@pytest.fixture(scope="module")
def two_sizes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An H.264 stream that changes from 128x96 to 160x64 after 20 frames."""
    folder = tmp_path_factory.mktemp("two-sizes")
    parts = [
        write_clip(folder / f"{width}.h264", width=width, height=height, frames=20, gop=10)
        for width, height in ((128, 96), (160, 64))
    ]
    (folder / "both.h264").write_bytes(b"".join(part.read_bytes() for part in parts))
    return folder / "both.h264"


def test_a_change_of_size_keeps_the_video_from_nvdec(two_sizes: Path, clips: dict[str, Path]) -> None:
    info = indices.load(str(two_sizes)).info
    assert not info.uniform
    assert "changes in mid-stream" in str(choose(info, torch.device("cuda", 0)).reason)
    assert all(indices.load(str(path)).info.uniform for path in clips.values())


def test_a_change_of_size_names_the_frame(two_sizes: Path) -> None:
    index = indices.load(str(two_sizes))
    assert index.info.frames == 40
    assert (index.info.width, index.info.height) == (128, 96)
    assert read(index, [0, 19, 7]).y.shape == (3, 96, 128), "the part of the first size can be used"
    for wanted, named in (([18, 21], 21), ([25], 25), ([39, 30, 2], 30)):
        with pytest.raises(DecodeError, match=rf"frame {named} is 160x64, but the video began with 128x96") as caught:
            read(index, wanted)
        assert caught.value.path == str(two_sizes)
        assert caught.value.time_seconds == pytest.approx(index.seconds[named])


def test_a_change_of_sample_format_names_the_frame(tmp_path: Path) -> None:
    parts = [
        write_clip(tmp_path / f"{name}.h264", width=128, height=96, frames=10, pix_fmt=name) for name in ("yuv420p", "yuv444p")
    ]
    (tmp_path / "both.h264").write_bytes(b"".join(part.read_bytes() for part in parts))
    with pytest.raises(DecodeError, match=r"frame 1\d has samples of another format \(yuv444p\)"):
        read(indices.load(str(tmp_path / "both.h264")), [2, 15])


def test_a_cut_file_gives_each_frame_or_says_which_it_cannot(tricky: Path) -> None:
    index, frames = indices.load(str(tricky / "t13_truncated.mp4")), sequential(tricky / "t13_truncated.mp4")
    good = 0
    for number in range(index.info.frames):
        found = read_or_why(index, [number])
        if isinstance(found, str):
            assert f"frame {number} could not be decoded" in found
        else:
            good += np.array_equal(found.y[0].numpy(), frames[number][0])
    assert good >= 71


def test_flipped_bits_neither_crash_nor_hang(tricky: Path) -> None:
    index = indices.load(str(tricky / "t13_bitflip.mp4"))
    for number in range(0, 120, 10):
        found = read_or_why(index, [number])
        assert len(found) == 1 if isinstance(found, Planes) else f"frame {number}" in found


@pytest.mark.parametrize("name", ["h264", "mpeg4"])
def test_frames_that_damage_reaches_are_named(name: str, clips: dict[str, Path], tmp_path: Path) -> None:
    """Bits that turned inside of a picture: the container is whole, and FFmpeg patches the picture up and goes on."""
    sound = indices.load(str(clips[name]))
    count = sound.info.frames
    start = int(np.flatnonzero(sound.start)[1])  # of the second group of pictures
    index = indices.load(str(spoilt(clips[name], tmp_path / clips[name].name, start)))
    faulty: list[int] = []
    found, whole = read(index, list(range(count)), faulty), read(sound, list(range(count)))
    differ = [k for k in range(count) if not torch.equal(found.y[k], whole.y[k])]
    assert len(differ) > 20
    assert set(differ) <= set(faulty)
    assert all(index.display[frame] >= start for frame in faulty), "the other group of pictures is whole"
    for frame in (differ[0] - 1, differ[0], differ[-1]):  # alone as in the crowd
        alone: list[int] = []
        read(index, [frame], alone)
        assert alone == [frame] * (frame in faulty)


def test_a_damaged_picture_that_no_other_refers_to_spoils_no_other(clips: dict[str, Path], tmp_path: Path) -> None:
    sound = indices.load(str(clips["h264"]))
    packet = int(np.flatnonzero(sound.droppable)[3])
    faulty: list[int] = []
    read(indices.load(str(spoilt(clips["h264"], tmp_path / "x.mp4", packet))), list(range(60)), faulty)
    assert faulty == [int(np.flatnonzero(sound.display == packet)[0])]


def damaged(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    kind = rng.randrange(4)
    if kind == 0:
        return bytes(changed[: rng.randrange(len(changed))])
    if kind == 3:
        at = rng.randrange(len(changed))
        del changed[at : at + rng.randrange(1, 3000)]
    else:
        for _ in range(rng.choice([1, 5, 50])):
            changed[rng.randrange(len(changed) if kind == 1 else min(len(changed), 2000))] = rng.randrange(256)
    return bytes(changed)


@pytest.mark.parametrize("suffix", [".mp4", ".ts", ".mkv", ".avi"])
def test_random_damage_ends_in_frames_or_in_an_error_with_a_name(suffix: str, tmp_path: Path) -> None:
    source = write_clip(tmp_path / f"good{suffix}", "mpeg4" if suffix == ".avi" else "libx264", width=96, height=64, frames=30)
    data, rng, path = source.read_bytes(), random.Random(suffix), tmp_path / f"bad{suffix}"
    frames = errors = 0
    for _ in range(60):
        path.write_bytes(damaged(data, rng))
        try:
            index = indices.load(str(path))
            found = read_or_why(index, [rng.randrange(index.info.frames) for _ in range(3)])
        except OpenError as error:
            found = str(error)
        if isinstance(found, str):
            assert str(path) in found
            errors += 1
        else:
            frames += len(found)
    assert frames
    assert errors


def test_a_stream_that_appears_later_does_no_harm(clips: dict[str, Path], tmp_path: Path) -> None:
    """MPEG-TS may bring streams that its head does not announce."""
    index = indices.load(str(remux(clips["h264"], tmp_path / "x.ts")))

    class Demuxer:
        """Trips over a foreign packet twice, as PyAV does, and goes on when asked again."""

        def __init__(self) -> None:
            self.numbers = iter(range(6))

        def demux(self, stream: object) -> Any:
            for number in self.numbers:
                if number in (2, 4):
                    raise IndexError("list index out of range")
                yield av.Packet(number + 1)

    demuxer: Any = Demuxer()
    assert [packet.size for packet in whole_packets(demuxer, demuxer)] == [1, 2, 4, 6]
    assert index.info.frames == 60


@pytest.mark.parametrize("suffix", [".mp4", ".ts"])
def test_a_file_that_shrinks_after_indexing_is_named(suffix: str, clips: dict[str, Path], tmp_path: Path) -> None:
    path = remux(clips["h264"], tmp_path / f"x{suffix}")
    index = indices.load(str(path))
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises((OpenError, DecodeError), match=str(path)):
        read(index, [58])
    path.unlink()
    with pytest.raises(OpenError, match=str(path)):
        read(index, [58])


def test_a_file_replaced_after_it_was_looked_at_is_named(clips: dict[str, Path], tmp_path: Path) -> None:
    """Its packets may well decode, to pictures of another video."""
    path = shutil.copy(clips["h264"], tmp_path / "x.mp4")
    index = indices.load(str(path))
    other = shutil.copy(clips["h264"], tmp_path / "y.mp4")
    os.utime(other, ns=(0, index.identity.mtime_ns + 1))
    os.replace(other, path)
    with pytest.raises(OpenError, match="replaced or changed"):
        read(index, [5])


def test_a_file_that_cannot_seek_is_read_from_its_start(
    clips: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = remux(clips["h264"], tmp_path / "x.ts")
    index = indices.load(str(path))
    original = cpu.open_video

    class Stuck:
        """A container whose seeks fail or land at the end."""

        def __init__(self, container: Any, seek: Callable[[Any], None]) -> None:
            self._container, self._seek = container, seek

        def seek(self, *_: Any, **__: Any) -> None:
            self._seek(self._container)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._container, name)

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            self._container.close()

    def fails(_: Any) -> None:
        raise av.error.PermissionError(1, "Operation not permitted")

    def to_the_end(container: Any) -> None:
        for _ in container.demux(video=0):
            pass

    for seek in (fails, to_the_end):

        def opened(path: str, seek: Callable[[Any], None] = seek) -> Any:
            container, stream = original(path)
            return Stuck(container, seek), stream

        monkeypatch.setattr("gpupipe.data.decode.feed.open_video", opened)
        assert frame_number(read(index, [45]).y[0]) == 45


def test_no_file_stays_open(clips: dict[str, Path], tmp_path: Path) -> None:
    paths = [clips["h264"], clips["vp9"], remux(clips["h264"], tmp_path / "x.ts")]
    broken = Path(shutil.copy(clips["h264"], tmp_path / "broken.mp4"))
    index = indices.load(str(broken))
    os.truncate(broken, 2000)

    def work() -> None:
        for path in paths:
            read(indices.load(str(path)), [3, 50])
        with pytest.raises(OpenError):
            read(index, [3, 50])
        with pytest.raises(Stopped):
            cpu.decode(indices.load(str(paths[2])), make_plan(indices.load(str(paths[2])), [40]), lambda: True)

    work()
    before = os.listdir("/proc/self/fd")
    for _ in range(5):
        work()
    assert len(os.listdir("/proc/self/fd")) <= len(before)


def test_the_cpu_serves_and_says_why(clips: dict[str, Path]) -> None:
    info = indices.load(str(clips["h264"])).info
    assert choose(info, torch.device("cpu")).reason == "the device is the CPU"
    assert choose(info, torch.device("cuda", 0), "cpu").reason == "decoder='cpu' was asked for"

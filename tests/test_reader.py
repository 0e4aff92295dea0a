"""VideoReader: any frames, by number or by time, as RGB or as planes, and what is said of those that do not exist."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from clips import frame_number, write_clip

from gpupipe import VideoReader
from gpupipe.data import reader as reader_room
from gpupipe.errors import ConfigError, DecodeError, DeviceError, OpenError, SampleError


def reader(path: Path) -> VideoReader:
    return VideoReader(path, device="cpu")


@pytest.mark.parametrize("name", ["h264", "h264_odd", "hevc", "vp9", "vp9_odd", "mpeg4"])
def test_frames_come_as_asked_for(name: str, clips: dict[str, Path]) -> None:
    with reader(clips[name]) as video:
        assert len(video) == video.info.frames == 60
        wanted = [17, 3, 3, 59, -1, 0, -60, 30, 29]
        frames = video.frames(wanted)
        assert frames.dtype == torch.uint8
        assert frames.shape == (9, 3, *video.info.display_size)
        assert [frame_number(frame) for frame in frames] == [17, 3, 3, 59, 59, 0, 0, 30, 29]
        assert torch.equal(frames[1], frames[2])
        assert [frame_number(frame) for frame in video.frames(range(5, 8))] == [5, 6, 7]
        assert [frame_number(frame) for frame in video.frames(np.array([9, 4]))] == [9, 4]


@pytest.mark.parametrize(
    "key",
    [
        slice(10, 50, 4), slice(None), slice(-5, None), slice(None, None, -7), slice(50, 1000), slice(7, 7), slice(70, 80),
        slice(np.int64(3), np.int64(9)),
    ],
)  # fmt: skip
def test_a_reader_is_sliced_as_a_list(key: slice, clips: dict[str, Path]) -> None:
    video = reader(clips["h264"])
    frames = video[key]
    assert frames.dtype == torch.uint8
    assert [frame_number(frame) for frame in frames] == list(range(60))[key]
    assert frames.shape[1:] == (3, 240, 320)


def test_single_frames_are_taken_by_position(clips: dict[str, Path]) -> None:
    video = reader(clips["vp9_odd"])
    for key, number in ((0, 0), (17, 17), (-1, 59), (-60, 0), (np.int32(5), 5), (torch.tensor(6), 6)):
        frame = video[key]
        assert (frame.shape, frame.dtype, frame_number(frame)) == ((3, 143, 175), torch.uint8, number)
    assert frame_number(next(reversed(video))) == 59  # type: ignore[call-overload]


def test_what_is_no_position_or_slice_is_named(clips: dict[str, Path]) -> None:
    video = reader(clips["h264"])
    for outside in (60, -61):
        with pytest.raises(IndexError, match=f"has no frame {outside}: it has frames 0 to 59"):
            video[outside]
    wrong: Any
    for wrong in (1.5, "3", None, [1, 2], (1, 2), torch.tensor([1, 2])):
        with pytest.raises(SampleError, match="position"):
            video[wrong]
    for wrong in (slice(0, 1.5), slice("a"), slice(None, None, 0)):
        with pytest.raises(SampleError, match="is no slice of frames"):
            video[wrong]


@pytest.mark.parametrize("most", [1, 7, 45, 128])
@pytest.mark.parametrize("name", ["h264", "vp9_odd"])
def test_all_frames_come_in_order(name: str, most: int, clips: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_room, "_MOST_FRAMES", most)
    video = reader(clips[name])
    again = []
    for number, frame in enumerate(video):
        assert frame_number(frame) == number
        assert frame.untyped_storage().nbytes() == frame.numel(), "it keeps no other frame in memory"
        again.append(frame)
        if number == 3:
            assert frame_number(next(iter(video))) == 0, "each iteration has a place of its own"
    assert torch.equal(torch.stack(again), video[:])


def test_an_iteration_decodes_no_packet_twice_where_it_can_stop_at_a_start(clips: dict[str, Path]) -> None:
    """60 frames in groups of 30, read at most 45 at a time."""
    video = reader(clips["h264"])
    with pytest.MonkeyPatch.context() as context:
        context.setattr(reader_room, "_MOST_BYTES", 45 * 3 * 240 * 320)
        assert len(list(video)) == 60
    assert video._telemetry.snapshot()["packets_decoded"] == 60


def test_nothing_asked_for_is_nothing_given(clips: dict[str, Path]) -> None:
    video = reader(clips["h264"])
    assert video.frames([]).shape == (0, 3, 240, 320)
    assert video.frames_at([]).shape == (0, 3, 240, 320)
    assert video.planes([]) == []


@pytest.mark.parametrize("position", [60, -61, 10**9])
def test_a_frame_outside_is_named(position: int, clips: dict[str, Path]) -> None:
    video = reader(clips["h264"])
    for read in (video.frames, video.planes):
        with pytest.raises(SampleError, match=rf"has no frame {position}: it has frames 0 to 59") as caught:
            read([0, position])
        assert caught.value.path == str(clips["h264"])


def test_a_fraction_is_no_frame(clips: dict[str, Path]) -> None:
    for wanted in ([1.5], ["a"], "12", 3, slice(3)):
        with pytest.raises(SampleError, match="position"):
            reader(clips["h264"]).frames(wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["t05_vfr.mp4", "t06_start8s.ts"])
def test_frames_at_times_are_those_on_show(name: str, tricky: Path) -> None:
    video = reader(tricky / name)
    times = video.pts_seconds
    assert len(times) == len(video)
    assert times[0] == pytest.approx(8.333, abs=1e-3) if name.startswith("t06") else times[0] == 0
    frames = video.frames([0, 10, 20, 20])
    at = video.frames_at([times[0], times[10], times[20], (times[20] + times[21]) / 2])
    assert torch.equal(frames, at)
    just_before = video.frames_at([times[11] - 1e-4])
    assert torch.equal(just_before, frames[1:2])
    end = video.info.start_seconds + video.info.duration_seconds
    assert torch.equal(video.frames_at([end - 1e-4]), video.frames([-1]))


@pytest.mark.parametrize("time", [8.0, 0.0, -1.0, 1e6, float("nan")])
def test_a_time_outside_is_named(time: float, tricky: Path) -> None:
    with pytest.raises(SampleError, match=rf"shows nothing at {time} s: its frames are shown from 8\.333 to before 10\.333"):
        reader(tricky / "t06_start8s.ts").frames_at([9.0, time])


def test_times_are_those_of_the_container(tricky: Path) -> None:
    with av.open(str(tricky / "t05_vfr.mp4")) as container:
        times = [float(frame.pts * frame.time_base) for frame in container.decode(video=0) if frame.pts is not None]
    np.testing.assert_allclose(reader(tricky / "t05_vfr.mp4").pts_seconds, times, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "format_", "dtype"),
    [
        ("t01_opengop_h264.mp4", "yuv420p", torch.uint8),
        ("t07_rot.mp4", "yuv420p", torch.uint8),
        ("t09_hevc10_pq.mp4", "yuv420p10le", torch.uint16),
        ("t10_odd_h264_444.mp4", "yuv444p", torch.uint8),
        ("t10_odd_vp9.mp4", "yuv420p", torch.uint8),
    ],
)
def test_planes_are_those_of_the_codec(name: str, format_: str, dtype: torch.dtype, tricky: Path) -> None:
    video = reader(tricky / name)
    with av.open(str(tricky / name)) as container:
        frames = list(container.decode(video=0))
    for number, planes in zip((20, 4, 20), video.planes([20, 4, 20]), strict=True):
        frame = frames[number]
        assert frame.format.name == format_
        assert planes.y.shape == (frame.height, frame.width), "stored, not turned"
        for ours, theirs in zip(planes, frame.planes, strict=True):
            assert ours.dtype == dtype
            samples = np.frombuffer(memoryview(theirs), np.uint8 if dtype == torch.uint8 else np.uint16)
            rows = samples.reshape(theirs.height, -1)[:, : theirs.width]
            assert np.array_equal(ours.numpy(), rows)


def test_planes_are_copies_of_their_own(clips: dict[str, Path]) -> None:
    video = reader(clips["h264"])
    one, again = video.planes([5])[0], video.planes([5])[0]
    one.y.zero_()
    assert frame_number(again.y) == 5
    assert frame_number(video.planes([5])[0].y) == 5


def test_rotation_is_applied_as_ffmpeg_does(tricky: Path) -> None:
    video = reader(tricky / "t07_rot.mp4")
    frame = video.frames([12])[0]
    assert frame.shape == (3, 320, 240)
    with av.open(str(tricky / "t07_rot.mp4")) as container:
        stored = list(container.decode(video=0))[12]
    counterclockwise = stored.rotation  # degrees, from the display matrix
    assert counterclockwise == 90
    rgb = stored.to_ndarray(format="rgb24")
    right, wrong = (np.rot90(rgb, quarter).transpose(2, 0, 1).astype(int) for quarter in (1, 3))
    assert np.abs(frame.numpy() - right).mean() < 4  # swscale repeats chroma samples, the reader blends them
    assert np.abs(frame.numpy() - wrong).mean() > 20


def test_deep_video_is_scaled_to_eight_bits(tricky: Path, tmp_path: Path) -> None:
    frames = reader(tricky / "t09_hevc10_pq.mp4").frames([3, 25])
    assert frames.dtype == torch.uint8
    assert frames.float().std() > 20
    deep = reader(write_clip(tmp_path / "deep.mp4", frames=10, pix_fmt="yuv420p10le"))
    flat = reader(write_clip(tmp_path / "flat.mp4", frames=10))
    assert deep.info.bit_depth == 10
    assert (deep.frames([4]).int() - flat.frames([4]).int()).abs().float().mean() < 3


def test_what_it_says_of_itself(clips: dict[str, Path]) -> None:
    assert repr(reader(clips["h264_odd"])) == f"VideoReader('{clips['h264_odd']}', 60 frames, 178x146 h264, on cpu)"


def test_a_closed_reader_can_be_read_again(clips: dict[str, Path]) -> None:
    with reader(clips["h264"]) as video:
        first = video.frames([8])
    assert torch.equal(video.frames([8]), first)
    video.close()
    video.close()


def test_what_cannot_be_opened_or_used_is_named(clips: dict[str, Path], tricky: Path) -> None:
    with pytest.raises(OpenError, match=r"none\.mp4"):
        reader(tricky / "none.mp4")
    with pytest.raises(OpenError, match=r"audio_only\.mp4"):
        reader(tricky / "t15_audio_only.mp4")
    with pytest.raises(ConfigError, match="decoder='gpu'"):
        VideoReader(clips["h264"], decoder="gpu")  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match="device='tpu'"):
        VideoReader(clips["h264"], device="tpu")
    with pytest.raises(DecodeError, match="cannot be decoded by NVDEC: the device is the CPU"):
        VideoReader(clips["h264"], device="cpu", decoder="nvdec").frames([0])
    with pytest.raises(DecodeError, match="cannot be decoded by DALI: the device is the CPU"):
        VideoReader(clips["h264"], device="cpu", decoder="dali").frames([0])


def test_a_change_of_size_is_refused_with_the_frame(tmp_path: Path) -> None:
    parts = [write_clip(tmp_path / f"{w}.h264", width=w, height=h, frames=10).read_bytes() for w, h in ((128, 96), (96, 128))]
    (tmp_path / "both.h264").write_bytes(b"".join(parts))
    video = reader(tmp_path / "both.h264")
    assert [frame_number(frame) for frame in video.frames([0, 9])] == [0, 9]
    for read in (video.frames, video.planes):
        with pytest.raises(DecodeError, match=r"frame 14 is 96x128, but the video began with 128x96"):
            read([2, 14])
        with pytest.raises(DecodeError, match=r"frame 14"):
            read([14])


@pytest.mark.parametrize("times", [["x"], [None], "0.1x", [10**400]])
def test_times_that_are_no_numbers_are_named(times: Any, clips: dict[str, Path]) -> None:
    with VideoReader(clips["h264"], device="cpu") as reader, pytest.raises(SampleError, match="times in seconds"):
        reader.frames_at(times)


def test_a_path_that_is_none_is_named() -> None:
    with pytest.raises(ConfigError, match="path=None is not a path"):
        VideoReader(None)  # type: ignore[arg-type]


def test_a_pickled_reader_opens_the_file_anew(clips: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(clips["h264"].parent)
    with VideoReader(clips["h264"].name, device="cpu", decoder="cpu") as first:
        text = pickle.dumps(first)
        monkeypatch.chdir("/")
        with pickle.loads(text) as second, copy.copy(first) as third:
            assert torch.equal(second.frames([5]), first.frames([5]))
            assert torch.equal(third.frames([5]), first.frames([5]))
            assert (second.device, second._decoder) == (first.device, "cpu")


def test_a_spawned_loader_of_torch_reads_by_it(clips: dict[str, Path]) -> None:
    reader = VideoReader(clips["h264"], device="cpu")
    data = torch.utils.data.DataLoader(_Frames(reader), batch_size=2, num_workers=1, multiprocessing_context="spawn")
    assert torch.equal(next(iter(data)), reader.frames([0, 1]))


class _Frames(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, reader: VideoReader) -> None:
        self.reader = reader

    def __len__(self) -> int:
        return 4

    def __getitem__(self, position: int) -> torch.Tensor:
        return self.reader.frames([position])[0]

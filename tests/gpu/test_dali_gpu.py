"""DALI gives the software decoder's planes, to the bit, or the video is refused by name."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import av
import pytest
import torch
from clips import write_clip
from streams import STREAMS

from gpupipe import VideoLoader, VideoReader
from gpupipe.data import index as indices
from gpupipe.data.decode import cpu
from gpupipe.data.plan import make_plan
from gpupipe.device.inventory import package
from gpupipe.errors import DecodeError

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def needs_dali() -> None:
    found = package("nvidia.dali")
    if not found.present:
        pytest.skip(f"no DALI: {found.reason}")


def assert_equal_to_software(path: Path, wanted: list[int]) -> None:
    """Frames in any order, with repeats, bit for bit."""
    index = indices.load(str(path))
    plan = make_plan(index, wanted)
    expected = cpu.decode(index, plan)
    with VideoReader(path, device="cuda", decoder="dali") as reader:
        found = reader.planes(wanted)
    for frame, slot, ours in zip(wanted, plan.frame_map, found, strict=True):
        for name in ("y", "u", "v"):
            plane = getattr(ours, name)
            assert plane.is_cuda
            assert torch.equal(plane.cpu(), getattr(expected, name)[slot]), f"{path.name} frame {frame} plane {name}"


def frames_of(path: Path) -> int:
    return len(indices.load(str(path)).display)


def picks(frames: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    first = draw.randrange(frames - 8)
    return [draw.randrange(frames) for _ in range(6)] + list(range(first, first + 8)) + [0, frames - 1, 0]


@pytest.mark.parametrize(("name", "codec"), [("h264.mp4", "libx264"), ("hevc.mp4", "libx265")])
@pytest.mark.parametrize("height", [192, 182])
def test_made_clips_with_colour(tmp_path: Path, name: str, codec: str, height: int) -> None:
    assert_equal_to_software(write_clip(tmp_path / name, codec, height=height, gop=12, coloured=True), picks(60))


@pytest.mark.parametrize(("name", "codec"), [("vp9.webm", "libvpx-vp9"), ("vp8.webm", "libvpx")])
def test_vp8_and_vp9_are_refused(tmp_path: Path, name: str, codec: str) -> None:
    path = write_clip(tmp_path / name, codec, frames=8, bframes=0)
    with (
        VideoReader(path, device="cuda", decoder="dali") as reader,
        pytest.raises(DecodeError, match=f"{name} cannot be decoded by DALI: {name[:3]}"),
    ):
        reader.planes([0])


@pytest.mark.parametrize("name", ["bigbuckbunny.mp4", "bikes.mp4", "carphone_pristine.mp4"])
def test_real_videos(media: Path, name: str) -> None:
    assert_equal_to_software(media / name, picks(frames_of(media / name)))


@pytest.mark.parametrize("name", STREAMS)
def test_streams_of_every_structure_are_equal_or_refused(name: str, tmp_path: Path) -> None:
    stream = STREAMS[name]
    if stream.codec not in av.codecs_available:
        pytest.skip(f"this PyAV has no encoder {stream.codec}")
    path = stream.make(tmp_path, name)
    refused = ""
    try:
        assert_equal_to_software(path, picks(frames_of(path), seed=1))
    except DecodeError as error:
        refused = str(error)
    assert not refused or "cannot be decoded by DALI" in refused
    assert not refused or name not in ("h264_default", "h264_ts", "h264_mkv", "hevc_default", "hevc_ts"), refused


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("t09_h264_hi10.mp4", "yuv420p10le"), ("t09_hevc10_pq.mp4", "yuv420p10le"), ("t10_odd_vp9.mp4", "vp9"),
        ("t10_odd_h264_444.mp4", "yuv444p"), ("t16_interlaced_h264.mp4", "interlaced"), ("t17_av1.mp4", "av1"),
        ("t18_tiny32.mp4", "too small"),
    ],
)  # fmt: skip
def test_what_dali_would_change_is_refused(tricky: Path, name: str, why: str) -> None:
    with (
        VideoReader(tricky / name, device="cuda", decoder="dali") as reader,
        pytest.raises(DecodeError, match=rf"{name} cannot be decoded by DALI: .*{why}"),
    ):
        reader.planes([0])


@pytest.mark.parametrize("name", ["t05_vfr.mp4", "t06_start8s.ts", "t07_rot.mp4", "t15_two_streams.mp4", "t18_longgop.mp4"])
def test_tricky_files(tricky: Path, name: str) -> None:
    assert_equal_to_software(tricky / name, picks(frames_of(tricky / name)))


def test_two_display_sizes_of_one_coded_size_do_not_mix(tmp_path: Path) -> None:
    paths = [write_clip(tmp_path / f"{h}.mp4", width=608, height=h, frames=26, coloured=True) for h in (336, 330)]
    for path in [*paths, *reversed(paths)]:
        assert_equal_to_software(path, [0, 5])


def test_many_threads_at_once(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "a.mp4", height=192, gop=12, coloured=True)
    index = indices.load(str(path))
    expected = cpu.decode(index, make_plan(index, range(60)))
    wrong: list[object] = []

    def read(seed: int) -> None:
        wanted = picks(60, seed)
        try:
            with VideoReader(path, device="cuda", decoder="dali") as reader:
                found = [planes.v.cpu() for planes in reader.planes(wanted)]
            wrong.extend(frame for frame, v in zip(wanted, found, strict=True) if not torch.equal(v, expected.v[frame]))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_loader_makes_the_same_batches_with_dali(tmp_path: Path) -> None:
    paths = [str(write_clip(tmp_path / f"{k}.mp4", height=192, gop=12, coloured=True)) for k in range(6)]
    fields = {"clip": {"frames": 8}, "transform": {"size": 96}, "batch": 3, "device": "cuda"}
    made = {}
    for decoder in ("dali", "cpu"):
        with VideoLoader(paths, **fields, decode={"decoder": decoder}) as loader:
            batches = list(loader)
            assert {clip.decoder for batch in batches for clip in batch.clips} == {decoder}
            assert loader.stats()[f"{decoder}_clips"] == 6
        made[decoder] = torch.cat([batch.video for batch in batches])
    assert torch.equal(made["dali"], made["cpu"])

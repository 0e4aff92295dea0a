"""NVDEC gives the software decoder's bits, on every progressive stream, in any order, under any stream."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from streams import STREAMS
from test_decode_cpu import sequential

from gpupipe import VideoReader
from gpupipe.data import index as indices
from gpupipe.data.decode import DecodeEngine, Fallbacks, cpu
from gpupipe.data.plan import make_plan
from gpupipe.errors import DecodeError
from gpupipe.telemetry import Telemetry

pytestmark = pytest.mark.gpu

TRICKY = [
    "t01_opengop_h264.mp4", "t02_opengop_hevc.mp4", "t05_vfr.mp4", "t06_start8s.ts", "t07_rot.mp4", "t08_bt709_tv.mp4",
    "t08_smpte170m_pc.mp4", "t08_untagged.mp4", "t09_hevc10_pq.mp4", "t13_truncated.mp4", "t15_1frame.mp4",
    "t15_two_streams.mp4", "t18_intra.mp4", "t18_longgop.mp4",
]  # fmt: skip
SOFTWARE = [
    "t09_h264_hi10.mp4", "t10_odd_vp9.mp4", "t10_odd_h264_444.mp4", "t16_interlaced_h264.mp4", "t17_av1.mp4", "t18_tiny32.mp4",
]  # fmt: skip


MEDIA = ["bigbuckbunny.mp4", "bikes.mp4", "carphone_pristine.mp4"]


def assert_same_planes(path: Path, *, decoder: str, picks: int | None = 24, seed: int = 0) -> None:
    """Frames in random order with repeats, from both devices, bit for bit; without ``picks`` all of them in order."""
    with (
        VideoReader(path, device="cpu") as software,
        VideoReader(path, device="cuda", decoder=decoder) as hardware,  # type: ignore[arg-type]
    ):
        assert len(software) == len(hardware)
        draw = random.Random(seed)
        wanted = [draw.randrange(len(software)) for _ in range(picks or 0)] + [0, len(software) - 1, 0]
        if picks is None:
            wanted = list(range(len(software)))
        expected, found = software.planes(wanted), hardware.planes(wanted)
        for index, ours, theirs in zip(wanted, found, expected, strict=True):
            for name in ("y", "u", "v"):
                plane = getattr(ours, name)
                assert plane.is_cuda
                assert plane.dtype == getattr(theirs, name).dtype
                assert torch.equal(plane.cpu(), getattr(theirs, name)), f"{path.name} frame {index} plane {name}"


@pytest.mark.parametrize("name", ["h264", "h264_odd", "hevc", "vp9"])
def test_planes_of_made_clips_equal_software(clips: dict[str, Path], name: str) -> None:
    assert_same_planes(clips[name], decoder="nvdec")


@pytest.mark.parametrize("name", STREAMS)
def test_planes_of_streams_of_every_structure_equal_software(name: str, tmp_path: Path) -> None:
    stream = STREAMS[name]
    if stream.codec not in av.codecs_available:
        pytest.skip(f"this PyAV has no encoder {stream.codec}")  # a failure under GPUPIPE_REQUIRE_GPU
    path = stream.make(tmp_path, name)
    for seed, picks in ((0, 24), (1, 3), (2, 8), (3, 15), (0, None)):  # few picks: passes of other shapes
        assert_same_planes(path, decoder="nvdec" if stream.nvdec else "auto", picks=picks, seed=seed)


def test_parameter_sets_that_come_once_amid_the_stream(tmp_path: Path) -> None:
    from clips import write_changing_sets

    assert_same_planes(write_changing_sets(tmp_path), decoder="nvdec")


@pytest.mark.parametrize("name", TRICKY)
def test_planes_of_tricky_files_equal_software(tricky: Path, name: str) -> None:
    assert_same_planes(tricky / name, decoder="nvdec")


@pytest.mark.parametrize("name", MEDIA)
def test_planes_of_real_videos_equal_software(media: Path, name: str) -> None:
    assert_same_planes(media / name, decoder="nvdec")


@pytest.mark.parametrize("name", SOFTWARE)
def test_what_nvdec_has_not_is_decoded_on_the_cpu(tricky: Path, name: str) -> None:
    assert_same_planes(tricky / name, decoder="auto")
    with VideoReader(tricky / name, device="cuda", decoder="nvdec") as reader, pytest.raises(DecodeError, match=r"NVDEC"):
        reader.planes([0])


def test_damage_spoils_its_own_group_of_pictures_alone(tricky: Path) -> None:
    """Frames 60 to 89 are damaged. NVDEC patches them up from whatever its memory holds, which is not always the same."""
    whole = [*range(0, 60, 5), *range(90, 120, 5)]
    path = tricky / "t13_bitflip.mp4"
    with VideoReader(path, device="cuda") as hardware, VideoReader(path, device="cpu") as software:
        expected = software.planes(whole)
        for _ in range(2):
            found = dict(zip(range(0, 120, 5), hardware.planes(range(0, 120, 5)), strict=True))
            for index, theirs in zip(whole, expected, strict=True):
                for name in ("y", "u", "v"):
                    assert torch.equal(getattr(found[index], name).cpu(), getattr(theirs, name)), f"frame {index} plane {name}"


def test_decoder_is_reused_across_sizes(clips: dict[str, Path], tricky: Path) -> None:
    """One engine, videos of several sizes in turn: reconfiguring must not leave the last size behind."""
    engine = DecodeEngine(torch.device("cuda", 0), mode="nvdec", keep=2, fallbacks=Fallbacks(), telemetry=Telemetry())
    paths = [clips["h264"], clips["h264_odd"], tricky / "t01_opengop_h264.mp4", clips["hevc"], clips["vp9"], clips["h264_odd"]]
    for path in paths * 3:
        index = indices.load(str(path))
        plan = make_plan(index, [5, 20, 21])
        ours, decoder = engine.decode(index, plan)
        torch.cuda.synchronize()
        theirs = cpu.decode(index, plan)
        assert decoder == "nvdec"
        assert torch.equal(ours.y.cpu(), theirs.y), path
        assert torch.equal(ours.u.cpu(), theirs.u), path
        assert torch.equal(ours.v.cpu(), theirs.v), path
    engine.close()


def test_a_stream_that_holds_more_pictures_than_the_last_one(tmp_path: Path) -> None:
    """The parser keeps the number of surfaces of a decoder's first stream: sixteen reference frames want another."""
    few, many = (STREAMS[name].make(tmp_path, name) for name in ("h264_baseline", "h264_ref16"))
    for path in (few, many, few, many):
        assert_same_planes(path, decoder="nvdec", picks=60)


@pytest.fixture(scope="module")
def exact(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Exact]:
    """Every undamaged progressive stream of a codec that is exact, with all its frames from a sequential software decode."""
    folder = tmp_path_factory.mktemp("exact")
    paths = [
        stream.make(folder, name) for name, stream in STREAMS.items() if stream.nvdec and stream.codec in av.codecs_available
    ]
    paths += [shared / "tricky" / name for name in TRICKY if name != "t13_truncated.mp4"]
    paths += [shared / "media" / name for name in MEDIA]
    return [Exact(path) for path in paths]


class Exact:
    """A video, and what each of its planes adds up to, in a way that tells any two planes apart."""

    def __init__(self, path: Path) -> None:
        self.index = indices.load(str(path))
        frames = sequential(path)
        assert len(frames) == self.index.info.frames
        planes = [[torch.from_numpy(plane.astype(np.int32)).cuda()[None] for plane in frame] for frame in frames]
        self.sums = [[int(weighted(plane)) for plane in frame] for frame in planes]


def weighted(planes: torch.Tensor, shift: int = 0) -> torch.Tensor:
    """(N, H, W) → (N,): sums with odd weights modulo 2^64, which any one wrong sample changes."""
    samples = planes.flatten(1).to(torch.int64) >> shift
    return (samples * (torch.arange(samples.shape[1], device=samples.device) * 2654435761 * 2 + 1)).sum(1)


@pytest.mark.timeout(300)
def test_ten_thousand_random_draws_from_all_files_at_once_twice(exact: list[Exact]) -> None:
    """Ten threads, each with decoders of its own, jump from file to file; a wanted frame is never any other frame."""
    draw = random.Random(0)
    draws = []
    while sum(len(frames) for _, frames in draws) < 10_000:
        video = draw.choice(exact)
        count = video.index.info.frames
        start, step = draw.randrange(count), draw.choice([1, 1, 4, 8])
        spread = [draw.randrange(count) for _ in range(8)]
        draws.append((video, draw.choice([[min(start + step * k, count - 1) for k in range(8)], spread])))
    fallbacks = Fallbacks()

    def work(share: int) -> int:
        torch.cuda.set_device(0)
        engine = DecodeEngine(torch.device("cuda", 0), mode="nvdec", keep=4, fallbacks=fallbacks, telemetry=Telemetry())
        stream = engine.stream
        assert stream is not None
        wrong = 0
        with torch.cuda.stream(stream):
            for video, frames in draws[share::10]:
                plan = make_plan(video.index, frames)
                planes, _ = engine.decode(video.index, plan)
                samples = (planes.y, planes.u, planes.v)
                found = torch.stack([weighted(plane, planes.format.shift) for plane in samples], 1).tolist()
                wrong += sum(found[place] != video.sums[frame] for place, frame in zip(plan.frame_map, frames, strict=True))
        engine.close()
        return wrong

    for _ in range(2):
        with ThreadPoolExecutor(10) as pool:
            assert sum(pool.map(work, range(10))) == 0


@pytest.mark.parametrize("lines", [(1280, 532, 530), (640, 360, 352)])
def test_two_display_sizes_of_one_coded_size_do_not_mix(tmp_path: Path, lines: tuple[int, int, int]) -> None:
    from clips import write_clip

    width, first, second = lines
    paths = [write_clip(tmp_path / f"{height}.mp4", width=width, height=height, frames=8) for height in (first, second)]
    for path in [*paths, *reversed(paths)]:
        assert_same_planes(path, decoder="nvdec", picks=4)


@pytest.mark.parametrize("codec", ["libx264", "libx265", "libvpx-vp9"])
def test_sizes_that_share_a_decoder_do_not_mix_in_any_order(tmp_path: Path, codec: str) -> None:
    """Of one class, some of one coded size: set for one of them, a decoder must not go on so for the next."""
    from clips import write_clip

    sizes = [(192, 192), (178, 146), (192, 160), (180, 144), (176, 144), (192, 162)]  # HEVC on NVDEC begins at 144
    suffix = ".webm" if codec == "libvpx-vp9" else ".mp4"
    paths = [
        write_clip(tmp_path / f"{width}x{height}{suffix}", codec=codec, width=width, height=height, frames=12, gop=6)
        for width, height in sizes
    ]
    draw = random.Random(codec)
    more = 40 if codec == "libx264" else 6  # the others get a new decoder for each size, as their coded sizes are not known
    for path in [*paths, *reversed(paths), *(draw.choice(paths) for _ in range(more))]:
        assert_same_planes(path, decoder="nvdec", picks=2)


def test_reading_under_a_stream_of_ones_own_is_right(clips: dict[str, Path]) -> None:
    with VideoReader(clips["h264"], device="cpu") as software:
        expected = software.frames(range(0, 60, 7))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), VideoReader(clips["h264"], device="cuda") as reader:
        for _ in range(5):
            torch.cuda._sleep(5_000_000)  # the consumer's stream is busy: results must wait for their turn on it
            found = reader.frames(range(0, 60, 7))
            difference = (found.cpu().int() - expected.int()).abs().max()
            assert difference <= 1
            del found


def test_rgb_of_tricky_files_is_within_one_of_the_cpu(tricky: Path) -> None:
    for name in TRICKY + SOFTWARE:
        with VideoReader(tricky / name, device="cuda") as ours, VideoReader(tricky / name, device="cpu") as theirs:
            wanted = list(range(0, len(theirs), max(1, len(theirs) // 6)))
            found, expected = ours.frames(wanted), theirs.frames(wanted)
        assert found.shape == expected.shape
        assert (found.cpu().int() - expected.int()).abs().max() <= 1, name

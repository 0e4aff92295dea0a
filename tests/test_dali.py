"""DALI as a decoder, as far as it goes without a GPU: what it is given, what is made of its answers, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
import torch
from clips import frame_number, write_clip
from streams import STREAMS

from gpupipe.data import index as indices
from gpupipe.data.decode import Unsupported, choose, cpu, dali
from gpupipe.data.decode.dali import DaliDecoder, planes_of, refusal
from gpupipe.data.decode.feed import PacketFeed
from gpupipe.data.decode.remux import clip_file
from gpupipe.data.index import VideoIndex
from gpupipe.data.plan import Pass, make_plan
from gpupipe.data.stop import Stopped
from gpupipe.device.inventory import Package
from gpupipe.errors import DeviceMemoryError, SyncError
from gpupipe.types import PlaneFormat, Planes

GPU = torch.device("cuda", 0)


def found(monkeypatch: pytest.MonkeyPatch, reason: str | None) -> None:
    monkeypatch.setattr(dali, "package", lambda name: Package(name, "2.4.0" if reason is None else None, reason))


# What is refused


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"interlaced": True}, "interlaced"),
        ({"uniform": False}, "changes in mid-stream"),
        ({"codec": "vp9"}, "vp9: the one reader"),
        ({"codec": "mpeg4"}, "mpeg4: hardware and software need not agree"),
        ({"codec": "av1"}, "av1"),
        ({"pix_fmt": "yuv420p10le", "bit_depth": 10}, "yuv420p10le: DALI reads every picture as 4:2:0 of 8 bits"),
        ({"pix_fmt": "yuv444p"}, "yuv444p"),
        ({"width": 319}, "odd size 319x240"),
        ({"height": 239}, "odd size 320x239"),
    ],
)
def test_what_dali_would_change_is_refused_by_name(
    clips: dict[str, Path], monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], says: str
) -> None:
    found(monkeypatch, None)
    info = indices.load(str(clips["h264"])).info
    assert refusal(info, GPU) is None
    assert choose(info, GPU, "dali") == choose(replace(info, codec="hevc"), GPU, "dali")
    assert choose(info, GPU, "dali").decoder == "dali"
    reason = refusal(replace(info, **fields), GPU)
    assert reason is not None
    assert says in reason
    assert choose(replace(info, **fields), GPU, "dali").reason == reason


def test_without_a_gpu_or_dali_the_reason_is_told(clips: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    info = indices.load(str(clips["h264"])).info
    assert "the device is the CPU" in (refusal(info, torch.device("cpu")) or "")
    found(monkeypatch, "ModuleNotFoundError: No module named 'nvidia'")
    assert refusal(info, GPU) == "nvidia.dali cannot be used: ModuleNotFoundError: No module named 'nvidia'"


def test_auto_never_takes_dali(clips: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, None)
    info = indices.load(str(clips["h264"])).info
    assert {choose(info, GPU, mode).decoder for mode in ("auto", "nvdec", "cpu")} <= {"nvdec", "cpu"}


# What follows from DALI's pictures


def doubled_slowly(plane: np.ndarray) -> np.ndarray:
    """What DALI does, sample by sample, in its single precision: bilinear between the four nearest chroma samples."""
    height, width = plane.shape
    out = np.empty((2 * height, 2 * width), np.float32)
    for row, column in np.ndindex(out.shape):
        y, x = (row + 0.5) / 2 - 0.5, (column + 0.5) / 2 - 0.5
        top, left = int(np.floor(y)), int(np.floor(x))
        total = np.float32(0)
        for dy in (0, 1):
            for dx in (0, 1):
                weight = np.float32((1 - abs(top + dy - y)) * (1 - abs(left + dx - x)))
                total += weight * np.float32(plane[min(max(top + dy, 0), height - 1), min(max(left + dx, 0), width - 1)])
        out[row, column] = total * np.float32(1 / 255) * np.float32(255)
    return out


def pictures_of(planes: list[np.ndarray]) -> np.ndarray:
    """(H, W, 3) float32."""
    luma, *chroma = planes
    return np.stack([luma.astype(np.float32), *(doubled_slowly(plane) for plane in chroma)], -1)


@pytest.mark.parametrize("size", [(2, 2), (4, 2), (6, 10), (18, 12)])
def test_the_codecs_planes_follow_exactly(size: tuple[int, int]) -> None:
    height, width = size
    rng = np.random.default_rng(height)
    for high in (256, 2):  # noise of all values, and of the extremes alone
        draw = [rng.integers(0, high, shape) * (255 // (high - 1)) for shape in (size, *[(height // 2, width // 2)] * 2)]
        planes = [plane.astype(np.uint8) for plane in draw]
        parts, off = planes_of(torch.from_numpy(pictures_of(planes))[None])
        assert off < 2e-4
        for ours, given in zip(parts, planes, strict=True):
            assert ours.dtype == torch.uint8
            assert np.array_equal(ours[0].numpy(), given)


def test_rounded_or_other_chroma_shows_itself() -> None:
    """What another interpolation, or one rounded to 8 bits, gives is no whole number."""
    rng = np.random.default_rng(0)
    planes = [rng.integers(0, 256, shape).astype(np.uint8) for shape in ((16, 16), (8, 8), (8, 8))]
    picture = pictures_of(planes)
    _, off = planes_of(torch.from_numpy(picture.round())[None])
    assert off > 0.1
    assert np.abs(doubled(planes[1]) - picture[..., 1]).max() < 1e-4
    moved = np.concatenate([picture[:, :1], picture[:, :-1]], 1)
    _, off = planes_of(torch.from_numpy(moved)[None])
    assert off > 0.1


# What DALI is given


def shown_in(path: str) -> list[Any]:
    with av.open(path) as container:
        frames = [(frame.pts, cpu.frame_planes(frame)[1]) for frame in container.decode(video=0)]
    assert [pts for pts, _ in frames] == sorted(pts for pts, _ in frames)
    return [planes for _, planes in frames]


def runs(path: Path, wanted: list[int]) -> Iterator[tuple[VideoIndex, Pass, Any, dict[int, int], PacketFeed]]:
    index = indices.load(str(path))
    plan = make_plan(index, wanted)
    expected = cpu.decode(index, plan)
    with PacketFeed(index) as feed:
        for run in plan.passes:
            yield index, run, expected, plan.slots, feed


@pytest.mark.parametrize(
    "name",
    ["h264_default", "h264_pyramid_normal", "h264_intra_refresh", "h264_ts", "h264_flv", "h264_mkv", "hevc_default",
     "hevc_open_gop", "hevc_ts"],
)  # fmt: skip
def test_a_runs_file_shows_its_pictures_in_order(name: str, tmp_path: Path) -> None:
    stream = STREAMS[name]
    if stream.codec not in av.codecs_available:
        pytest.skip(f"this PyAV has no encoder {stream.codec}")
    for index, run, expected, slots, feed in runs(stream.make(tmp_path, name), [3, 4, 30, 31, 35, 70]):
        shown = index.in_show_order(run.packets)
        with clip_file(index, feed.packets(run), shown) as path:
            pictures = shown_in(path)
        assert len(pictures) == len(shown)
        for rank, packet in enumerate(shown):
            if packet in slots:
                assert np.array_equal(pictures[rank][0], expected.y[slots[packet]].numpy()), (run.first, rank)


def test_a_runs_file_has_the_parameter_sets_in_force(tmp_path: Path) -> None:
    from clips import write_changing_sets

    for index, run, expected, slots, feed in runs(write_changing_sets(tmp_path), [5, 75]):
        shown = index.in_show_order(run.packets)
        with clip_file(index, feed.packets(run), shown) as path:
            pictures = shown_in(path)
        for rank, packet in enumerate(shown):
            if packet in slots:
                assert np.array_equal(pictures[rank][0], expected.y[slots[packet]].numpy())


@pytest.mark.parametrize(
    ("ranks", "most", "expected"),
    [
        ([4], 9, [(4, 1, 1)]),
        ([0, 1, 2, 3], 9, [(0, 1, 4)]),
        ([2, 6, 10], 9, [(2, 4, 3)]),
        ([2, 6, 9], 9, [(2, 1, 8)]),
        ([0, 5, 11, 12], 6, [(0, 5, 2), (11, 1, 2)]),
        ([0, 7, 20], 1, [(0, 1, 1), (7, 1, 1), (20, 1, 1)]),
    ],
)
def test_reads_give_every_picture_wanted(ranks: list[int], most: int, expected: list[tuple[int, int, int]]) -> None:
    reads = list(dali._reads([(rank, slot) for slot, rank in enumerate(ranks)], most))
    assert [(read.first, read.stride, read.count) for read in reads] == expected
    given = {slot: read.first + number * read.stride for read in reads for number, slot in read.slots}
    assert given == dict(enumerate(ranks))


# What is made of DALI's answers


Spoil = Callable[[torch.Tensor, list[float]], tuple[torch.Tensor, list[float]]]


def doubled(plane: np.ndarray) -> np.ndarray:
    """As :func:`doubled_slowly`, in one go."""
    made = torch.from_numpy(plane.astype(np.float32))[None, None]
    made = torch.nn.functional.interpolate(made, scale_factor=2, mode="bilinear", align_corners=False)
    return (made[0, 0] * np.float32(1 / 255) * 255).numpy()


class Pipeline:
    """Stands in for DALI's on the CPU: decodes the file that it is given with PyAV, and interpolates."""

    spoil: Spoil = staticmethod(lambda video, times: (video, times))
    calls = 0

    def __init__(self, **_: Any) -> None:
        self._reader: dict[str, Any] = {}

    def __enter__(self) -> None:
        Pipeline.last = self  # type: ignore[attr-defined]

    def __exit__(self, *_: object) -> None: ...

    def set_outputs(self, *_: object) -> None: ...

    def build(self) -> None: ...

    def run(self) -> tuple[Any, ...]:
        Pipeline.calls += 1
        path, _, first, end = Path(self._reader["file_list"]).read_text().split()
        numbers = list(range(int(first), int(end), self._reader["stride"]))
        assert len(numbers) == self._reader["sequence_length"]
        shown = shown_in(path)
        pictures = [np.stack([y, doubled(u), doubled(v)], -1) for y, u, v in (shown[number] for number in numbers)]
        video = torch.from_numpy(np.stack(pictures).astype(np.float32))
        video, times = Pipeline.spoil(video, [number / 100 for number in numbers])
        return [video], [torch.tensor([0])], [torch.tensor(times)]


class Store:
    """Stands in for the frame store, with a pitch of its own."""

    def reserve(self, frames: int, layout: PlaneFormat) -> None:
        self.data = torch.zeros(frames, layout.rows, layout.width + 9, dtype=torch.uint8)

    def planes(self, frames: int, layout: PlaneFormat) -> Planes:
        return Planes(self.data, layout)


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> DaliDecoder:
    def video(**arguments: Any) -> list[str]:
        Pipeline.last._reader = arguments  # type: ignore[attr-defined]
        return ["video", "labels", "times"]

    readers = SimpleNamespace(readers=SimpleNamespace(video=video))
    module = SimpleNamespace(Pipeline=Pipeline, fn=readers, types=SimpleNamespace(YCbCr="YCbCr", FLOAT="FLOAT"))
    monkeypatch.setattr(dali, "load", lambda name: module)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(Pipeline, "spoil", Pipeline.spoil)
    stream: Any = SimpleNamespace(device_index=0, synchronize=lambda: None)
    store: Any = Store()
    return DaliDecoder(stream, store)


@pytest.fixture(scope="module")
def coloured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clip(tmp_path_factory.mktemp("dali") / "coloured.mp4", width=48, height=32, frames=48, gop=12, coloured=True)


@pytest.mark.parametrize("wanted", [[0], range(5, 21), [47, 3, 3, 20, 13], range(1, 48, 7)])
def test_planes_are_the_software_decoders(decoder: DaliDecoder, coloured: Path, wanted: list[int]) -> None:
    index = indices.load(str(coloured))
    plan = make_plan(index, list(wanted))
    expected = cpu.decode(index, plan)
    found = decoder.decode(index, plan)
    assert found.format == expected.format
    for name in ("y", "u", "v"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


def test_far_pictures_are_read_one_by_one(decoder: DaliDecoder, coloured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = indices.load(str(coloured))
    plan = make_plan(index, [0, 3, 8])
    assert len(plan.passes) == 1
    monkeypatch.setattr(dali, "_BYTES_A_READ", 12 * 48 * 32 * 2)
    before = Pipeline.calls
    found = decoder.decode(index, plan)
    assert Pipeline.calls == before + 2
    assert torch.equal(found.u, cpu.decode(index, plan).u)


def test_an_answer_of_other_pictures_is_not_taken(
    decoder: DaliDecoder, coloured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = indices.load(str(coloured))
    plan = make_plan(index, [4, 5])
    for spoil, says in (
        (lambda video, times: (video, [times[0], times[1] + 0.01]), r"of the times \[0.0.*\] for \[0.0"),
        (lambda video, times: (video[:, :-2], times), r"\(2, 30, 48, 3\) for 48x32"),
        (lambda video, times: (video.round(), times), "DALI's chroma is not as gpupipe knows it"),
    ):
        monkeypatch.setattr(Pipeline, "spoil", staticmethod(spoil))
        with pytest.raises(Unsupported, match=says):
            decoder.decode(index, plan)
    with pytest.raises(Stopped):
        decoder.decode(index, plan, lambda: True)


def test_pictures_shown_before_their_start_are_refused(decoder: DaliDecoder, tmp_path: Path) -> None:
    index = indices.load(str(STREAMS["h264_bluray"].make(tmp_path, "h264_bluray")))
    refused = 0
    for frame in range(len(index.display)):
        plan = make_plan(index, [frame])
        try:
            found = decoder.decode(index, plan)
        except Unsupported as reason:
            refused += "open group" in str(reason)
        else:
            assert torch.equal(found.y, cpu.decode(index, plan).y), frame
    assert 0 < refused < len(index.display)


@pytest.mark.parametrize("name", ["h264_default", "hevc_open_gop", "h264_all_intra"])
def test_a_run_is_long_enough_for_dali(name: str, tmp_path: Path) -> None:
    """Whatever is asked for, the file has 24 packets; and still gives the frames wanted."""
    index = indices.load(str(STREAMS[name].make(tmp_path, name)))
    for frame in range(0, len(index.display), 5):
        for run in make_plan(index, [frame]).passes:
            longer = dali._long_enough(index, run)
            assert set(run.packets) <= set(longer.packets)
            assert len(longer.packets) >= (24 if index.info.codec == "h264" else 18), "less HEVC's leading pictures"
            assert list(longer.packets) == sorted(longer.packets)
            shown = index.in_show_order(longer.packets)
            with PacketFeed(index) as feed, clip_file(index, feed.packets(longer), shown) as path:
                picture = shown_in(path)[shown.index(int(index.display[frame]))]
            assert frame_number(picture[0]) == frame


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ('Critical error:\nAssert on "x" failed: Video is too small\nC++ context', Unsupported, "failed: Video is too small"),
        ("CUDA driver API error CUDA_ERROR_OUT_OF_MEMORY (2)", DeviceMemoryError, "a.mp4"),
        ("CUDA driver API error CUDA_ERROR_INVALID_VALUE (1):\nx", Unsupported, "INVALID_VALUE"),
        ("CUDA runtime API error CUDA_ERROR_ILLEGAL_ADDRESS (700):\n x", SyncError, "ILLEGAL_ADDRESS"),
        ("", Unsupported, "no message"),
    ],
)
def test_a_failure_of_dali_is_told_in_a_line(text: str, kind: type[Exception], says: str) -> None:
    error = dali._explained(RuntimeError(text), "a.mp4")
    assert type(error) is kind
    assert says in str(error)

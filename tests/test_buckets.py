"""Batches of clips of several shapes, out of real videos: what is in them, that they repeat, and that they go on."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from clips import write_clip
from torch.nn import functional
from torch.utils.data import DataLoader

from gpupipe import Batch, VideoLoader
from gpupipe.config import LoaderConfig
from gpupipe.errors import ConfigError, DecodeError, GpupipeError
from gpupipe.types import Clip

SIZES = {"wide": (256, 96), "square": (192, 192), "tall": (96, 256)}
LENGTHS = (6, 10, 24)
OPTIONS: dict[str, Any] = {
    "clip": {"frames": 8},
    "transform": {"size": 32, "crop": "center", "dtype": "float32", "color_jitter": {"brightness": 0.3}},
    "device": "cpu",
    "decode": {"threads": 2},
    "seed": 2,
}
BUCKETS = {"frames": [4, 8, 16], "multiple": 16, "max_ratio": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eighteen videos of three lengths and three aspect ratios."""
    root = tmp_path_factory.mktemp("mixed")
    for name, (width, height) in SIZES.items():
        for length in LENGTHS:
            for copy in range(2):
                target = root / f"{name}_{length}_{copy}.mp4"
                write_clip(target, width=width, height=height, frames=length, gop=12)
    return root


def made(folder: Path | list[Any], **batch: Any) -> VideoLoader:
    options = {
        name: batch.pop(name) for name in list(batch) if name in LoaderConfig.model_fields or name in ("before", "after")
    }
    return VideoLoader(folder, **{**OPTIONS, **options}, batch={"size": 4, "buckets": BUCKETS, "last": "partial", **batch})


def shape_of(path: str) -> tuple[int, int, int]:
    """What a clip of a video should have: worked out by hand for the sizes above."""
    name, length, _ = Path(path).stem.split("_")
    frames = {6: 4, 10: 8, 24: 16}[int(length)]
    return frames, *{"wide": (16, 48), "square": (32, 32), "tall": (48, 16)}[name]


def clips_of(batch: Batch) -> dict[tuple[int, int], torch.Tensor]:
    """The clips of a batch by sample, without what fills them up."""
    found = {}
    for row, clip in enumerate(batch.clips):
        assert clip.request.shape is not None
        frames, height, width = clip.request.shape
        if "tokens" in batch:
            begin, end = batch["cu_seqlens"][row : row + 2].tolist()
            t, h, w = batch["grid"][row].tolist()
            patches = batch["tokens"][begin:end].view(t, h, w, 3, frames // t, height // h, width // w)
            found[clip.request.sample, clip.clip] = patches.permute(3, 0, 4, 1, 5, 2, 6).reshape(3, frames, height, width)
        else:
            found[clip.request.sample, clip.clip] = batch.video[row][:, :frames]
    return found


def test_each_video_gets_the_shape_that_fits_it(folder: Path) -> None:
    with made(folder) as loader:
        batches = list(loader)
    assert sum(len(batch.clips) for batch in batches) == 18
    for batch in batches:
        shapes = {clip.request.shape for clip in batch.clips}
        assert len(shapes) == 1, "stacked clips have one shape"
        assert (batch.video.shape[2:],) == tuple(shapes)
        assert batch["mask"].shape == batch["pts_seconds"].shape == (len(batch.clips), batch.video.shape[2])
        assert batch["mask"].all()
        for clip in batch.clips:
            assert clip.request.shape == shape_of(clip.path)
            assert len(clip.pick.indices) == shape_of(clip.path)[0]


def test_a_video_too_short_for_any_length_has_the_shortest_padded(folder: Path) -> None:
    with made(folder, buckets={"frames": [12, 20]}) as loader:
        for batch in loader:
            for row, clip in enumerate(batch.clips):
                length = int(Path(clip.path).stem.split("_")[1])
                assert batch.video.shape[2] == (20 if length == 24 else 12)
                assert int(batch["mask"][row].sum()) == min(length, batch.video.shape[2])


def test_shorter_clips_are_filled_up_with_zeros_that_the_mask_tells(folder: Path) -> None:
    with made(folder, layout="pad", buckets={"frames": [4, 8, 16]}, size=6) as loader, made(folder) as stacked:
        assert len(loader) == 3
        padded = [(batch, clips_of(batch)) for batch in loader]
    lengths = set()
    for batch, _ in padded:
        longest = batch.video.shape[2]
        assert longest == max(clip.request.shape[0] for clip in batch.clips if clip.request.shape)
        for row, clip in enumerate(batch.clips):
            assert clip.request.shape is not None
            frames = clip.request.shape[0]
            lengths.add((frames, longest))
            assert not batch.video[row, :, frames:].any()
            assert batch.video[row, :, :frames].any()
            assert batch["mask"][row].tolist() == [True] * frames + [False] * (longest - frames)
            assert batch["pts_seconds"][row, frames - 1 :].unique().numel() == 1
    assert any(frames < longest for frames, longest in lengths)
    assert stacked.config.batch.layout == "stack"


@pytest.mark.parametrize("layout", ["NCTHW", "NTCHW"])
def test_packed_tokens_are_what_a_patch_embedding_takes(folder: Path, layout: str) -> None:
    patch = (2, 8, 16)
    transform = {**OPTIONS["transform"], "layout": layout}
    with made(folder, layout="pack", patch=patch, size=100, max_tokens=100, transform=transform) as loader:
        packed = list(loader)
    with made(folder, size=1) as loader:
        alone = {key: clip for batch in loader for key, clip in clips_of(batch).items()}
    weight = torch.randn(5, 3, *patch)
    seen = set()
    for batch in packed:
        assert "video" not in batch
        assert batch["tokens"].shape == (int(batch["cu_seqlens"][-1]), 3 * 2 * 8 * 16)
        assert batch["cu_seqlens"].dtype == batch["grid"].dtype == torch.int32
        assert batch["tokens"].shape[0] <= 100
        for (sample, clip), video in clips_of(batch).items():
            assert torch.equal(video, alone[sample, clip]), "the same pixels as in a batch of its own"
            seen.add(sample)
        assert list(batch.lengths) == batch["cu_seqlens"].diff().tolist()
        embedded = batch["tokens"] @ weight.flatten(1).T
        for row in range(len(batch.clips)):
            begin, end = batch["cu_seqlens"][row : row + 2].tolist()
            video = clips_of(batch)[batch.clips[row].request.sample, 0]
            expected = functional.conv3d(video[None], weight, stride=patch)[0].flatten(1).T
            assert torch.allclose(embedded[begin:end], expected, atol=1e-4)
    assert len(seen) == 18
    assert any(len(batch.clips) > 2 for batch in packed)


@pytest.mark.parametrize("layout", ["stack", "pad", "pack"])
def test_a_run_of_planned_batches_goes_on_where_it_was_left(folder: Path, layout: str) -> None:
    options: dict[str, Any] = {"layout": layout, "max_tokens": 64, "patch": (1, 16, 16)}
    with made(folder, **options) as loader:
        lengths = []
        whole = []
        for epoch in range(2):
            lengths.append(len(loader))
            whole.append(list(loader))
            assert lengths[-1] == len(whole[-1]), f"the length of epoch {epoch} is exact"
    for stopped_after in range(len(whole[0]) + 1):
        with made(folder, **options) as loader:
            if stopped_after:
                loader.load_state_dict(json.loads(json.dumps(whole[0][stopped_after - 1].state)))
            rest = list(loader)
            following = list(loader)
        for mine, theirs in ((rest, whole[0][stopped_after:]), (following, whole[1])):
            assert [(batch.index, batch.clips) for batch in mine] == [(batch.index, batch.clips) for batch in theirs]
            assert all(torch.equal(one[name], other[name]) for one, other in zip(mine, theirs, strict=True) for name in one)


def test_planned_batches_go_on_under_another_number_of_ranks_and_another_budget(folder: Path) -> None:
    with made(folder, size=1) as loader:
        expected = {key: clip for batch in loader for key, clip in clips_of(batch).items()}
    first, states = [], []
    for rank in range(2):
        with made(folder, size=2, last="fill", rank=rank, world_size=2) as loader:
            iterator = iter(loader)
            first += [next(iterator) for _ in range(2)]
            states.append(loader.state_dict())
    assert states[0] == states[1]
    state = json.loads(json.dumps(states[0]))
    rest = []
    for rank in range(3):
        with made(folder, layout="pad", size=3, last="fill", rank=rank, world_size=3) as loader:
            loader.load_state_dict(state)
            rest += list(loader)
    samples = Counter(sample for batch in first + rest for sample, _ in clips_of(batch))
    assert max(samples.values()) == 1
    assert {sample for sample in samples if sample < 18} == set(range(18))
    for batch in first + rest:
        for (sample, clip), video in clips_of(batch).items():
            if sample < 18:
                assert torch.equal(video, expected[sample, clip])


def test_a_state_of_other_shapes_is_refused(folder: Path) -> None:
    with made(folder) as loader:
        amid, behind = next(iter(loader)).state, {**loader.state_dict(), "epoch": 4, "samples": 0, "ahead": [], "cuts": []}
    with made(folder, buckets={"frames": [4, 6]}) as loader:
        with pytest.raises(ConfigError, match="clips had other shapes"):
            loader.load_state_dict(amid)
        loader.load_state_dict(behind)
        assert next(iter(loader)).epoch == 4
    with VideoLoader(folder, **OPTIONS, batch=2) as loader, pytest.raises(ConfigError, match="planned from shapes"):
        loader.load_state_dict(amid)


def test_a_bad_file_is_left_out_of_the_plan_and_named(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "bad.mp4").write_bytes(b"no video")
    videos = [*sorted(folder.iterdir()), tmp_path / "bad.mp4"]
    with made(videos) as loader:
        assert set(loader.bad_files) == {str(tmp_path / "bad.mp4")}
        assert sum(len(batch.clips) for batch in loader) == 18
    assert "bad.mp4 cannot be used and is left out" in caplog.text
    with pytest.raises(GpupipeError, match=r"bad\.mp4"):
        made(videos, on_bad_file="raise")


def test_a_file_that_fails_later_is_replaced_by_one_of_its_shape(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpupipe.data.decode import cpu

    original, bad = cpu.decode, str(folder / "wide_24_0.mp4")

    def failing(index: Any, *rest: Any) -> Any:
        if index.info.path == bad:
            raise DecodeError(f"{bad} is bad", path=bad)
        return original(index, *rest)

    monkeypatch.setattr(cpu, "decode", failing)
    with made(folder) as loader:
        batches = list(loader)
    (batch,) = [batch for batch in batches if batch.substituted]
    (slot,) = [clip for clip in batch.clips if clip.request.attempt]
    assert slot.path == str(folder / "wide_24_1.mp4"), "the only other one of that shape"
    assert sum(len(batch.clips) for batch in batches) == 18


@pytest.mark.parametrize("layout", ["stack", "pad", "pack"])
def test_skipped_clips_leave_no_gap(folder: Path, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpupipe.data.decode import cpu

    original = cpu.decode

    def failing(index: Any, *rest: Any) -> Any:
        if index.info.path.endswith("_24_0.mp4"):
            raise DecodeError("bad", path=index.info.path)
        return original(index, *rest)

    with made(folder, layout=layout) as loader:
        expected = {key: clip for batch in loader for key, clip in clips_of(batch).items()}
    monkeypatch.setattr(cpu, "decode", failing)
    with made(folder, layout=layout, on_bad_file="skip") as loader:
        found = {key: clip for batch in loader for key, clip in clips_of(batch).items()}
    assert len(found) == 15
    assert all(torch.equal(clip, expected[key]) for key, clip in found.items())


def test_several_clips_of_a_video_share_its_shape_and_its_batch(folder: Path) -> None:
    with made(folder, size=6, clip={"frames": 8, "clips_per_video": 3}) as loader:
        for batch in loader:
            visits = Counter(clip.request.sample for clip in batch.clips)
            assert set(visits.values()) == {3}


def test_clips_of_planned_batches_can_be_made_again(folder: Path) -> None:
    with made(folder, after=brighten) as loader:
        batch = next(iter(loader))
        for row, record in enumerate(batch.clips):
            assert torch.equal(loader.replay(record), batch.video[row])
        paths = loader.dataset.paths
        for number, item in enumerate(DataLoader(loader.dataset, batch_size=1)):
            assert tuple(item["video"].shape[2:]) == shape_of(paths[number])


def brighten(clip: Clip) -> torch.Tensor:
    return clip.video + 0.5


def test_a_budget_alone_needs_no_buckets(folder: Path) -> None:
    clip = 3 * 8 * 32 * 32 * 4
    with VideoLoader(folder, **OPTIONS, batch={"size": 100, "max_gib": 5.5 * clip / 2**30}) as loader:
        assert loader.batch_size is None
        assert {batch.video.shape[0] for batch in loader} == {5}
        assert len(loader) == 3
        assert "3 batches, on cpu" in repr(loader)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"layout": "pack", "transform": {"size": 32, "mix": {"num_classes": 2}}}, "transform.mix mixes clips of one shape"),
        ({"transform": {"size": 32, "crop": "center", "short_side": 40}}, "short_side is fixed"),
        ({"layout": "pack", "patch": (3, 16, 16)}, r"not made up of patches of \(3, 16, 16\)"),
        ({"max_tokens": 3}, "do not fit a batch"),
    ],
)
def test_what_does_not_go_together_is_named(folder: Path, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        made(folder, **options)

"""Views of what the model sees: the file types, what they show, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image

from gpupipe import Batch, ConfigError, VideoLoader
from gpupipe.cli import main
from gpupipe.observe import show
from gpupipe.observe.view import _OUTLINE

TRANSFORM: dict[str, Any] = {
    "preset": "kinetics_train",
    "size": (24, 32),
    "affine": {"degrees": 10},
    "blur": {"kernel_size": 3},
}


@pytest.fixture
def made(clips: dict[str, Path]) -> tuple[Batch, Any]:
    with VideoLoader([str(clips["h264"])] * 3, clip={"frames": 6}, transform=TRANSFORM, batch=3, device="cpu") as loader:
        return next(iter(loader)), loader.config.transform


def test_a_sheet_has_a_source_and_a_result_for_each_frame(made: tuple[Batch, Any], tmp_path: Path) -> None:
    batch, transform = made
    sheet = show(batch, transform, tmp_path / "new" / "sheet.png", clips=2, frames=3, tile=40)
    with Image.open(tmp_path / "new" / "sheet.png") as written:
        assert np.array_equal(np.asarray(written), np.asarray(sheet))
    shown = np.asarray(sheet).astype(int)
    red = (np.abs(shown - [int(_OUTLINE[k : k + 2], 16) for k in (1, 3, 5)]).sum(2) < 30).any(1)
    lines = np.flatnonzero(np.diff(red.astype(int)) == 1)
    assert len(lines) >= 2, "an outline in the line of sources of each clip"
    assert sheet.height == 2 * (18 + 2 * 46) + 6


def test_the_outline_is_the_crop(clips: dict[str, Path]) -> None:
    transform = {"crop": "none", "hflip": 0, "size": (24, 32)}
    with VideoLoader(str(clips["h264"]), clip={"frames": 1}, transform=transform, batch=1, device="cpu") as loader:
        sheet = np.asarray(show(next(iter(loader)), loader.config.transform, tile=60))
    red = np.abs(sheet[24 : 24 + 60].astype(int) - [255, 59, 48]).sum(2) < 30
    rows, columns = np.flatnonzero(red.any(1)), np.flatnonzero(red.any(0))
    assert rows[0] <= 1
    assert rows[-1] >= 57
    assert columns[0] <= 8, "from the left edge of the picture, six pixels in"


def test_the_outline_is_the_crop_where_before_changes_the_size(clips: dict[str, Path]) -> None:
    transform = {"crop": "none", "hflip": 0, "size": (24, 32)}
    options: dict[str, Any] = {"clip": {"frames": 1}, "transform": transform, "batch": 1, "device": "cpu"}
    sheets = []
    for before in (None, lambda clip: clip.video[..., ::3, ::4]):
        with VideoLoader(str(clips["h264"]), **options, before=before) as loader:
            sheets.append(np.asarray(show(next(iter(loader)), loader.config.transform, tile=60)))
    red = [np.abs(sheet[24 : 24 + 60].astype(int) - [255, 59, 48]).sum(2) < 30 for sheet in sheets]
    assert np.array_equal(*red)


@pytest.mark.parametrize("name", ["a.gif", "b.mp4", "C.GIF"])
def test_an_animation_has_every_frame(made: tuple[Batch, Any], tmp_path: Path, name: str) -> None:
    batch, transform = made
    show(batch, transform, tmp_path / name, clips=2, tile=40)
    if name.endswith("mp4"):
        with av.open(str(tmp_path / name)) as container:
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        assert len(frames) == 6
        assert all(side % 2 == 0 for side in frames[0].shape[:2])
        assert frames[0].std() > 10
    else:
        with Image.open(tmp_path / name) as picture:
            assert picture.n_frames == 6  # type: ignore[attr-defined]


def test_draws_of_each_frame_are_shown(clips: dict[str, Path]) -> None:
    transform = TRANSFORM | {"draws": "frame"}
    with VideoLoader(str(clips["h264"]), clip={"frames": 2}, transform=transform, batch=1, device="cpu") as loader:
        sheet = np.asarray(show(next(iter(loader)), loader.config.transform, tile=60))
    assert sheet.std() > 10


def test_what_cannot_be_shown_is_named(made: tuple[Batch, Any], tmp_path: Path) -> None:
    batch, transform = made
    with pytest.raises(ConfigError, match=r"not as .*sheet\.jpeg"):
        show(batch, transform, tmp_path / "sheet.jpeg")
    with pytest.raises(ConfigError, match="does not say where its clips come from"):
        show(Batch({"video": torch.zeros(1, 3, 2, 4, 4)}), transform)


def _command(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as left:
        main(["view", *map(str, arguments), "--device", "cpu", "--frames", "4"])
    return int(left.value.code or 0)


def test_the_command_writes_and_reports(clips: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sheet.png"
    assert _command(clips["h264"], "--out", out, "--transform", "kinetics_eval", "--clips", "2", "--size", "32", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert out.exists()
    assert len(report["clips"]) == 2
    assert len(report["clips"][0]["frames"]) == 4
    assert report["clips"][0]["params"]["hflip"] is False


def test_the_command_takes_a_loaders_file(clips: dict[str, Path], tmp_path: Path) -> None:
    """Crops that come in threes, and a mix that only batches have."""
    (tmp_path / "run.yaml").write_text(
        "transform: {crop: three, size: 32, mix: {mixup: 1, num_classes: 5}}\nclip: {clips_per_video: 3}\nbatch: 3\n"
    )
    out = tmp_path / "sheet.gif"
    assert _command(clips["h264"], "--out", out, "--transform", tmp_path / "run.yaml", "--clips", "1") == 0
    assert out.exists()


@pytest.mark.parametrize(
    ("clip", "options", "steps"),
    [
        ("{frames: 3, stride: 4}", [], [4, 4]),
        ("{frames: 3, stride: 4}", ["--frames", "2"], [4]),
        ("{frames: 3, fps: 5}", ["--stride", "3"], [3, 3]),
        ("{frames: 5, sampling: uniform}", [], None),
    ],
)
def test_the_command_takes_the_clip_of_a_loaders_file(
    clip: str, options: list[str], steps: list[int] | None, clips: dict[str, Path], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "run.yaml").write_text(f"transform: {{size: 32}}\nclip: {clip}\nbatch: {{size: 6}}\n")
    arguments = [clips["h264"], "--out", tmp_path / "a.png", "--transform", tmp_path / "run.yaml", "--json", *options]
    with pytest.raises(SystemExit) as left:
        main(["view", *map(str, arguments), "--device", "cpu"])
    assert not left.value.code
    shown = [made["frames"] for made in json.loads(capsys.readouterr().out)["clips"]]
    assert len(shown) == 4
    for frames in shown:
        assert [int(step) for step in np.diff(frames)] == steps if steps is not None else len(frames) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--transform", "kinetics_evil"], "did you mean 'kinetics_eval'"),
        (["--out", "sheet.webp"], "written as .png, .gif or .mp4"),
        (["--clips", "0"], "clips"),
    ],
)
def test_mistakes_are_explained(
    clips: dict[str, Path], arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _command(clips["h264"], *arguments) == 1
    assert message in capsys.readouterr().err

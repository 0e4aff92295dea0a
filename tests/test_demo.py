"""The demo: clips whose class is the motion alone, a model that learns it, and the command from end to end."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

from gpupipe import VideoLoader
from gpupipe.cli import demo_data, main
from gpupipe.cli.demo import DemoConfig, demo
from gpupipe.cli.demo_data import MOTIONS, make_clips, render_clip, write_video
from gpupipe.cli.demo_model import TinyVideoNet
from gpupipe.cli.demo_train import accuracy, train
from gpupipe.errors import GpupipeError

FEW = {"train": 2, "val": 1, "frames": 16}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_seed_decides_every_byte(tmp_path: Path) -> None:
    first, again, other = (make_clips(tmp_path / name, seed=seed, **FEW) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    assert contents(first.folder) == contents(again.folder)
    videos = [{k: v for k, v in contents(made.folder).items() if k.endswith(".mp4")} for made in (first, other)]
    assert videos[0].keys() == videos[1].keys()
    assert not any(videos[0][name] == videos[1][name] for name in videos[0])


def test_tables_name_the_clips(tmp_path: Path) -> None:
    made = make_clips(tmp_path, **FEW)
    assert made.val.read_text().splitlines()[:3] == [
        "path,label,motion",
        "val/left/0000.mp4,0,left",
        "val/right/0000.mp4,1,right",
    ]
    assert len(made.train.read_text().splitlines()) == 1 + 2 * len(MOTIONS)
    with VideoLoader(
        made.train, clip={"frames": 2}, transform={"size": 16}, batch=4, device="cpu", columns=("motion",)
    ) as loader:
        for batch in loader:
            assert [MOTIONS[label] for label in batch["label"]] == batch.text["motion"]
            assert all(motion in path for motion, path in zip(batch.text["motion"], batch.paths, strict=True))


@pytest.mark.parametrize("number", range(4))
def test_classes_differ_by_the_motion_alone(number: int) -> None:
    """The first pictures are equal; the later ones show the same shapes on the same background, moved."""
    clips = {motion: render_clip(motion, number=number, frames=12) for motion in MOTIONS}
    first = clips["left"][0]
    for motion, clip in clips.items():
        assert np.array_equal(clip[0], first), motion
        assert not np.array_equal(clip[11], first), motion
    for one, other in ((a, b) for a in MOTIONS for b in MOTIONS if a < b):
        assert not np.array_equal(clips[one][11], clips[other][11])


def test_opposite_motions_are_one_clip_played_backwards() -> None:
    """So the order of frames, not the set of them, tells the class."""
    shape = demo_data._draw_shape(np.random.default_rng(0), 0.5)
    for forth, back in (("left", "right"), ("up", "down"), ("clockwise", "anticlockwise")):
        start, end = shape.place(forth, 0), shape.place(forth, 9)
        turn = 9 * shape.speed / shape.orbit * (1 if forth == "clockwise" else -1)
        turned = replace(shape, x=end[0], y=end[1], phase=shape.phase + turn)
        assert turned.place(back, 9) == pytest.approx(start)


@pytest.mark.parametrize(
    ("motion", "sign"), [("left", (-1, 0)), ("right", (1, 0)), ("up", (0, -1)), ("down", (0, 1))]
)  # fmt: skip
def test_straight_motions_go_where_their_name_says(motion: str, sign: tuple[int, int]) -> None:
    shape = demo_data._draw_shape(np.random.default_rng(1), 0.5)
    x, y = shape.place(motion, 5)
    assert (x - shape.x, y - shape.y) == pytest.approx((sign[0] * 5 * shape.speed, sign[1] * 5 * shape.speed))


@pytest.mark.parametrize("motion", ["clockwise", "anticlockwise"])
def test_turning_motions_turn_as_their_name_says(motion: str) -> None:
    shape = demo_data._draw_shape(np.random.default_rng(2), 0.5)
    places = np.array([shape.place(motion, frame) for frame in range(20)])
    steps = np.diff(places, axis=0)
    turn = steps[:-1, 0] * steps[1:, 1] - steps[:-1, 1] * steps[1:, 0]  # positive: clockwise, as y grows downwards
    assert (turn > 0).all() if motion == "clockwise" else (turn < 0).all()
    assert np.hypot(*steps.T) == pytest.approx(shape.speed, rel=0.05)


def test_places_are_uniform_in_every_frame() -> None:
    """Edges are joined and starts are uniform, so no place is more likely for one class than for another."""
    for motion in MOTIONS:
        draws = (demo_data._draw_shape(np.random.default_rng([7, n]), 0.5) for n in range(400))
        late = np.array([shape.place(motion, 15) for shape in draws]) % 1
        histogram = np.histogram2d(*late.T, bins=4, range=[[0, 1], [0, 1]])[0]
        assert histogram.min() > 25 - 4 * math.sqrt(25), motion


def test_splits_share_no_clip() -> None:
    assert not np.array_equal(render_clip("up", number=0, split="train")[0], render_clip("up", number=0, split="val")[0])


def test_a_finished_set_is_taken_again(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("not the maker's")
    made = make_clips(tmp_path, **FEW)
    assert not made.cached
    before = contents(tmp_path)
    assert make_clips(tmp_path, **FEW).cached

    (tmp_path / "train" / "left" / "0001.mp4").unlink()
    assert not make_clips(tmp_path, **FEW).cached, "one is missing"
    assert contents(tmp_path) == before

    assert not make_clips(tmp_path, **{**FEW, "train": 1}).cached, "other arguments"
    assert not (tmp_path / "train" / "left" / "0001.mp4").exists()
    assert (tmp_path / "mine.txt").exists()


def test_an_interrupted_set_is_not_taken_for_a_finished_one(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done == total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_clips(tmp_path, progress=interrupt, **FEW)
    assert not make_clips(tmp_path, **FEW).cached


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(GpupipeError, match="file"):
        make_clips(tmp_path / "file" / "clips", **FEW)


@pytest.mark.parametrize("missing", [(), ("libx264",)])
def test_clips_without_libx264(missing: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(av, "codecs_available", set(av.codecs_available) - set(missing))
    pictures = render_clip("right", number=0, frames=14)
    write_video(pictures, tmp_path / "clip.mp4")
    with av.open(str(tmp_path / "clip.mp4")) as container:
        assert container.streams.video[0].codec_context.name == ("mpeg4" if missing else "h264")
        decoded = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    assert decoded.shape == pictures.shape
    assert np.abs(decoded.astype(int) - pictures.astype(int)).mean() < 12


@pytest.mark.parametrize("shape", [(2, 3, 8, 56, 56), (1, 3, 2, 17, 33)])
def test_model_shapes(shape: tuple[int, ...]) -> None:
    model = TinyVideoNet(5).eval()
    assert model(torch.randn(shape)).shape == (shape[0], 5)


def test_model_sees_motion_only() -> None:
    """A clip that stands still looks like any other that does."""
    model = TinyVideoNet(6).eval()
    still = torch.rand(2, 3, 1, 32, 32).expand(2, 3, 8, 32, 32)
    one, other = model(still)
    assert torch.equal(one, other)


def test_model_learns_left_from_right(tmp_path: Path) -> None:
    made = make_clips(tmp_path, train=40, val=16, frames=16, size=48, motions=("left", "right"))
    torch.manual_seed(0)
    model = TinyVideoNet(2, width=8)
    common = {"clip": {"frames": 6, "stride": 2}, "device": "cpu"}
    transform = {"size": 40, "scale": (0.7, 1.0), "hflip": 0.0, "dtype": "float32"}
    with (
        VideoLoader(made.train, transform=transform, batch=8, **common) as loader,
        VideoLoader(made.val, transform={**transform, "crop": "none"}, batch=16, shuffle=False, **common) as held_out,
    ):
        before = accuracy(model, held_out)
        log = train(model, loader, held_out, epochs=12, stop_at=0.95)
        assert accuracy(model, held_out) == log.accuracy, "validation is repeatable"
    assert before < 0.7
    assert log.accuracy >= 0.9
    assert len(log.losses) == len(log.waits) == 10 * len(log.accuracies)
    assert log.clips == 8 * len(log.losses) == log.decoders["cpu"]


@pytest.mark.usefixtures("fresh_cache")
def test_the_command_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["demo", "--quick", "--out", str(tmp_path), "--device", "cpu", "--json"])
    out, err = capsys.readouterr()
    assert not left.value.code, err
    report = json.loads(out)
    assert report == json.loads((tmp_path / "report.json").read_text())
    assert report["ok"] is True
    assert report["epochs"] == 2
    assert report["decoders"] == {"cpu": 16 * report["steps"]}
    assert 0 <= report["wait_share"] <= 1
    assert report["clips_per_s"] > 0
    for name, least in (("contact_sheet", (560, 900)), ("training_curve", (600, 600))):
        with Image.open(report["files"][name]) as picture:
            assert picture.size >= least

    again = demo(DemoConfig.quick(out=tmp_path, device="cpu"))
    assert again["clips_made"]["cached"] is True
    assert again["accuracies"] == report["accuracies"]
    assert again["final_loss"] == pytest.approx(report["final_loss"], abs=1e-6), "the seed decides the training too"


def test_a_missed_target_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["demo", "--quick", "--epochs", "1", "--target", "1", "--out", str(tmp_path), "--device", "cpu"])
    out, err = capsys.readouterr()
    assert left.value.code == 1
    assert "below the target of 100 %" in err
    assert "accuracy" in out
    assert json.loads((tmp_path / "report.json").read_text())["ok"] is False


@pytest.mark.usefixtures("fresh_cache")
def test_own_videos_leave_a_training_s_files_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Into the same folder, as by default: the trained demo's picture, curve and report stay one set."""
    demo(DemoConfig.quick(out=tmp_path, device="cpu"))
    before = contents(tmp_path)
    with pytest.raises(SystemExit) as left:
        main(["demo", str(tmp_path / "clips" / "val.csv"), "--out", str(tmp_path), "--device", "cpu"])
    assert not left.value.code
    after = contents(tmp_path)
    assert {name: after[name] for name in before} == before
    assert after.keys() - before.keys() == {"videos_contact_sheet.png", "videos_report.json"}
    out, _ = capsys.readouterr()
    assert str(tmp_path / "videos_report.json") in out
    assert "accuracy" not in out


@pytest.mark.usefixtures("fresh_cache")
def test_what_the_demo_says_to_do_next_runs_as_printed(tmp_path: Path) -> None:
    """Pasted into a shell and into Python, from the folder where the demo ran; the name of its own is one to quote."""
    environment = {**os.environ, "PYTHONPATH": str(Path(demo_data.__file__).parents[2])}

    def run(command: str | list[str]) -> str:
        done = subprocess.run(command, shell=isinstance(command, str), cwd=tmp_path, env=environment, check=False,
                              capture_output=True, text=True, timeout=100)  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    out = run([sys.executable, "-m", "gpupipe", "demo", "--quick", "--out", "my 'demo' 🎬", "--device", "cpu"])
    tables = [tmp_path / "my 'demo' 🎬" / "clips" / f"{split}.csv" for split in ("train", "val")]
    assert all(table.read_text().startswith("path,label") for table in tables)
    printed = out.splitlines()
    command = printed[printed.index("next: a training loop on these clips, to make yours of:") + 1]
    assert "validation accuracy" in run(command)
    start = printed.index("from gpupipe import VideoLoader")
    assert "video: bfloat16[8, 3, 8, 56, 56]" in run([sys.executable, "-c", "\n".join(printed[start : start + 3])])


def test_own_videos_are_loaded_and_bad_ones_named(
    clips: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    videos = tmp_path / "videos"
    videos.mkdir()
    for name in ("h264", "vp9"):
        shutil.copy(clips[name], videos)
    (videos / "bad.mp4").write_bytes(b"no video")
    with pytest.raises(SystemExit) as left:
        main(["demo", str(videos), "--out", str(tmp_path / "out"), "--device", "cpu"])
    out, _ = capsys.readouterr()
    assert not left.value.code
    assert "1 bad files:" in out
    assert str(videos / "bad.mp4") in out
    report = json.loads((tmp_path / "out" / "videos_report.json").read_text())
    assert (report["videos"], report["clips"], report["substituted"]) == (3, 3, 1)
    assert list(report["bad_files"]) == [str(videos / "bad.mp4")]
    with Image.open(report["files"]["contact_sheet"]) as sheet:
        assert sheet.size[1] > 3 * 112
    assert not (tmp_path / "out" / "clips").exists(), "nothing is made or trained"

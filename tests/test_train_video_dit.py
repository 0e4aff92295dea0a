"""The reference trainer: what it learns, and that a run killed at any moment goes on as if nothing had happened."""

from __future__ import annotations

import argparse
import csv
import functools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import train_video_dit
import video_dit_options
import video_latents
from PIL import Image
from torch.utils.checkpoint import checkpoint
from video_dit import VideoDiT, VideoDiTConfig, flow_loss, sample
from video_latents import Latents

from gpupipe import VideoLoader, ops
from gpupipe.cli.demo_data import make_clips
from gpupipe.train import load_checkpoint

ROOT = Path(__file__).resolve().parent.parent
TINY = VideoDiTConfig(frames=4, height=16, width=8, patch=(2, 4, 4), hidden=32, depth=2, heads=2)
SIZES = {"frames": 4, "size": 16, "hidden": 32, "depth": 1, "heads": 2, "batch": 4, "micro-batch": 2, "sample-steps": 2}
STEPS, SAVE_EVERY = 30, 8
ALL_PARTS = ROOT / "samples" / "train.yaml"


@pytest.fixture(autouse=True)
def plain_ops() -> Iterator[None]:
    """Tests of the ops run their kernels in an interpreter, which takes minutes for a model."""
    with ops.use("reference"):
        yield


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_clips(tmp_path_factory.mktemp("videos"), train=3, val=1, size=32, frames=12).train


def tiny() -> VideoDiT:
    torch.manual_seed(0)
    return VideoDiT(TINY)


def test_a_new_model_says_zero_and_every_parameter_learns() -> None:
    model, video = tiny(), torch.randn(2, 3, 4, 16, 8)
    assert not model(video, torch.rand(2)).any(), "the last layer begins with zeros"
    for value in model.parameters():
        if not value.any():
            torch.nn.init.normal_(value, std=0.1)
    made = model(video, torch.tensor([0.1, 0.9]))
    assert made.shape == video.shape
    made.square().mean().backward()
    still = [name for name, value in model.named_parameters() if value.grad is None or not value.grad.any()]
    assert still == []


@pytest.mark.parametrize("reentrant", [False, True])
def test_blocks_can_be_made_again_by_either_checkpoint(reentrant: bool) -> None:
    found = []
    for again in (False, True):
        torch.manual_seed(0)
        model = tiny()
        for value in model.parameters():
            if not value.any():
                torch.nn.init.normal_(value, std=0.1)
        for block in model.blocks if again else ():
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=reentrant)
        model(torch.randn(2, 3, 4, 16, 8), torch.tensor([0.1, 0.9])).square().mean().backward()
        found.append({name: value.grad for name, value in model.named_parameters()})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_the_model_sees_time_place_and_neighbours() -> None:
    """A token's output depends on the diffusion time, on other frames and on other places of its frame."""
    model = tiny().eval()
    for value in model.parameters():
        if not value.any():
            torch.nn.init.normal_(value, std=0.1)
    video, time = torch.randn(1, 3, 4, 16, 8), torch.tensor([0.5])
    with torch.no_grad():
        made = model(video, time)[:, :, :2, :4, :4]
        assert not torch.allclose(made, model(video, time + 0.1)[:, :, :2, :4, :4], atol=1e-4)
        for part in ((slice(2, 4), slice(0, 4), slice(0, 4)), (slice(0, 2), slice(12, 16), slice(4, 8))):
            other = video.clone()
            other[(0, slice(None), *part)] += 1.0
            assert not torch.allclose(made, model(other, time)[:, :, :2, :4, :4], atol=1e-4)
        same = video[:, :, [2, 3, 0, 1]]
        swapped = model(same, time)[:, :, 2:, :4, :4]
        assert not torch.allclose(made, swapped, atol=1e-4), "rotary tables tell the first frames from the last"


def test_the_loss_is_that_of_the_velocity_and_euler_follows_it() -> None:
    video, noise = torch.randn(2, 3, 4, 16, 8), torch.randn(2, 3, 4, 16, 8)
    asked: list[tuple[torch.Tensor, torch.Tensor]] = []

    class Exact(torch.nn.Module):
        def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
            asked.append((x, time))
            return noise - video

    assert flow_loss(Exact(), video, noise, torch.tensor([0.0, 1.0])) == 0
    assert torch.equal(asked[0][0][0], video[0])
    assert torch.equal(asked[0][0][1], noise[1])
    assert torch.allclose(sample(Exact(), noise, 5), video, atol=1e-5), "the path is a straight line"
    assert [round(float(time[0]), 3) for _, time in asked[1:]] == [1.0, 0.8, 0.6, 0.4, 0.2]


def test_what_a_clip_draws_depends_on_the_clip_alone(videos: Path) -> None:
    """Not on the parts that a step is cut into, nor on the clips beside it."""
    drawn: dict[int, dict[int, torch.Tensor]] = {}
    for size in (4, 1):
        clips: dict[str, Any] = {"clip": {"frames": 4}, "transform": {"preset": "diffusion", "size": 16, "dtype": "float32"}}
        with VideoLoader(videos, **clips, batch={"size": 4, "micro_size": size}, device="cpu") as loader:
            parts = next(train_video_dit.steps_of(loader))
        assert len(parts) == 4 // size
        drawn[size] = {}
        for part in parts:
            noise, time = train_video_dit.drawn(part, seed=3)
            assert (noise.shape, time.shape) == (part.video.shape, (size,))
            assert ((time > 0) & (time < 1)).all()
            drawn[size] |= {clip.request.sample: one for clip, one in zip(part.clips, noise, strict=True)}
    assert all(torch.equal(drawn[1][key], drawn[4][key]) for key in drawn[4])
    assert len({float(one.sum()) for one in drawn[4].values()}) == 4


def options(videos: Path, out: Path, **fields: Any) -> argparse.Namespace:
    known = {name.replace("-", "_"): value for name, value in SIZES.items()} | {
        "videos": str(videos), "out": out, "steps": 6, "stride": 1, "patch": (1, 4, 4), "dtype": "float32", "lr": 1e-3,
        "master_weights": False, "warmup": 2, "clip": 1.0, "ema": 0.99, "seed": 0, "save_every": 100, "sample_every": 100,
        "device": "cpu", "reserve": None, "config": None, "vae": None, "vae_at_once": 1,
    }  # fmt: skip
    return argparse.Namespace(**known | fields)


def losses(out: Path) -> list[list[str]]:
    with (out / "losses.csv").open(newline="") as lines:
        return list(csv.reader(lines))[1:]


def test_a_step_that_is_not_finite_is_done_again_and_none_is_lost(
    videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, calls = train_video_dit.drawn, [0]

    def once(part: Any, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise, time = whole(part, seed)
        calls[0] += 1
        return (noise * float("nan") if calls[0] == 3 else noise), time  # in the second step's first part

    monkeypatch.setattr(train_video_dit, "drawn", once)
    trainer = train_video_dit.Trainer(options(videos, tmp_path))
    with trainer.loader:
        trainer.run()
    rows = losses(tmp_path)
    assert sorted(int(row[0]) for row in rows) == [1, 2, 3, 4, 5, 6]
    assert all(torch.isfinite(torch.tensor([float(value) for value in row])).all() for row in rows)
    state = load_checkpoint(tmp_path / "checkpoint.pt")["optimizer"]["state"]
    assert {int(one["step"]) for one in state.values()} == {6}, "the step was left out, and then done"


@pytest.mark.parametrize("save_every", [1, 2, 100])
def test_a_step_is_told_with_the_time_that_it_took_or_with_none(
    save_every: int, videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last steps before a checkpoint, whose figures come all at once, took 0 ms."""
    whole = train_video_dit.Trainer.train_step

    def slow(self: Any, parts: Any) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(0.05)
        return whole(self, parts)

    monkeypatch.setattr(train_video_dit.Trainer, "train_step", slow)
    trainer = train_video_dit.Trainer(options(videos, tmp_path, steps=8, save_every=save_every))
    with trainer.loader:
        trainer.run()
    lines = re.findall(r"^step (\d+): loss .*?(?:, (\d+) ms)?$", capsys.readouterr().out, re.MULTILINE)
    assert [int(step) for step, _ in lines] == list(range(1, 9))
    timed = [int(took) for _, took in lines if took]
    assert len(timed) >= 6
    assert min(timed) >= 50


def test_low_precision_parameters_train_too(videos: Path, tmp_path: Path) -> None:
    trainer = train_video_dit.Trainer(options(videos, tmp_path, dtype="bfloat16", master_weights=True, steps=2))
    with trainer.loader:
        trainer.run()
    found = load_checkpoint(tmp_path / "checkpoint.pt")
    assert found["model"]["time1.weight"].dtype == torch.bfloat16
    assert (
        found["precision"]["masters"]["time1.weight"].dtype == found["ema"]["averages"]["time1.weight"].dtype == torch.float32
    )
    with Image.open(tmp_path / "samples-000002.gif") as picture:
        assert (picture.n_frames, picture.size) == (4, (64, 16))  # type: ignore[attr-defined]


def test_latents_are_encoded_beside_the_training_a_few_clips_at_a_time(
    videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the step would wait for the autoencoder, and its memory would grow with the batch."""
    pytest.importorskip("diffusers")
    asked: list[tuple[str, int]] = []
    whole = Latents.encode

    def seen(self: Latents, video: torch.Tensor) -> torch.Tensor:
        encode = self.vae.encode

        def one(part: torch.Tensor) -> Any:
            asked.append((threading.current_thread().name, len(part)))
            return encode(part)

        self.vae.encode = one
        try:
            return whole(self, video)
        finally:
            self.vae.encode = encode

    monkeypatch.setattr(Latents, "encode", seen)
    given = {"vae": "random", "vae_at_once": 2, "frames": 5, "patch": None, "micro_batch": None, "steps": 2}
    trainer = train_video_dit.Trainer(options(videos, tmp_path, **given))
    assert trainer.config == VideoDiTConfig(2, 4, 4, (1, 2, 2), 32, 1, 2, channels=4)
    with trainer.loader:
        trainer.run()
    assert {name for name, _ in asked} == {"gpupipe-prepare"}
    assert {clips for _, clips in asked} == {2}, "batches of 4 clips"
    with Image.open(tmp_path / "samples-000002.gif") as picture:
        assert (picture.n_frames, picture.size) == (5, (64, 16)), "decoded to pixels"  # type: ignore[attr-defined]
    with pytest.raises(SystemExit, match="of another model"):
        train_video_dit.Trainer(options(videos, tmp_path, **given | {"vae": None, "frames": 2})).load()


def test_latents_are_those_of_the_autoencoder_normalised() -> None:
    pytest.importorskip("diffusers")
    shifted = {"latents_mean": [1.0, 0, 0, 0], "latents_std": [2.0, 1, 1, 1]}
    plain, other = (Latents("random", torch.device("cpu"), at_once) for at_once in (1, 3))
    video = torch.rand(3, 3, 5, 16, 24) * 2 - 1
    made = plain.encode(video)
    assert tuple(made.shape[1:]) == plain.shape(5, 16, 24) == (4, 2, 4, 6)
    torch.testing.assert_close(other.encode(video), made, atol=1e-5, rtol=1e-4)  # the same sums, in another order
    assert plain.decode(made).shape == video.shape
    moved = Latents("random", torch.device("cpu"), **video_latents.TINY | shifted)
    torch.testing.assert_close(moved.encode(video)[:, 0] * 2 + 1, made[:, 0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(moved.decode(moved.encode(video)), plain.decode(made), atol=1e-4, rtol=1e-4)
    for frames, height in ((4, 16), (5, 18)):
        with pytest.raises(SystemExit, match=r"takes 4 n \+ 1 frames of 4 n x 4 m pixels"):
            plain.shape(frames, height, 16)


def test_latents_without_diffusers_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(SystemExit, match="pip install diffusers"):
        Latents("random", torch.device("cpu"))


def test_the_command_line_goes_before_the_file_and_the_file_before_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def parsed(*arguments: str) -> argparse.Namespace:
        monkeypatch.setattr(sys, "argv", ["train_video_dit.py", *arguments])
        return video_dit_options.parse("")

    file = tmp_path / "run.yaml"
    file.write_text(
        "gpupipe: {clip: {frames: 6, stride: 3}, seed: 5, mixed_precision: fp16, recompute: block}\n"
        "video_dit: {hidden: 96, save-every: 7, out: there}\n"
    )
    found = parsed("--config", str(file), "--hidden", "64", "--stride", "1")
    assert (found.hidden, found.save_every, found.out, found.depth) == (64, 7, Path("there"), 4)
    settings = video_dit_options.loader_settings(found)
    assert settings == {"config": file, "clip": {"stride": 1}}
    precision, step = video_dit_options.step_settings(found, torch.device("cpu"))
    assert (precision.dtype, step.recompute, step.cuda_graph) == ("float16", "block", None)
    assert video_dit_options.step_settings(parsed("--dtype", "bfloat16"), torch.device("cpu"))[0].dtype == "bfloat16"
    file.write_text("video_dit: {hiden: 96}")
    with pytest.raises(SystemExit):
        parsed("--config", str(file))
    assert "video_dit has hiden, which is no option" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parsed("--batch", "0")
    assert "--batch takes a number from 1 on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nothere/"], "nothere/ does not exist"),
        (["--config", "nope.yaml"], "nope.yaml cannot be read"),
        (["--hidden", "100", "--heads", "3"], "give a multiple of 6"),
        (["VIDEOS", "--vae", "nope"], "--vae nope: "),
        (["VIDEOS", "--frames", "4", "--size", "30"], "clips of 4 x 30 x 30 (frames, rows, columns) are not filled by patches"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(
    arguments: list[str], says: str, videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """With the exit code of a wrong command line, and no traceback."""
    if "--vae" in arguments:
        pytest.importorskip("diffusers")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    given = [str(videos) if argument == "VIDEOS" else argument for argument in arguments]
    monkeypatch.setattr(sys, "argv", ["train_video_dit.py", *given, "--device", "cpu"])
    with pytest.raises(SystemExit) as ended:
        train_video_dit.main()
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_a_budget_of_memory_is_planned_behind_the_first_step(
    videos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before it the optimizer has no state yet, and the plan would be of too little."""
    file = tmp_path / "run.yaml"
    file.write_text("gpupipe: {clip: {frames: 4}, batch: 4, transform: {preset: diffusion, dtype: float32}, recompute: 4.0}")
    trainer = train_video_dit.Trainer(options(videos, tmp_path, config=file, steps=2, depth=2))
    with trainer.loader:
        trainer.run()
    out = capsys.readouterr().out
    assert "2 blocks: 2 none; about 2." in out
    assert out.index("2 blocks") < out.index("step 1:")


class Started:
    """The sample as a user starts it, once a rank."""

    def __init__(self, videos: Path, out: Path, ranks: int, device: str = "cpu", config: Path | None = None) -> None:
        sizes = SIZES if config is None else {"depth": 1, "sample-steps": 2}  # the file has the rest
        arguments = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
        arguments += [] if config is None else ["--config", str(config)]
        arguments += ["--steps", str(STEPS), "--save-every", str(SAVE_EVERY), "--stride", "1", "--device", device]
        command = [sys.executable, str(ROOT / "samples" / "train_video_dit.py"), str(videos), "--out", str(out)]
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        common = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        if device == "cpu":
            common["GPUPIPE_OPS"] = "reference"
        if ranks > 1:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": str(ranks)}
        out.mkdir(exist_ok=True)
        self._log = out / "log.txt"
        self.processes = []
        for rank in range(ranks):
            told = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
            with self._log.open("a") as log:
                self.processes.append(
                    subprocess.Popen(
                        [*command, *arguments, "--deterministic"],
                        env={**common, **told},
                        stdout=subprocess.PIPE if rank == 0 else log,
                        stderr=log,
                        text=True,
                    )
                )

    def lines(self) -> Iterator[str]:
        """What the first rank prints."""
        out = self.processes[0].stdout
        assert out is not None
        yield from out

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        assert self.processes[0].stdout is not None
        self.processes[0].stdout.close()

    def end(self) -> list[str]:
        """Waits until all is done; the lines printed."""
        try:
            printed = list(self.lines())
            codes = [process.wait(100) for process in self.processes]
        finally:
            self.kill()
        # Threads of gloo abort a process that ends by itself now and then, when all is done.
        assert codes[0] == 0 or len(codes) > 1, self._log.read_text()
        return printed


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("ranks", "device", "config"),
    [
        (1, "cpu", None),
        (2, "cpu", None),
        (1, "cpu", ALL_PARTS),
        pytest.param(1, "cuda", None, marks=pytest.mark.gpu),
        pytest.param(1, "cuda", ALL_PARTS, marks=pytest.mark.gpu),
    ],
)
def test_a_run_that_was_killed_goes_on_to_the_bit(
    ranks: int, device: str, config: Path | None, videos: Path, tmp_path: Path
) -> None:
    """With all parts together, too: latents, encoded ahead, in two parts a step, by graphs where there is a GPU."""
    if config is not None:
        pytest.importorskip("diffusers")
    whole, killed = (Started(videos, tmp_path / name, ranks, device, config) for name in ("whole", "killed"))
    for line in killed.lines():
        if line.startswith("checkpoint"):
            break
    killed.kill()
    whole.end()
    assert len(losses(tmp_path / "killed")) < STEPS
    printed = Started(videos, tmp_path / "killed", ranks, device, config).end()
    begun = int(printed[0].removeprefix("goes on behind step "))
    assert begun % SAVE_EVERY == 0, printed[0]
    rows = losses(tmp_path / "whole")
    assert [int(row[0]) for row in rows] == list(range(1, STEPS + 1))
    assert losses(tmp_path / "killed") == rows, "losses and norms, all digits"
    one, other = (load_checkpoint(tmp_path / name / "checkpoint.pt") for name in ("whole", "killed"))
    assert one["loader"] == other["loader"]
    for part in ("model", "ema", "optimizer"):
        assert same(one[part], other[part]), part
    pictures = [(tmp_path / name / f"samples-{STEPS:06d}.gif").read_bytes() for name in ("whole", "killed")]
    assert pictures[0] == pictures[1]
    assert one["loader"]["world_size"] == ranks


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("asked", "by"),
    [((1,), signal.SIGTERM), ((1, 0), signal.SIGTERM), ((0,), signal.SIGINT)],
    ids=["one", "one after the other", "Ctrl-C"],
)
def test_ranks_asked_to_end_at_different_steps_end_together(
    asked: tuple[int, ...], by: signal.Signals, videos: Path, tmp_path: Path
) -> None:
    """Else one would save, or leave, while the others wait for its gradients."""
    run = Started(videos, tmp_path, 2)
    waiting = list(asked)
    printed = []
    try:
        for line in run.lines():
            printed.append(line)
            if line.startswith("step") and waiting:
                run.processes[waiting.pop(0)].send_signal(by)
        codes = [process.wait(60) for process in run.processes]
    finally:
        run.kill()
    assert codes[0] in (0, -signal.SIGABRT), "gloo's threads abort a process now and then that has ended"
    done = [int(line.split()[1].rstrip(":")) for line in printed if line.startswith("step")]
    assert done[-1] < STEPS, "nobody heard"
    assert done == list(range(1, len(done) + 1))
    assert f"checkpoint behind step {done[-1]}\n" in printed
    found = load_checkpoint(tmp_path / "checkpoint.pt")
    assert found["step"] == done[-1]
    assert found["loader"]["world_size"] == 2


def same(one: Any, other: Any) -> bool:
    """Equal to the bit, tensors and all."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)

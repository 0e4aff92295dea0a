"""The samples run as their docstrings say."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpupipe import VideoLoader

ROOT = Path(__file__).resolve().parent.parent


def run(sample: str, *arguments: str | Path, cwd: Path) -> str:
    command = [sys.executable, str(ROOT / "samples" / sample), *(str(argument) for argument in arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("samples")
    out = run("make_data.py", "data", "--train", "4", "--val", "1", cwd=folder)
    assert "left, right, up, down, clockwise, anticlockwise" in out
    return folder


@pytest.mark.parametrize("sample", sorted((ROOT / "samples").glob("*.py")), ids=lambda path: path.name)
def test_help_tells_defaults(sample: Path) -> None:
    """Read from the source: some samples import trainers that are not here."""
    calls = [node for node in ast.walk(ast.parse(sample.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    options = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"]
    for option in options:
        given = {keyword.arg: keyword.value for keyword in option.keywords}
        if "default" in given:
            name = ast.unparse(option.args[0])
            assert "help" in given, name
            assert "default" in ast.unparse(given["help"]), name


def test_iterate(data: Path) -> None:
    out = run("01_iterate.py", "data/train.csv", "--device", "cpu", "--batches", "2", cwd=data)
    assert out.count("Batch(epoch 0") == 2
    assert "video: bfloat16[4, 3, 16, 112, 112]" in out
    assert "0.00 s to" in out


def test_iterate_tells_of_bad_files(data: Path) -> None:
    (data / "bad.mp4").write_bytes(b"no video")
    out = run("01_iterate.py", "data/val/up", "bad.mp4", "--device", "cpu", cwd=data)
    assert "could not use bad.mp4" in out


def test_train_loop(data: Path) -> None:
    out = run("02_train_loop.py", "data", "--epochs", "2", "--device", "cpu", cwd=data)
    lines = out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["epoch 0", "epoch 1"]
    assert all("validation accuracy" in line for line in lines)


def test_train_loop_names_the_table_it_misses(data: Path) -> None:
    command = [sys.executable, str(ROOT / "samples" / "02_train_loop.py"), "data/train"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, cwd=data, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert "data/train has no train.csv: give the folder of make_data.py" in done.stderr


def test_fuse_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("diffusers")
    monkeypatch.setenv("GPUPIPE_OPS", "reference")  # Triton's interpreter would take minutes
    out = run("fuse_a_model.py", "--steps", "10", "--device", "cpu", cwd=tmp_path)
    assert "blocks.*.attn1 x2" in out
    assert "largest difference of losses" in out
    assert "step 10: loss" in out
    assert "as written 0" in out


def test_the_sample_configuration_is_one(clips: dict[str, Path]) -> None:
    with VideoLoader([clips["h264"]] * 8, config=ROOT / "samples" / "loader.yaml", device="cpu", batch=2) as loader:
        assert loader.config.clip.fps == 10
        assert loader.batch_size == 2
        assert next(iter(loader)).video.shape == (2, 3, 16, 224, 224)

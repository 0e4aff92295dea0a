"""Videos for the trainers."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from gpupipe.cli.demo_data import make_clips


@pytest.fixture(scope="session")
def rows(clips: dict[str, Path]) -> list[dict[str, Any]]:
    names = ("h264", "vp9_odd", "mpeg4", "h264_odd", "hevc")
    return [{"path": str(clips[names[k % 5]]), "label": k % 3} for k in range(10)]


@pytest.fixture(scope="session")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as samples/make_data.py makes it: 24 clips to train on, 12 to validate."""
    return make_clips(tmp_path_factory.mktemp("data"), train=4, val=2).folder


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torchrun tells the only process of a run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    told = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**told, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)

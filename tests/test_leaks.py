"""The leak watch: growth that lasts is found and named, what comes and goes, jumps or peters out is not."""

from __future__ import annotations

import itertools
import logging
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gpupipe.errors import ConfigError, MemoryLeakError
from gpupipe.train import LeakWatch
from gpupipe.train.memory import leaks as room
from gpupipe.train.memory.leaks import lines_of
from gpupipe.train.memory.tensors import Census, census

MB = 10**6
QUICK: dict[str, Any] = {"warmup_steps": 10, "window_steps": 10, "windows": 3, "least_growth": "1MB"}


def watched(figures: Callable[[int], float], steps: int, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> LeakWatch:
    """A watch that has seen so many steps of given figures, in MB. What it takes to name what grows is left out."""
    monkeypatch.setattr(room, "census", lambda device: Census())
    numbers = itertools.count(1)
    watch = LeakWatch(QUICK | settings, "cpu", held=lambda: int(figures(next(numbers)) * MB))
    for _ in range(steps):
        watch.after()
    return watch


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("steady", lambda n, noise: 500.0),
        ("noise", lambda n, noise: 500 + 20 * noise()),
        ("a sawtooth within a window", lambda n, noise: 500 + 10 * (n % 8)),
        ("a sawtooth over windows", lambda n, noise: 500 + (n % 35)),
        ("growth in the warm-up", lambda n, noise: 100.0 * min(n, 10)),
        ("one jump", lambda n, noise: 500 + (300 if n > 57 else 0) + noise()),
        ("two jumps", lambda n, noise: 500 + 50 * (n // 230) + noise()),
        ("a cache that fills up", lambda n, noise: 500 + 200 * (1 - math.exp(-n / 12))),
        ("shrinking", lambda n, noise: 900 - n),
    ],
)
def test_what_is_no_leak_is_not_told(name: str, figures: Any, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = random.Random(seed).random
    assert watched(lambda n: figures(n, noise), 600, monkeypatch).leak is None


@pytest.mark.parametrize(
    ("name", "figures", "by"),
    [
        ("each step", lambda n, noise: 500 + 0.2 * n, 60),
        ("every seventh step", lambda n, noise: 500 + 2.0 * (n // 7), 80),
        ("below a sawtooth", lambda n, noise: 500 + 10 * (n % 8) + n, 60),
        ("slow", lambda n, noise: 500 + 0.01 * n, 150),
        ("every 130 steps", lambda n, noise: 500 + 50 * (n // 130) + noise(), 1300),
        ("slow beside noise", lambda n, noise: 500 + 0.05 * n + 4 * noise(), 1200),
    ],
)
def test_what_goes_on_growing_is_told(name: str, figures: Any, by: int, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = random.Random(0).random
    leak = watched(lambda n: figures(n, noise), by, monkeypatch).leak
    assert leak is not None
    assert leak.step <= by
    slope = (figures(10**6, lambda: 0.0) - figures(0, lambda: 0.0)) * MB / 10**6
    assert leak.bytes_a_step == pytest.approx(slope, rel=0.6)


def test_small_growth_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert watched(lambda n: 500 + 0.2 * n, 110, monkeypatch, least_growth="20MB").leak is None
    assert watched(lambda n: 500 + 0.2 * n, 150, monkeypatch, least_growth="20MB").leak is not None


class Trainer:
    """A loop with a leak of the user's making."""

    def __init__(self, leak: str) -> None:
        self.leak = leak
        self.model = nn.Linear(64, 64)
        self.losses: list[torch.Tensor] = []
        self.seen: dict[int, torch.Tensor] = {}
        self.notes: list[Any] = []
        self.held = 0

    def step(self, number: int) -> None:
        loss = self.model(torch.ones(16, 64)).square().mean()
        loss.backward()
        self.model.zero_grad()
        if self.leak == "graph":
            self.losses.append(self.model(torch.ones(32, 64)).square().mean())
        elif self.leak == "tensor":
            self.seen[number] = torch.ones(33, 64)
        elif self.leak == "objects":
            self.notes.append({number: [number]})
        self.held += MB // 10  # stands for resident memory, of which a test's own is too little to see


@pytest.mark.parametrize(
    ("leak", "names"),
    [
        ("graph", ["tensors of a scalar float32 with a graph (MeanBackward)", "held by Trainer.losses, a list of"]),
        ("tensor", ["10 tensors of 33x64 float32, 0.0845 MB, held by Trainer.seen, a dict of"]),
        ("objects", ["more objects:", " dict"]),
        ("elsewhere", ["no Python object was found that grows"]),
    ],
)
def test_what_grows_is_named_with_who_holds_it(leak: str, names: list[str], caplog: pytest.LogCaptureFixture) -> None:
    many = [torch.ones(1, size) for size in range(1, 60)]  # of whose kinds the watch's own notes are none that grow
    trainer = Trainer(leak)
    watch = LeakWatch(QUICK, "cpu", held=lambda: trainer.held)
    with caplog.at_level(logging.WARNING, logger="gpupipe"):
        told = []
        for number in range(100):
            trainer.step(number)
            told.append(watch.after())
    assert sum(each is not None for each in told) == 1, "once"
    (line,) = [record.message for record in caplog.records if "memory grows" in record.message]
    for name in ["memory grows by 0.1 MB a step", *names]:
        assert name in line
    watch.close()
    del many


def test_a_list_in_the_loop_itself_is_named() -> None:
    kept = []
    watch = LeakWatch(QUICK | {"action": "raise"}, "cpu", held=lambda: len(kept) * MB)

    def loop() -> None:
        for _ in range(100):
            kept.append(torch.ones(7, 3))
            watch.after()

    with pytest.raises(MemoryLeakError, match=r"tensors of 7x3 float32, .*held by kept in loop\(\), a list of") as caught:
        loop()
    assert "detach" in (caught.value.fix or "")
    assert len(kept) < 80
    watch.after()  # goes on, for who catches it


@pytest.fixture
def resident() -> Iterator[list[bytearray]]:
    held: list[bytearray] = []
    yield held
    held.clear()


def test_resident_memory_is_watched_on_the_cpu(resident: list[bytearray]) -> None:
    """The process's own, so that what no tensor holds is found too."""
    watch = LeakWatch({"warmup_steps": 2, "window_steps": 2, "windows": 2, "least_growth": "16MB"}, "cpu")
    for _ in range(30):
        resident.append(bytearray(b"x") * (8 << 20))
        if watch.after():
            break
    assert watch.leak is not None
    assert watch.leak.grown_bytes >= 16 * MB


def frame(file: str, line: int, name: str = "f") -> dict[str, Any]:
    return {"filename": file, "line": line, "name": name}


def test_lines_that_made_what_is_in_use() -> None:
    """The innermost that are not torch's; what was freed, or made before the recording, is no one's."""
    inside = frame(f"{torch.__path__[0]}/nn/functional.py", 3)

    def block(size: int, *frames: dict[str, Any], state: str = "active_allocated") -> dict[str, Any]:
        return {"size": size, "state": state, "frames": list(frames)}

    segments = [
        {"blocks": [block(2 * MB, inside, frame("train.py", 7, "step"), frame("main.py", 1)), block(MB)]},
        {"blocks": [block(3 * MB, inside, frame("train.py", 7, "step")), block(9 * MB, frame("x.py", 1), state="inactive")]},
        {"blocks": [block(MB, frame("CUDACachingAllocator.cpp", 0), frame("log.py", 2, "note"))]},
    ]
    assert lines_of(segments) == ("train.py:7 (step), 5 MB", "log.py:2 (note), 1 MB")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_odd_tensors_do_no_harm() -> None:
    """Whatever lives in the process is gone through: what has no memory of its own to count is left out."""
    odd = [
        nn.LazyLinear(3).weight,
        torch.ones(3, 3).to_sparse(),
        torch.empty(5, device="meta"),
        FakeTensorMode().from_tensor(torch.ones(4)),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ]
    plain = torch.ones(123, 7)
    found = census(torch.device("cpu"))
    assert [count for kind, (count, _) in found.tensors.items() if kind.shape == (123, 7)] == [1]
    assert not [kind for kind in found.tensors if kind.type in ("FakeTensor", "UninitializedParameter")]
    del odd, plain


@pytest.mark.parametrize("settings", [{"windows": 1}, {"window_steps": 0}, {"action": "stop"}, {"least_growth": "much"}])
def test_wrong_settings_are_named(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        LeakWatch(settings, "cpu")

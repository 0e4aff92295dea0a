"""Starting a compiled kernel past Triton: with what Triton itself would pass, and only while nothing has changed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpupipe.device import jit

pytest.importorskip("triton")


class Kernel:
    """Stands for a Triton kernel, and for what Triton compiles of it."""

    arg_names = ("x_ptr", "ROWS", "count", "scale", "WIDTH")
    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.compiled = 0
        self.started: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def by_triton(*args: Any, **constants: Any) -> Kernel:
            self.compiled += 1
            return self

        return by_triton

    def run(self, *args: Any) -> None:
        self.started.append(args)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(jit, "_can_start", lambda: True)
    monkeypatch.setattr(jit, "_ready", {})
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)  # the CPU's number
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda gpu: 7, raising=False)
    return Kernel()


def test_this_triton_is_called_as_known() -> None:
    assert jit.known_call()


def test_the_second_launch_passes_what_triton_would(kernel: Kernel) -> None:
    x, y = torch.zeros(64), torch.zeros(64)
    for tensor in (x, y):
        jit.launch(kernel, (3, 2), tensor, 5, 0.5, WIDTH=128, num_warps=4, ROWS=2)
    assert kernel.compiled == 1
    (started,) = kernel.started
    assert started[:9] == (3, 2, 1, 7, "function", "metadata", None, None, None)
    assert started[9] is y
    assert started[10:] == (2, 5, 0.5, 128)


@pytest.mark.parametrize(
    "changed",
    [
        {"x": torch.zeros(64, dtype=torch.float16)},
        {"x": torch.zeros(65)[1:]},
        {"x": None},
        {"count": 6},
        {"scale": 0.25},
        {"WIDTH": 256},
        {"num_warps": 8},
    ],
)  # fmt: skip
def test_whatever_differs_goes_to_triton(kernel: Kernel, changed: dict[str, Any]) -> None:
    def go(x: torch.Tensor | None, count: int, scale: float, **constants: int) -> None:
        jit.launch(kernel, (1,), x, torch.zeros(4), count, scale, **constants)

    given: dict[str, Any] = {"x": torch.zeros(64), "count": 5, "scale": 0.5, "WIDTH": 128, "num_warps": 4}
    kernel.arg_names = ("x_ptr", "y_ptr", "count", "scale", "WIDTH")
    go(**given)
    go(**(given | changed))
    assert (kernel.compiled, len(kernel.started)) == (2, 0)


def test_a_profiler_sees_every_launch(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    listening = SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=[print]), launch_exit_hook=None)
    monkeypatch.setattr(jit.triton.knobs, "runtime", listening)
    for _ in range(2):
        jit.launch(kernel, (1,), torch.zeros(64), 5, 0.5, WIDTH=128, ROWS=2)
    assert (kernel.compiled, kernel.started) == (2, [])


def test_what_is_ready_does_not_grow_without_end(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "_MOST_READY", 8)
    for count in range(50):
        jit.launch(kernel, (1,), torch.zeros(64), count, 0.5, WIDTH=128, ROWS=2)
    assert len(jit._ready) <= 8

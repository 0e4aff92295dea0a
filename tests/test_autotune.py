"""The tuner: ranks by its model, times the best few once, keeps the winner on disk, and never stands in the way."""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from gpupipe.device import autotune
from gpupipe.device.autotune import Machine, choose, streaming_us, unlike
from gpupipe.errors import ConfigError

H200 = Machine("some GPU", 132)
CUDA = torch.device("cuda", 0)
CANDIDATES = [{"ROWS": rows, "num_warps": 4} for rows in range(1, 11)]


class Lab:
    """Stands for a GPU: a launch takes as long as ``us`` says, and launches are counted."""

    def __init__(self) -> None:
        self.us: Callable[[int], float] = lambda rows: abs(rows - 3)
        self.timed: list[int] = []
        self.capturing = False
        self._last = 0

    def run(self, config: Any) -> None:
        self._last = config["ROWS"]

    def cold_us(self, run: Callable[[], object], rounds: int = 1) -> float:
        run()
        self.timed.append(self._last)
        found = self.us(self._last)
        if math.isnan(found):
            raise type("OutOfResources", (RuntimeError,), {})("too much shared memory")
        return found

    def choose(self, key: tuple[Any, ...] = ("bf16", 3072), device: torch.device = CUDA) -> int:
        return choose("an_op", key, device, lambda: CANDIDATES, lambda config: config["ROWS"], self.run)["ROWS"]


@pytest.fixture
def lab(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    found = Lab()
    monkeypatch.setattr(autotune, "cold_us", found.cold_us)
    monkeypatch.setattr(autotune, "machine", lambda device: H200)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.capturing)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(autotune, "_chosen", {})
    monkeypatch.delenv("GPUPIPE_AUTOTUNE", raising=False)
    return found


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a new process would start."""
    monkeypatch.setattr(autotune, "_chosen", {})


def test_times_the_models_best_few_and_takes_the_fastest(lab: Lab) -> None:
    assert lab.choose() == 3
    assert lab.timed == [1, 2, 3, 4, 5, 6]
    assert lab.choose() == 3
    assert len(lab.timed) == 6, "known by now"


def test_a_later_process_reads_the_winner(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.choose()
    forget(monkeypatch)
    lab.us = lambda rows: rows
    assert lab.choose() == 3
    assert len(lab.timed) == 6
    assert lab.choose(("bf16", 2048)) == 1, "another shape is another question"


def test_a_run_that_goes_on_launches_as_its_checkpoint_says(
    lab: Lab, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another cache folder or a busy moment would choose another launch, which adds in another order."""
    lab.choose()
    record = json.loads(json.dumps(autotune.recorded()))
    assert list(record.values()) == [CANDIDATES[2]]
    for file in fresh_cache.rglob("*.json"):
        file.unlink()
    forget(monkeypatch)
    monkeypatch.setattr(autotune, "_recalled", {})
    lab.us = lambda rows: rows
    autotune.recall(record)
    assert lab.choose() == 3
    assert autotune.recorded() == record, "and so does the next one"
    autotune.recall({name: {"OTHER": 1} for name in record})
    forget(monkeypatch)
    assert lab.choose() == 1, "what another version of the kernel took is no launch of this one"


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"winner": 3}', b'{"winner": {"ROWS": "3", "num_warps": 4}}'])
def test_a_damaged_or_outdated_file_is_as_good_as_none(
    lab: Lab, damage: bytes, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.choose()
    (file,) = (fresh_cache / "autotune").iterdir()
    assert json.loads(file.read_bytes())["winner"] == {"ROWS": 3, "num_warps": 4}
    file.write_bytes(damage)
    forget(monkeypatch)
    assert lab.choose() == 3
    assert len(lab.timed) == 12
    assert json.loads(file.read_bytes())["winner"]["ROWS"] == 3


@pytest.mark.parametrize(("mode", "first", "after"), [("off", 1, 1), ("cached", 1, 3), ("full", 3, 3)])
def test_how_much_is_timed_can_be_set(lab: Lab, mode: str, first: int, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUPIPE_AUTOTUNE", mode)
    assert lab.choose() == first
    assert bool(lab.timed) is (mode == "full")
    monkeypatch.setenv("GPUPIPE_AUTOTUNE", "full")
    forget(monkeypatch)
    assert lab.choose() == 3
    monkeypatch.setenv("GPUPIPE_AUTOTUNE", mode)
    forget(monkeypatch)
    assert lab.choose() == after


def test_an_unknown_mode_is_named(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUPIPE_AUTOTUNE", "on")
    with pytest.raises(ConfigError, match="GPUPIPE_AUTOTUNE is 'on'"):
        lab.choose()


def test_nothing_is_timed_while_a_graph_is_captured(lab: Lab) -> None:
    lab.capturing = True
    assert lab.choose() == 1
    assert not lab.timed
    lab.capturing = False
    assert lab.choose() == 3, "and the question stays open"


def test_what_does_not_fit_is_left_out(lab: Lab) -> None:
    lab.us = lambda rows: math.nan if rows == 3 else abs(rows - 3)
    assert lab.choose() in (2, 4)
    lab.us = lambda rows: math.nan
    assert lab.choose(("other",)) == 1


def test_a_winner_of_another_size_of_the_bucket_serves(lab: Lab, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.choose()
    (file,) = (fresh_cache / "autotune").iterdir()
    file.write_bytes(b'{"winner": {"ROWS": 77, "num_warps": 4}}')
    forget(monkeypatch)
    assert lab.choose() == 77
    assert len(lab.timed) == 6


def test_noise_does_not_move_the_models_first_choice(lab: Lab) -> None:
    lab.us = lambda rows: 100.0 if rows == 1 else 98.0
    assert lab.choose() == 1
    lab.us = lambda rows: 100.0 if rows != 4 else 90.0
    assert lab.choose(("other",)) == 4


def test_deterministic_mode_times_nothing(lab: Lab) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert lab.choose() == 1
        assert not lab.timed
    finally:
        torch.use_deterministic_algorithms(False)
    assert lab.choose() == 3


def test_short_memory_is_no_verdict_for_later_processes(lab: Lab, fresh_cache: Path) -> None:
    def us(rows: int) -> float:
        if rows == 3:
            raise torch.cuda.OutOfMemoryError("no room for the flush")
        return abs(rows - 3)

    lab.us = us
    assert lab.choose() in (2, 4)
    assert not (fresh_cache / "autotune").exists()


def test_candidates_that_come_to_one_launch_are_tried_once() -> None:
    many = [{"ROWS": 1, "PER_SM": per_sm} for per_sm in (1, 2, 4, 8)]
    assert unlike(many, lambda config: min(300, 132 * config["PER_SM"])) == many[:3]


def test_another_fault_is_not_hidden(lab: Lab) -> None:
    def broken(rows: int) -> float:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    lab.us = broken
    with pytest.raises(RuntimeError, match="illegal memory access"):
        lab.choose()


def test_on_the_cpu_the_model_decides(lab: Lab) -> None:
    assert lab.choose(device=torch.device("cpu")) == 1
    assert not lab.timed


def test_all_are_tried_and_noted_within_a_block(lab: Lab, fresh_cache: Path) -> None:
    lab.choose()
    lab.timed.clear()
    with autotune.noting(8) as choices:
        assert lab.choose() == 3
        assert lab.choose() == 3  # once
    (choice,) = choices
    assert lab.timed == list(range(1, 9))
    assert (choice.op, choice.best(), choice.best(2)) == ("an_op", 2, 1)
    assert choice.us == [abs(rows - 3) for rows in range(1, 9)]
    lab.timed.clear()
    assert lab.choose() == 3
    assert not lab.timed  # what was known before is known again


def test_a_block_may_only_compile(lab: Lab) -> None:
    lab.us = lambda rows: math.nan if rows == 1 else 1.0
    with autotune.noting(3, timed=False) as choices:
        lab.choose()
    assert not lab.timed
    assert choices[0].us == [0.0, 0.0, 0.0]


def test_threads_time_a_question_once(lab: Lab) -> None:
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(lab.choose())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [3] * 8
    assert len(lab.timed) == 6


def _write(folder: str, number: int) -> None:
    from gpupipe.device import disk

    for _ in range(50):
        assert disk.write(Path(folder) / "x.json", json.dumps({"winner": {"ROWS": number}}).encode() * 1) == ""


def test_processes_never_see_half_a_file(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write, args=(str(tmp_path), number)) for number in range(2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        if (tmp_path / "x.json").exists():
            assert json.loads((tmp_path / "x.json").read_bytes())["winner"]["ROWS"] in (0, 1)
    assert [writer.exitcode for writer in writers] == [0, 0]


class TestModel:
    SIZES: ClassVar[dict[str, Any]] = {"total_bytes": 4e8, "tile_bytes": 8192, "warps": 4, "registers": 48}

    def test_never_promises_more_than_the_bandwidth(self) -> None:
        found = streaming_us(H200, programs=32768, **self.SIZES)
        assert 4e8 / H200.bytes_per_us <= found < 1.1 * 4e8 / H200.bytes_per_us

    def test_a_program_more_than_a_wave_costs(self) -> None:
        full = streaming_us(H200, programs=132 * 8, **self.SIZES | {"warps": 8, "registers": 64})
        over = streaming_us(H200, programs=132 * 8 + 1, **self.SIZES | {"warps": 8, "registers": 64})
        assert over > full

    def test_few_bytes_under_way_cost(self) -> None:
        few = streaming_us(H200, programs=132, **self.SIZES | {"tile_bytes": 512})
        assert few > 2 * streaming_us(H200, programs=132, **self.SIZES | {"tile_bytes": 65536})

    def test_idle_sms_cost(self) -> None:
        big = self.SIZES | {"tile_bytes": 1 << 20}
        assert streaming_us(H200, programs=33, **big) > 1.5 * streaming_us(H200, programs=132, **big)

    def test_spills_and_what_does_not_fit_rank_last(self) -> None:
        fair = streaming_us(H200, programs=1000, **self.SIZES)
        assert streaming_us(H200, programs=1000, **self.SIZES | {"registers": 300}) > 2 * fair
        assert math.isinf(streaming_us(H200, programs=1000, **self.SIZES, shared_bytes=1 << 20))

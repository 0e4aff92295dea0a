"""The benchmark of training loops: its clock, its idle time, its turns, and that its subjects do equal work."""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import bench_loader_train
import common
import loader_cases
import make_media
import pytest
import torch
import train_lengths
import train_loop
import train_steps
import train_subjects

CPU = torch.device("cpu")
TINY = bench_loader_train.STEPS["train-vit-tiny"][0]


@pytest.fixture(scope="module")
def draws(tmp_path_factory: pytest.TempPathFactory) -> list[loader_cases.Draw]:
    folder = tmp_path_factory.mktemp("media")
    sources = make_media.make(folder, ["h264-tiny"], sources=2, seconds=2)["h264-tiny"]
    case = loader_cases.Case("some", ("h264-tiny",), TINY.stride, TINY.frames, TINY.size, TINY.batch, clips=3 * TINY.batch)
    return loader_cases.draw(case, sources, folder / "visits", 0)


def span(begin: float, length: float, stream: int, kind: str = "kernel") -> dict[str, Any]:
    return {"cat": kind, "ts": begin, "dur": length, "args": {"stream": stream}}


def test_busy_time_is_that_of_the_training_stream_and_counts_overlap_once() -> None:
    training = [span(0, 10, 7), span(5, 3, 7), span(8, 4, 7), span(20, 5, 7), span(30, 1, 7, "gpu_memset")]
    others = [span(2, 17, 13), {"cat": "cuda_runtime", "ts": 0, "dur": 99, "args": {}}, {"ph": "M", "name": "process_name"}]
    assert train_loop.busy_us(others + training[::-1]) == 12 + 5 + 1
    assert train_loop.busy_us(others + training, all_streams=True) == 19 + 5 + 1, "where preparation is of the step"
    assert train_loop.busy_us(others[1:]) == 0, "no kernel was seen: the caller must not take the GPU for idle"


def test_the_percentile_is_a_value_that_was_seen() -> None:
    assert train_loop.percentile(list(range(1, 101)), 0.99) == 99
    assert train_loop.percentile([3.0, 1.0], 0.99) == 3
    assert train_loop.percentile([5.0], 0.99) == 5


class Counted:
    """A loader of ``length`` numbered batches an epoch."""

    def __init__(self, length: int) -> None:
        self.length, self.epochs = length, 0

    def batches(self) -> Iterator[torch.Tensor]:
        self.epochs += 1
        return iter([torch.full((1,), float(number)) for number in range(self.length)])

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...


def test_a_loop_goes_on_with_the_next_epoch_and_counts_each_step_once() -> None:
    seen: list[float] = []

    def step(video: torch.Tensor) -> torch.Tensor:
        seen.append(float(video))
        return video

    loop = train_loop.Loop(step, Counted(3), CPU)
    first, last, waits = loop.steps(0.0, 7)
    assert seen == [0, 1, 2, 0, 1, 2, 0]
    assert len(waits) == 7
    later, _, _ = loop.steps(0.0, 1)
    assert first.ms_until(last) > 0
    assert last is later, "a window begins where the one before it ended"
    with pytest.raises(RuntimeError, match="no batch came"):
        train_loop.Loop(step, Counted(0), CPU).one()


def test_packed_clips_give_what_each_gives_alone() -> None:
    torch.manual_seed(0)
    model = train_steps.VideoVit(train_steps.VIT_TINY, (8, 4, 4))
    videos = [torch.randn(1, 3, frames, 64, 64) for frames in (16, 4, 8)]
    alone = torch.cat([model(video) for video in videos])
    tokens, lengths = [], [frames // 2 * 16 for frames in (16, 4, 8)]
    for video in videos:
        conv = torch.nn.functional.unfold  # a tubelet at a time, in the order of a Conv3d weight: colour, time, row, column
        parts = [conv(pair.transpose(1, 2).flatten(1, 2)[:, _by_colour()], 16, stride=16)[0].T for pair in video.split(2, 2)]
        tokens += parts
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    packed = model.packed(torch.cat(tokens), cu_seqlens, lengths)
    assert torch.allclose(packed, alone, atol=1e-4)  # the same sums in float32, in another order


def _by_colour() -> list[int]:
    """Where (time, colour) of a pair of frames lie in the order (colour, time)."""
    return [time * 3 + colour for colour in range(3) for time in range(2)]


def test_padding_is_not_pooled() -> None:
    model = train_steps.VideoVit(train_steps.VIT_TINY, (8, 4, 4))
    seen: list[torch.Tensor] = []
    model.head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    for block in model.blocks:
        torch.nn.init.zeros_(block.qkv.weight)  # with no attention nothing of the padding reaches the other frames
    video, mask = torch.randn(1, 3, 16, 64, 64), torch.arange(16)[None] < 8
    model(video, mask)
    model(torch.where(mask[:, None, :, None, None], video, 9.0), mask)
    assert torch.allclose(seen[0], seen[1], atol=1e-5)


@pytest.mark.parametrize("subject", ["headspace", "gpupipe", "gpupipe-indexed", "pyav-dataloader"])
def test_each_subject_owes_the_same_first_batch(subject: str, draws: Sequence[loader_cases.Draw]) -> None:
    session = train_subjects.SUBJECTS[subject](TINY, draws, CPU)
    try:
        batches = session.batches()
        assert loader_cases.check(next(batches), draws, TINY) is None
        assert next(batches).shape == (TINY.batch, 3, TINY.frames, TINY.size, TINY.size)
    finally:
        session.close()


HELD = threading.Lock()


def under_a_lock(visit: loader_cases.Draw) -> torch.Tensor:
    with HELD:
        return torch.full((TINY.frames, 3, 8, 8), visit.start % 256, dtype=torch.uint8)


def test_workers_do_not_wait_for_locks_of_the_process_that_starts_them(draws: Sequence[loader_cases.Draw]) -> None:
    session = train_subjects.Workers(TINY, draws, CPU, under_a_lock)
    session.loader.timeout = 60
    try:
        with HELD:
            assert next(session.batches()).shape == (TINY.batch, 3, TINY.frames, TINY.size, TINY.size)
    finally:
        session.close()


def test_threads_behind_a_dataloader_give_all_batches(draws: Sequence[loader_cases.Draw]) -> None:
    from loader_subjects import pyav

    session = train_subjects.InThreads(pyav(TINY, draws, CPU, 1), own_streams=True)
    try:
        batches = list(session.batches())
        assert len(batches) == len(draws) // TINY.batch
        assert loader_cases.check(batches[0], draws, TINY) is None
    finally:
        session.close()


def test_workers_do_not_start_into_a_shared_memory_that_is_too_small() -> None:
    with pytest.raises(RuntimeError, match="enlarge it"):
        train_subjects._ask_for_shared_memory(1 << 60)
    train_subjects._ask_for_shared_memory(0)


def options(**fields: Any) -> argparse.Namespace:
    return argparse.Namespace(**({"turns": 3, "budget": 100.0, "device": "cpu"} | fields))


def test_turns_go_on_in_another_order_until_the_budget_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    clock = [0.0]

    def turn(job: bench_loader_train.Job, _: argparse.Namespace, left: float) -> None:
        assert 0 < left <= 75
        order.append(job.subject)
        job.seconds = 10.0
        clock[0] += job.seconds
        if job.subject != "broken":
            job.found["case"]["step_ms"].append(1.0)

    monkeypatch.setattr(bench_loader_train.Job, "turn", turn)
    monkeypatch.setattr(bench_loader_train.time, "perf_counter", lambda: clock[0])
    jobs = [bench_loader_train.Job(name, ["case"]) for name in ("headspace", "gpupipe", "peer", "broken")]
    told: list[int] = []
    bench_loader_train.take_turns(jobs, options(budget=75.0), lambda: told.append(len(order)))
    assert order == ["headspace", "gpupipe", "peer", "broken", "gpupipe", "headspace", "peer"]
    assert told == [1, 2, 3, 4, 5, 6, 7], "results are written after each"
    order.clear()
    clock[0] = 0.0
    bench_loader_train.take_turns(jobs, options(budget=15.0), lambda: None)
    assert order == ["headspace", "gpupipe"]
    jobs[2] = bench_loader_train.Job("peer", ["train-vit-tiny"])
    bench_loader_train.take_turns(jobs[2:3], options(budget=0.0), lambda: None)
    assert {row.error for row in jobs[2].rows("cpu")} == {"TimeoutError: the time was up before it began"}


def test_a_metric_that_failed_is_a_row_that_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    line = {"case": "train-vit-tiny", "values": {"step_ms": [2.0, 1.0]}, "errors": {"gpu_idle_percent": "no kernel"}}
    monkeypatch.setattr(bench_loader_train, "answers", lambda *_: ([line], "the process ended with status 1"))
    job = bench_loader_train.Job("peer", ["train-vit-tiny", "train-launch-bound-tiny"])
    job.turn(options(device="cuda:0", media=tmp_path, warmup=1.0, windows=1, seconds=1.0), 99.0)
    rows = {(row.case, row.metric): row for row in job.rows("cuda:0")}
    assert rows["train-vit-tiny", "step_ms"].value == 1.5
    assert rows["train-vit-tiny", "gpu_idle_percent"].error == "no kernel"
    assert rows["train-launch-bound-tiny", "step_ms"].error == "the process ended with status 1 before it began"
    assert len(rows) == 6


def test_a_subject_that_hangs_is_ended_and_what_it_had_measured_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hangs = """
import time, bench_loader_train, train_loop
measured = train_loop.Measured({"step_ms": [2.0]})
bench_loader_train.begins("train-vit-tiny", "its first batch", 60.0, train_loop.Measured({}))
bench_loader_train.begins("train-vit-tiny", "the end of its loader", 1.0, measured)
time.sleep(60)
"""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setattr(
        bench_loader_train, "answers", lambda _, mark, seconds: common.answers([sys.executable, "-c", hangs], mark, seconds)
    )
    job = bench_loader_train.Job("peer", ["train-vit-tiny"])
    job.turn(options(media=tmp_path, warmup=1.0, windows=1, seconds=1.0), 40.0)
    rows = {row.metric: row for row in job.rows("cpu")}
    assert rows["step_ms"].value == 2.0
    assert rows["wait_ms_p99"].error == "the process ended with status 1 at the end of its loader, which may take 1 s"
    assert job.seconds < 40, "it does not hold up the others"


def test_every_default_subject_takes_part_in_a_default_case() -> None:
    asked = options(cases=bench_loader_train.DEFAULT_CASES, subjects=bench_loader_train.DEFAULT_SUBJECTS)
    jobs = bench_loader_train.jobs_of(asked)
    assert {job.subject for job in jobs} == set(bench_loader_train.DEFAULT_SUBJECTS)
    loops = {job.subject for job in jobs if "train-vit-b-256p" in job.cases}
    assert loops >= {"gpupipe", "headspace", "torchcodec-dataloader", "pynvvideocodec-dataloader"}
    lengths = {job.subject for job in jobs if job.cases == ["train-mixed-lengths"]}
    assert lengths >= {"gpupipe", "fixed-longest", "fixed-batch-longest"}


@pytest.fixture(scope="module")
def lengths_media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lengths")


def test_planned_and_fixed_batches_have_one_budget_and_the_same_clips(lengths_media: Path, tmp_path: Path) -> None:
    case = train_lengths.CASES["train-mixed-lengths-tiny"]
    assert sum(round(share * case.samples) for share in case.lengths.values()) == case.samples
    full = train_lengths.CASES["train-mixed-lengths"]
    assert sum(round(share * full.samples) for share in full.lengths.values()) == full.samples
    paths = [train_lengths.videos(case, lengths_media, tmp_path / str(turn)) for turn in range(2)]
    names = [[os.path.basename(path) for path in each] for each in paths]
    assert names[0] == names[1], "all subjects get the same lengths in the same order"
    budget = case.batch * case.tokens(case.longest)
    for subject in ("gpupipe", "gpupipe-pack", "gpupipe-pad"):
        assert train_lengths.SUBJECTS[subject](case)["max_tokens"] == budget


@pytest.mark.parametrize("subject", list(train_lengths.SUBJECTS))
def test_every_way_of_batching_trains_on_every_frame(subject: str, lengths_media: Path, tmp_path: Path) -> None:
    case = train_lengths.CASES["train-mixed-lengths-tiny"]
    measured = train_lengths.measure(case, subject, lengths_media, tmp_path / "visits", CPU)
    assert set(measured.values) == {"samples_per_s"}, "the memory of a CPU is not measured"
    assert measured.values["samples_per_s"][0] > 0


def test_an_epoch_without_all_its_frames_has_no_rate(
    lengths_media: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(train_lengths.SUBJECTS, "short", lambda case: {"size": 4, "buckets": {"frames": [8]}})
    case = train_lengths.CASES["train-mixed-lengths-tiny"]
    with pytest.raises(RuntimeError, match="40 samples of 320 frames came, not 40 of"):
        train_lengths.measure(case, "short", lengths_media, tmp_path / "visits", CPU)

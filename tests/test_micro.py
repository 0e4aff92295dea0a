"""Steps handed out in parts: by a number, by what memory allows, and again after memory ran out."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gpupipe import Batch, VideoLoader
from gpupipe.config import LoaderConfig
from gpupipe.data import loader as loader_room
from gpupipe.data.micro import Parts, Sizes, ran_out
from gpupipe.errors import ClosedError, ConfigError, DeviceMemoryError

OPTIONS: dict[str, Any] = {
    "clip": {"frames": 4},
    "transform": {"size": 16, "dtype": "float32"},
    "device": "cpu",
    "decode": {"threads": 2},
    "seed": 4,
}


@pytest.fixture(scope="module")
def rows(clips: dict[str, Path]) -> list[dict[str, Any]]:
    names = ("h264", "vp9_odd", "mpeg4", "h264_odd")
    return [{"path": str(clips[names[k % 4]]), "label": k, "caption": f"clip {k}"} for k in range(26)]


class Simulated:
    """A device on which a part of n clips takes n * ``a_clip`` bytes beside the model's own."""

    def __init__(self, limit: int, a_clip: int, model: int = 100) -> None:
        self.limit, self.a_clip, self.model = limit, a_clip, model
        self.peak = self.used = model
        self.freed = 0

    def begin(self) -> None:
        self.peak = self.used

    def free(self) -> None:
        self.freed += 1

    def work(self, clips: int) -> None:
        need = self.used + clips * self.a_clip
        if need > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate …")
        self.peak = max(self.peak, need)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Simulated:
    memory = Simulated(limit=1000, a_clip=50)

    def sizes(config: LoaderConfig, _: torch.device) -> Sizes | None:
        size = config.batch.micro_size
        return None if size is None else Sizes(size, memory)

    monkeypatch.setattr(loader_room, "_sizes", sizes)
    return memory


def train(loader: VideoLoader, device: Simulated | None) -> Iterator[tuple[list[Batch], float]]:
    """The parts of each step that went well, and the sum that stands for its gradient."""
    parts: list[Batch] = []
    gradient = torch.zeros(())
    for batch in loader:
        with loader.step_guard(gradient.zero_) as step:
            if device is not None:
                device.work(len(batch.clips))
            gradient += batch.video.mean(dtype=torch.float64).float() * batch.share
        parts = [*parts, batch] if not step.failed else []
        if step.done:
            yield parts, float(gradient)
            gradient.zero_()
            parts = []


def test_a_number_cuts_each_batch_into_parts_that_are_views_of_it(rows: list[dict[str, Any]]) -> None:
    options = {**OPTIONS, "columns": ["caption"]}
    with VideoLoader(rows, **options, batch={"size": 8, "last": "partial"}) as loader:
        whole = list(loader)
    with VideoLoader(rows, **options, batch={"size": 8, "last": "partial", "micro_size": 3}) as loader:
        assert (len(loader), loader.steps_per_epoch) == (10, 4)
        parts = list(loader)
        assert len(parts) == 10
    for number, batch in enumerate(whole):
        mine = [part for part in parts if part.index == number]
        assert [part.part for part in mine] == [(k, len(mine)) for k in range(len(mine))]
        assert sum(part.share for part in mine) == pytest.approx(1)
        assert max(len(part.clips) for part in mine) <= 3
        assert torch.equal(torch.cat([part.video for part in mine]), batch.video)
        assert torch.equal(torch.cat([part["label"] for part in mine]), batch["label"])
        assert [word for part in mine for word in part.text["caption"]] == batch.text["caption"]
        assert sum((part.clips for part in mine), ()) == batch.clips
        assert len({part.video.untyped_storage().data_ptr() for part in mine}) == 1
        assert mine[-1].state == batch.state
        assert all(part.state["samples"] == 8 * number for part in mine[:-1]), "a step that is begun is done again"


def test_parts_of_packed_batches_have_their_own_tokens(rows: list[dict[str, Any]]) -> None:
    batch = {"size": 8, "layout": "pack", "patch": (1, 8, 8)}
    with VideoLoader(rows, **OPTIONS, batch=batch) as loader:
        whole = next(iter(loader))
    with VideoLoader(rows, **OPTIONS, batch={**batch, "micro_size": 3}) as loader:
        iterator = iter(loader)
        parts = [next(iterator) for _ in range(3)]
    assert torch.equal(torch.cat([part["tokens"] for part in parts]), whole["tokens"])
    for part in parts:
        assert part["cu_seqlens"][0] == 0
        assert part["cu_seqlens"][-1] == len(part["tokens"])
        assert len(part["grid"]) == len(part["cu_seqlens"]) - 1 == len(part.clips)


def test_the_size_follows_memory_and_the_gradient_does_not_depend_on_it(rows: list[dict[str, Any]], device: Simulated) -> None:
    """Nine tenths of 1000 bytes beside 100 for the model have room for 16 clips of 50."""
    options = {**OPTIONS, "repeat": True}
    with VideoLoader(rows, **options, batch=24) as loader:
        expected = []
        for batch in loader:
            expected.append((batch.clips, float(batch.video.mean(dtype=torch.float64))))
            if len(expected) == 6:
                break
    with VideoLoader(rows, **options, batch={"size": 24, "micro_size": "auto"}) as loader:
        assert loader.steps_per_epoch == 1
        steps = []
        for step in train(loader, device):
            steps.append(step)
            device.limit = 500 if len(steps) == 3 else device.limit
            if len(steps) == 6:
                break
    cuts = [[len(part.clips) for part in parts] for parts, _ in steps]
    assert cuts[0] == [3] * 8, "nothing is known at first"
    assert cuts[1] == cuts[2] == [12, 12], "24 in two even parts of at most 16"
    assert all(cut == [6] * 4 for cut in cuts[3:]), "others have taken half of it: room for 7"
    for (parts, gradient), (clips, mean) in zip(steps, expected, strict=True):
        assert sum((part.clips for part in parts), ()) == clips
        assert gradient == pytest.approx(mean, abs=1e-5)


def test_a_loader_whose_parts_memory_decides_has_no_length(rows: list[dict[str, Any]]) -> None:
    with VideoLoader(rows, **OPTIONS, batch={"size": 8, "micro_size": "auto"}) as loader:
        with pytest.raises(TypeError, match="memory decides"):
            len(loader)
        assert loader.steps_per_epoch == 3


def test_a_step_that_runs_out_of_memory_comes_again_in_smaller_parts(
    rows: list[dict[str, Any]], device: Simulated, caplog: pytest.LogCaptureFixture
) -> None:
    device.limit = 190  # one clip at a time
    with VideoLoader(rows, **OPTIONS, batch={"size": 24, "micro_size": "auto"}) as loader:
        caplog.set_level(logging.WARNING)
        steps = list(train(loader, device))
    assert [sum(len(part.clips) for part in parts) for parts, _ in steps] == [24]
    samples = [clip.request.sample for parts, _ in steps for part in parts for clip in part.clips]
    assert samples == list(range(24)), "each clip once, in order"
    assert "ran out of memory: it comes again, in 24 parts" in caplog.text
    assert device.freed == 1


@pytest.mark.parametrize("at", [1, 4, 6])
def test_memory_that_runs_out_anywhere_in_a_step_loses_nothing(rows: list[dict[str, Any]], device: Simulated, at: int) -> None:
    """In the first, a middle or the last of six parts of two clips."""
    seen: list[Batch] = []
    gradient = torch.zeros(())
    failures = 0
    with VideoLoader(rows, **OPTIONS, batch={"size": 12, "micro_size": "auto"}) as loader:
        good: list[Batch] = []
        for number, batch in enumerate(loader, 1):
            with loader.step_guard(gradient.zero_) as step:
                gradient += len(batch.clips)
                if number == at:
                    raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: not enough memory")
            if step.failed:
                failures += 1
                good = []
                assert loader.state_dict()["samples"] == 0, "what failed does not count as received"
                assert gradient == 0
                assert not step.done
                continue
            good.append(batch)
            if step.done:
                assert gradient == 12
                gradient.zero_()
                seen += good
                good = []
                assert loader.state_dict()["samples"] == len(seen), "one clip a part, from the failure on"
    assert failures == device.freed == 1
    assert [clip.request.sample for part in seen for clip in part.clips] == list(range(24))


def test_a_clip_that_does_not_fit_alone_is_the_trainer_s_own_error(rows: list[dict[str, Any]], device: Simulated) -> None:
    device.limit = 120
    with VideoLoader(rows, **OPTIONS, batch={"size": 4, "micro_size": "auto"}) as loader, pytest.raises(torch.OutOfMemoryError):
        list(train(loader, device))


def test_with_a_number_an_error_goes_through(rows: list[dict[str, Any]]) -> None:
    with VideoLoader(rows, **OPTIONS, batch={"size": 4, "micro_size": 2}) as loader, pytest.raises(torch.OutOfMemoryError):
        list(train(loader, Simulated(110, 50)))


def test_other_errors_go_through_a_guard(rows: list[dict[str, Any]]) -> None:
    with VideoLoader(rows, **OPTIONS, batch={"size": 4, "micro_size": "auto"}) as loader:
        for _ in loader:
            with pytest.raises(ValueError, match="mine"), loader.step_guard(lambda: None):
                raise ValueError("mine")
            break


def test_on_the_cpu_a_step_is_whole_until_it_fails(rows: list[dict[str, Any]]) -> None:
    with VideoLoader(rows, **OPTIONS, batch={"size": 8, "micro_size": "auto"}) as loader:
        cuts = [[len(part.clips) for part in parts] for parts, _ in train(loader, None)]
        assert cuts == [[8]] * 3
        cuts = [[len(part.clips) for part in parts] for parts, _ in train(loader, Simulated(400, 50))]
        assert cuts == [[4, 4]] * 3, "and what was learnt lasts"


def test_a_guard_without_parts_counts_whole_batches(rows: list[dict[str, Any]]) -> None:
    with VideoLoader(rows, **OPTIONS, batch=8) as loader:
        assert [len(parts) for parts, _ in train(loader, None)] == [1, 1, 1]
        with pytest.raises(torch.OutOfMemoryError):
            list(train(loader, Simulated(110, 50)))


def test_a_guard_outside_of_a_loop_is_refused(rows: list[dict[str, Any]]) -> None:
    with VideoLoader(rows, **OPTIONS, batch={"size": 8, "micro_size": "auto"}) as loader, pytest.raises(ClosedError):
        loader.step_guard(lambda: None)


def test_ranks_without_a_way_to_agree_are_refused(rows: list[dict[str, Any]]) -> None:
    with (
        VideoLoader(rows, **OPTIONS, batch={"size": 4, "micro_size": "auto"}, rank=0, world_size=2) as loader,
        pytest.raises(ConfigError, match=r"needs torch\.distributed with 2 ranks"),
    ):
        next(iter(loader))


def test_ranks_cut_alike_and_try_again_together(
    rows: list[dict[str, Any]], device: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if another rank said, to each reduction, what these lists hold."""
    from gpupipe.data import iterator as room

    asked: list[tuple[int, ...]] = []
    others = iter([(4, -16), (0,), (1,), (4, -16), *[(0,)] * 16])

    def agree(values: Any, *_: Any) -> list[int]:
        asked.append(tuple(values))
        return [max(pair) for pair in zip(values, next(others), strict=True)]

    monkeypatch.setattr(room, "agree", agree)
    with VideoLoader(rows[:16], **OPTIONS, batch={"size": 16, "micro_size": "auto"}) as loader:
        ((parts, _),) = train(loader, device)
    assert [len(part.clips) for part in parts] == [1] * 16, "finer, though the failure was another's"
    assert asked[0] == (8, -16)


def test_what_counts_as_running_out() -> None:
    assert ran_out(torch.OutOfMemoryError("CUDA out of memory"))
    assert ran_out(MemoryError())
    assert ran_out(RuntimeError("CUDA error: out of memory"))
    assert not ran_out(RuntimeError("shapes differ"))
    assert not ran_out(ValueError("out of memory"))
    assert not ran_out(None)
    assert issubclass(DeviceMemoryError, Exception)


def test_parts_differ_by_one_clip_at_most(rows: list[dict[str, Any]]) -> None:
    with VideoLoader(rows, **OPTIONS, batch=13) as loader:
        batch = next(iter(loader))
    for count in range(1, 14):
        parts = Parts(batch, count)
        sizes = [len(parts.take().clips) for _ in range(count)]
        assert sum(sizes) == 13
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) == parts.largest

"""What a checkpoint holds of a run: the rest comes as it would have come, bit for bit, whatever had been under way."""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpupipe import Batch, VideoLoader
from gpupipe.config import LoaderConfig
from gpupipe.data.bytes import Identity
from gpupipe.data.group import Fixed, Position
from gpupipe.data.order import Order
from gpupipe.data.state import digest, digest_of_labels, made_by
from gpupipe.errors import ConfigError, OpenError
from gpupipe.types import ClipRequest, Entry

SMALL: dict[str, Any] = {
    "clip": {"frames": 4, "stride": 2},
    "transform": {"size": (24, 32), "dtype": "float32", "color_jitter": {"brightness": 0.4}},
    "device": "cpu",
    "batch": 2,
    "decode": {"threads": 2},
    "seed": 11,
}


@pytest.fixture(scope="module")
def videos(clips: dict[str, Path]) -> list[str]:
    """Thirteen rows: some of the files are there more than once."""
    names = ("h264", "vp9_odd", "mpeg4", "h264_odd", "hevc")
    return [str(clips[names[k % len(names)]]) for k in range(13)]


def facts(batch: Batch) -> tuple[Any, ...]:
    """All of a batch that a trainer can see."""
    return batch.epoch, batch.index, batch.clips, batch.substituted, {name: tensor.tolist() for name, tensor in batch.items()}


def saved(loader: VideoLoader) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(json.dumps(loader.state_dict()))
    return state


def run(loader: VideoLoader, batches: int) -> list[Batch]:
    """The next batches, through the ends of epochs."""
    found: list[Batch] = []
    while len(found) < batches:
        for batch in loader:
            found.append(batch)
            if len(found) == batches:
                break
    return found


@pytest.fixture(scope="module")
def whole(videos: list[str]) -> list[Batch]:
    """Two epochs of six batches, and a third one."""
    with VideoLoader(videos, **SMALL) as loader:
        return run(loader, 18)


@pytest.mark.parametrize("stopped_after", [0, 1, 5, 6, 7, 12, 13])
@pytest.mark.parametrize("way", ["state_dict", "batch.state"])
def test_a_run_that_is_taken_up_goes_on_as_the_uninterrupted_one(
    videos: list[str], whole: list[Batch], stopped_after: int, way: str
) -> None:
    """At the start, amid an epoch, with its last batch, and in the next one; with more batches ready than were taken."""
    state: dict[str, Any] = {}
    with VideoLoader(videos, **SMALL) as loader:
        if way == "state_dict" or not stopped_after:
            run(loader, stopped_after)
            state = saved(loader)
        else:
            ahead = run(loader, stopped_after + 2)
            state = json.loads(json.dumps(ahead[stopped_after - 1].state))
    with VideoLoader(videos, **SMALL) as loader:
        loader.load_state_dict(state)
        assert saved(loader) == state, "loading alone changes nothing"
        rest = run(loader, 18 - stopped_after)
    assert [facts(batch) for batch in rest] == [facts(batch) for batch in whole[stopped_after:]]


def test_an_epoch_of_which_all_was_received_has_nothing_left_and_the_next_one_follows(
    videos: list[str], whole: list[Batch]
) -> None:
    """Trainers save with the last batch: the epoch must not come again, nor the next one be taken for its rest."""
    with VideoLoader(videos, **SMALL) as loader:
        iterator = iter(loader)
        for _ in range(6):
            next(iterator)
        with_the_last = saved(loader)
        with pytest.raises(StopIteration):
            next(iterator)
        behind_it = saved(loader)
    assert (with_the_last["epoch"], with_the_last["samples"]) == (0, 12)
    assert (behind_it["epoch"], behind_it["samples"]) == (1, 0)
    for state, empty in ((with_the_last, 1), (behind_it, 0)):
        with VideoLoader(videos, **SMALL) as loader:
            loader.load_state_dict(state)
            for _ in range(empty):
                assert list(loader) == []
            assert facts(next(iter(loader))) == facts(whole[6])


def test_set_epoch_of_the_state_s_own_epoch_keeps_the_place(videos: list[str], whole: list[Batch]) -> None:
    with VideoLoader(videos, **SMALL) as loader:
        state = run(loader, 2)[-1].state
        loader.load_state_dict(state)
        loader.set_epoch(0)
        assert facts(next(iter(loader))) == facts(whole[2])
        loader.load_state_dict(state)
        loader.set_epoch(1)
        assert saved(loader)["samples"] == 0
        assert facts(next(iter(loader))) == facts(whole[6])
        loader.load_state_dict({})
        assert facts(next(iter(loader))) == facts(whole[12]), "an empty state changes nothing"


def test_an_iterator_that_was_left_counts_what_it_gave(videos: list[str]) -> None:
    with VideoLoader(videos, **SMALL) as loader:
        assert (saved(loader)["epoch"], saved(loader)["samples"]) == (0, 0)
        run(loader, 3)
        assert (saved(loader)["epoch"], saved(loader)["samples"]) == (0, 6)
        iter(loader)
        assert (saved(loader)["epoch"], saved(loader)["samples"]) == (1, 0), "a new epoch has begun"


def clips_by_sample(batches: list[Batch]) -> dict[tuple[int, int], tuple[str, list[float]]]:
    found = {}
    for batch in batches:
        for row, clip in enumerate(batch.clips):
            key = clip.request.epoch, clip.request.sample
            assert key not in found, "no sample comes twice"
            found[key] = clip.path, batch.video[row].flatten().tolist()
    return found


@pytest.mark.parametrize(("ranks", "size"), [(1, 2), (2, 1), (4, 1), (1, 4)])
def test_a_run_goes_on_under_another_number_of_ranks(videos: list[str], ranks: int, size: int) -> None:
    """The global sequence of samples and each sample's pixels stay the same."""
    with VideoLoader(videos, **{**SMALL, "batch": {"size": 1, "last": "partial"}}) as loader:
        expected = clips_by_sample(list(loader))
    first: list[Batch] = []
    states = []
    for rank in range(2):
        with VideoLoader(videos, **SMALL, rank=rank, world_size=2) as loader:
            first += run(loader, 2)
            states.append(saved(loader))
    assert states[0] == states[1], "any rank's state serves all"
    rest: list[Batch] = []
    for rank in range(ranks):
        with VideoLoader(
            videos, **{**SMALL, "batch": {"size": size, "last": "partial"}}, rank=rank, world_size=ranks
        ) as loader:
            loader.load_state_dict(states[0])
            rest += list(loader)
    found = clips_by_sample(first + rest)
    left_out = (13 - 8) % ranks
    assert found == {key: value for key, value in expected.items() if key[1] < 13 - left_out}


KILLED = """
import json, os, sys
from gpupipe import VideoLoader
options, videos, target = json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
loader = VideoLoader(videos, **options)
for batch in loader:
    with open(target + ".part", "w") as file:
        json.dump(loader.state_dict(), file)
    os.replace(target + ".part", target)
    print(batch.index, flush=True)
"""


def test_a_killed_run_goes_on_from_its_last_checkpoint(videos: list[str], whole: list[Batch], tmp_path: Path) -> None:
    target = tmp_path / "state.json"
    command = [sys.executable, "-c", KILLED, json.dumps(SMALL), json.dumps(videos), str(target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(3):
            process.stdout.readline()
        process.kill()
    state = json.loads(target.read_text())
    received = state["samples"] // 2
    assert received >= 3
    with VideoLoader(videos, **SMALL) as loader:
        loader.load_state_dict(state)
        rest = run(loader, 12 - received)
    assert [facts(batch) for batch in rest] == [facts(batch) for batch in whole[received:12]]


def test_batches_received_out_of_order_are_not_received_again(videos: list[str], whole: list[Batch]) -> None:
    options = {**SMALL, "jitter": {"in_order": False, "depth": 6}, "decode": {"threads": 3}}
    with VideoLoader(videos, **options) as loader:
        first = run(loader, 4)
        loader.load_state_dict(json.loads(json.dumps(first[2].state)))
        rest = list(loader)
    assert sorted(facts(batch) for batch in first[:3] + rest) == sorted(facts(batch) for batch in whole[:6])


@given(st.integers(1, 6), st.integers(0, 20), st.permutations(range(8)))
def test_a_position_counts_whatever_the_order(step: int, start: int, order: list[int]) -> None:
    fixed, position = Fixed(Order(100, 0), LoaderConfig(batch=step)), Position(3, start)
    for number, batch in enumerate(order):
        position = fixed.after(position, start // step + batch)
        held = {k for k in range(8) if k in order[: number + 1]}
        prefix = next((k for k in range(8) if k not in held), 8)
        assert position.samples == start + prefix * step
        assert position.ahead == {start // step + k for k in held if k > prefix}
    assert position == Position(3, start + 8 * step)


def test_batches_received_out_of_order_need_the_same_steps(videos: list[str]) -> None:
    with VideoLoader(videos, **SMALL) as loader:
        state = {**saved(loader), "ahead": [2], "rank": 0}
        loader.load_state_dict(state)
    with VideoLoader(videos, **{**SMALL, "batch": 3}) as loader, pytest.raises(ConfigError, match="2 samples a step"):
        loader.load_state_dict(state)
    with (
        VideoLoader(videos, **{**SMALL, "batch": 1}, rank=1, world_size=2) as loader,
        pytest.raises(ConfigError, match="rank 1 of 2"),
    ):
        loader.load_state_dict(state)
    for damage in ({"ahead": [10**9]}, {"samples": 10**30}):
        with VideoLoader(videos, **SMALL) as loader, pytest.raises(ConfigError, match="this state is damaged"):
            loader.load_state_dict({**state, **damage})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"seed": 12}, "a run with seed=12, this loader has seed=11"),
        ({"shuffle": False}, "a run with shuffle=False, this loader has shuffle=True"),
        ({"videos": 5}, "a run with 5 videos, this loader has 13 videos"),
        ({"digest": "beef"}, "a list of videos with the digest beef"),
        ({"version": 2}, "version 2, this gpupipe reads 1"),
        ({"epoch": "three"}, "State.epoch: .*'three'"),
        ({"samples": -1}, "State.samples: .*-1"),
        ({"ahead": None}, "State.ahead: .*None"),
        ({"bad_files": 3}, "State.bad_files: .*3"),
    ],
)
def test_a_state_of_another_run_is_refused_by_name(videos: list[str], change: dict[str, Any], match: str) -> None:
    with VideoLoader(videos, **SMALL) as loader:
        state = {**saved(loader), **change}
        before = saved(loader)
        with pytest.raises(ConfigError, match=match):
            loader.load_state_dict(state)
        assert saved(loader) == before
        for wrong in (None, [1], "state", {"version": 1}, {"epoch": 1}):
            with pytest.raises(ConfigError):
                loader.load_state_dict(wrong)  # type: ignore[arg-type]


def test_the_digest_knows_order_and_names_but_not_where_the_folder_lies() -> None:
    assert digest(["/a/x/1.mp4", "/a/y/2.mp4"]) == digest(["/b/c/x/1.mp4", "/b/c/y/2.mp4"])
    different = [["/a/x/1.mp4", "/a/y/2.mp4"], ["/a/y/2.mp4", "/a/x/1.mp4"], ["/a/x/1.mp4", "/a/y/3.mp4"], ["/a/x/1.mp4"]]
    assert len({digest(paths) for paths in different}) == 4
    assert digest(["1.mp4", "/a/1.mp4"]) != digest(["/a/1.mp4", "1.mp4"])


def test_a_path_that_no_file_system_can_have_is_named_by_its_open(videos: list[str], tmp_path: Path) -> None:
    """Half of a surrogate pair, as JSON can write it, has no UTF-8."""
    rows = [{"path": videos[0], "label": "\ud801"}, {"path": "\ud800.mp4", "label": "b"}]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with VideoLoader(tmp_path / "t.jsonl", **SMALL) as loader:
        loader.load_state_dict(saved(loader))
        with pytest.raises(OpenError, match=r"cannot open .*\ud800\.mp4"):
            Identity.of(loader.dataset.paths[1])


def test_bad_files_are_part_of_the_state(videos: list[str], tmp_path: Path) -> None:
    """Stand-ins depend on the sample alone, so the rest of the epoch is the same; and what is known to be bad stays known."""
    (tmp_path / "bad.mp4").write_bytes(b"no video")
    paths = [*videos, str(tmp_path / "bad.mp4"), str(tmp_path / "bad.mp4")]
    with VideoLoader(paths, **SMALL) as loader:
        batches = list(loader)
    seen = next(number for number, batch in enumerate(batches) if batch.substituted)
    state = json.loads(json.dumps(batches[seen].state))
    with VideoLoader(paths, **SMALL) as loader:
        loader.load_state_dict(state)
        assert set(loader.bad_files) == {str(tmp_path / "bad.mp4")}
        assert [facts(batch) for batch in loader] == [facts(batch) for batch in batches[seen + 1 :]]


def test_batches_of_which_every_clip_was_skipped_count_as_received(videos: list[str], tmp_path: Path) -> None:
    paths = [str(tmp_path / "missing.mp4")] * 3 + videos[:5]
    options = {**SMALL, "shuffle": False, "on_bad_file": "skip"}
    with VideoLoader(paths, **options) as loader:
        batches = list(loader)
    assert [batch.index for batch in batches] == [1, 2, 3]
    assert [batch.state["samples"] for batch in batches] == [4, 6, 8]
    with VideoLoader(paths, **options) as loader:
        loader.load_state_dict(batches[0].state)
        assert [facts(batch) for batch in loader] == [facts(batch) for batch in batches[1:]]


def test_a_copy_of_a_batch_keeps_the_state(videos: list[str]) -> None:
    with VideoLoader(videos, **SMALL) as loader:
        batch = next(iter(loader))
        assert batch.to("cpu").state == batch.state == loader.state_dict()
        assert Batch(dict(batch)).state == {}


# Epochs without an end, and what becomes of their last samples


def test_a_loader_that_repeats_goes_through_epoch_after_epoch(videos: list[str], whole: list[Batch]) -> None:
    with VideoLoader(videos, **SMALL, repeat=True) as loader:
        with pytest.raises(TypeError, match="no length"):
            len(loader)
        iterator = iter(loader)
        batches = [next(iterator) for _ in range(14)]
        assert [facts(batch) for batch in batches] == [facts(batch) for batch in whole[:14]]
        assert [(batch.state["epoch"], batch.state["samples"]) for batch in batches[4:8]] == [(0, 10), (0, 12), (1, 2), (1, 4)]
        loader.load_state_dict(batches[8].state)
        again = iter(loader)
        assert [facts(next(again)) for _ in range(5)] == [facts(batch) for batch in whole[9:14]]


def test_a_loader_that_repeats_keeps_no_epoch_that_has_ended(videos: list[str]) -> None:
    with VideoLoader(videos[:2], **SMALL, repeat=True) as loader:
        iterator = iter(loader)
        first = weakref.ref(loader._run.pipeline)
        for _ in range(4):
            next(iterator)
        gc.collect()
        assert first() is None


def test_closing_a_loader_that_repeats_ends_its_iterator(videos: list[str]) -> None:
    loader = VideoLoader(videos[:2], **SMALL, repeat=True)
    iterator = iter(loader)
    for _ in range(5):  # through the ends of epochs of one batch
        next(iterator)
    loader.close()
    with pytest.raises(Exception, match="cannot go on"):
        next(iterator)


def relabelled(videos: list[str], names: dict[int, str] | list[int] | None) -> list[dict[str, Any]]:
    return [{"path": path} | ({} if names is None else {"label": names[k % 3]}) for k, path in enumerate(videos)]


def test_a_state_of_classes_in_another_order_is_refused(videos: list[str]) -> None:
    """Names are numbered in their order: one renamed would make all others mean something else."""
    with VideoLoader(relabelled(videos, {0: "jump", 1: "left", 2: "right"}), **SMALL) as loader:
        state = saved(loader)
    with (
        VideoLoader(relabelled(videos, {0: "jump", 1: "Left", 2: "right"}), **SMALL) as other,
        pytest.raises(ConfigError, match=r"classes had other names.*\n.*source=\{'classes'"),
    ):
        other.load_state_dict(state)
    with VideoLoader(relabelled(videos, {0: "jump", 1: "left", 2: "right"}), **SMALL) as same:
        same.load_state_dict(state)


@pytest.mark.parametrize(
    ("labels", "change", "says"),
    [
        ([0, 1, 2], {}, ""),
        ([0, 2, 1], {}, "had other labels;"),
        (None, {}, "had labels, and there are none now;"),
        ([0, 1, 2], {"clip": {"frames": 8, "stride": 2}}, "had other clips: clip.frames 4, now 8;"),
        ([0, 1, 2], {"clip": {"frames": 4}}, "had other clips: clip.stride 2, now by default;"),
        ([0, 1, 2], {"transform": {"size": (24, 32), "dtype": "float32"}}, "jitter.brightness [0.6, 1.4], now by default"),
        ([0, 1, 2], {"batch": 3, "jitter": {"depth": 2}}, ""),
    ],
)
def test_what_is_no_longer_as_it_was_is_told_when_a_run_goes_on(
    videos: list[str], labels: Any, change: dict[str, Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    with VideoLoader(relabelled(videos, [0, 1, 2]), **SMALL) as loader:
        state = saved(loader)
    with VideoLoader(relabelled(videos, labels), **{**SMALL, **change}) as other:
        other.load_state_dict(state)
    assert says in caplog.text
    assert bool(caplog.text) == bool(says)


@pytest.mark.parametrize(
    ("labels", "others", "same"),
    [
        ([0, 1, 2], [np.int64(0), np.int32(1), True + True], True),
        ([0.5, 1.0, 2.0], [np.float32(0.5), 1.0, torch.tensor(2.0)], True),
        ([np.zeros(3000)] * 3, [np.zeros(3000).tolist()] * 3, True),
        ([np.zeros(3000)] * 3, [np.zeros(3000)] * 2 + [np.eye(1, 3000, 1500)[0]], False),
    ],
)
def test_labels_are_the_same_by_their_numbers(labels: list[Any], others: list[Any], same: bool) -> None:
    one, other = ([Entry("a.mp4", {"label": label}) for label in each] for each in (labels, others))
    assert (digest_of_labels(one) == digest_of_labels(other)) == same


def test_a_preset_and_its_fields_are_one() -> None:
    named = LoaderConfig.parse({"transform": "kinetics_eval"})
    fields = {name: getattr(named.transform, name) for name in type(named.transform).model_fields if name != "preset"}
    assert made_by(named) == made_by(LoaderConfig.parse({"transform": fields}))


def test_a_state_from_before_such_facts_were_kept_is_taken(videos: list[str], caplog: pytest.LogCaptureFixture) -> None:
    with VideoLoader(videos, **SMALL) as loader:
        state = {name: value for name, value in saved(loader).items() if name not in ("classes", "labels", "made")}
    with VideoLoader(relabelled(videos, [0, 1, 2]), **SMALL) as other:
        other.load_state_dict(state)
    assert not caplog.text


@pytest.mark.parametrize(("ranks", "batches"), [(1, 7), (2, 4)])
def test_filling_up_the_last_batch_leaves_out_no_video(videos: list[str], ranks: int, batches: int) -> None:
    options = {**SMALL, "batch": {"size": 2, "last": "fill"}}
    found: list[Batch] = []
    for rank in range(ranks):
        with VideoLoader(videos, **options, rank=rank, world_size=ranks) as loader:
            assert len(loader) == batches
            got = list(loader)
        assert [batch.video.shape[0] for batch in got] == [2] * batches
        found += got
    requests = [clip.request for batch in found for clip in batch.clips]
    assert sorted(request.sample for request in requests) == list(range(2 * batches * ranks))
    counts = Counter(request.entry for request in requests)
    assert set(counts) == set(range(13))
    first = sorted(requests, key=lambda request: request.sample)
    for again in first[13:]:
        before = first[again.sample - 13]
        assert (again.entry, again.epoch) == (before.entry, before.epoch)
        assert isinstance(again, ClipRequest)
    pixels = clips_by_sample(found)
    repeats = [(pixels[0, k][1], pixels[0, k - 13][1]) for k in range(13, len(requests))]
    assert any(one != other for one, other in repeats), "a video that comes again shows another clip"


def test_a_moved_dataset_is_the_same_one(videos: list[str], tmp_path: Path) -> None:
    states = []
    for folder in (tmp_path / "here", tmp_path / "there"):
        folder.mkdir()
        for number, video in enumerate(videos[:4]):
            shutil.copy(video, folder / f"{number}{Path(video).suffix}")
        with VideoLoader(folder, **SMALL) as loader:
            if states:
                loader.load_state_dict(states[0])
            states.append(next(iter(loader)).state)
    assert [state["samples"] for state in states] == [2, 4]

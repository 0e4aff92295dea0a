"""What errors say, and the invariants and the looks of the objects that travel through the pipeline."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from gpupipe import errors
from gpupipe.device.stream import stage
from gpupipe.errors import DecodeError, DeviceMemoryError, GpupipeError
from gpupipe.types import Batch, ClipRecord, ClipRequest, FramePick, PlaneFormat, Planes, VideoInfo

NV12 = PlaneFormat(width=6, height=4, chroma_width=3, chroma_height=2, interleaved=True)
PLANAR = PlaneFormat(width=5, height=3, chroma_width=3, chroma_height=2)

INFO = VideoInfo(
    path="a.mp4", container="mp4", codec="h264", pix_fmt="yuv420p", width=64, height=48, frames=10,
    time_base=Fraction(1, 90_000), fps=30.0, start_seconds=0.0, duration_seconds=1 / 3,
)  # fmt: skip


def all_errors() -> list[type[GpupipeError]]:
    return [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, GpupipeError)]


def test_an_error_tells_code_cause_place_and_fix() -> None:
    error = DecodeError("frame 7 is damaged", path="/films/a.mp4", time_seconds=0.25, fix="encode the file again")
    assert str(error) == (
        "[TT_ERR_DECODE] frame 7 is damaged (in /films/a.mp4 at 0.250 s)\n  What to do: encode the file again"
    )


def test_a_path_that_the_message_names_is_not_said_twice() -> None:
    assert str(DecodeError("cannot decode a.mp4", path="a.mp4")) == "[TT_ERR_DECODE] cannot decode a.mp4"


def test_codes_are_unique_and_in_one_family() -> None:
    codes = [kind.code for kind in all_errors()]
    assert len(set(codes)) == len(codes) >= 11
    assert all(code.startswith("TT_ERR") for code in codes)


def test_bad_arguments_are_value_errors_too() -> None:
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.SampleError, ValueError)
    assert not issubclass(errors.DecodeError, ValueError)


@pytest.mark.parametrize(("rotation", "size"), [(0, (48, 64)), (90, (64, 48)), (180, (48, 64)), (270, (64, 48))])
def test_display_size_follows_the_rotation(rotation: int, size: tuple[int, int]) -> None:
    assert replace(INFO, rotation=rotation).display_size == size


def test_interleaved_planes_are_split_where_they_lie() -> None:
    data = torch.arange(6 * 8, dtype=torch.uint8).reshape(1, 6, 8)  # 4 luma and 2 chroma rows, pitch 8
    planes = Planes(data, NV12)
    assert planes.y[0, 1].tolist() == [8, 9, 10, 11, 12, 13]
    assert planes.u[0].tolist() == [[32, 34, 36], [40, 42, 44]]
    assert planes.v[0].tolist() == [[33, 35, 37], [41, 43, 45]]
    assert planes.y.data_ptr() == data.data_ptr()  # a view


def test_planar_planes_are_split_where_they_lie() -> None:
    data = torch.arange(7 * 5, dtype=torch.uint8).reshape(1, 7, 5)
    planes = Planes(data, PLANAR)
    assert planes.y.shape == (1, 3, 5)
    assert planes.u[0].tolist() == [[15, 16, 17], [20, 21, 22]]
    assert planes.v[0].tolist() == [[25, 26, 27], [30, 31, 32]]


@pytest.mark.parametrize("shape", [(6, 8), (1, 5, 8), (1, 6, 5)])
def test_planes_refuse_what_does_not_fit_their_format(shape: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError):
        Planes(torch.zeros(shape, dtype=torch.uint8), NV12)


def test_plane_formats_count_bytes_and_rows() -> None:
    assert (NV12.rows, NV12.row_samples, NV12.sample_bytes) == (6, 6, 1)
    assert (PLANAR.rows, PLANAR.row_samples) == (7, 5)
    assert replace(NV12, bits=10, shift=6).sample_bytes == 2


def test_a_pick_has_one_flag_a_frame() -> None:
    FramePick((3, 4), (True, False))
    for indices, mask in (((3, 4), (True,)), ((), ())):
        with pytest.raises(AssertionError):
            FramePick(indices, mask)


def make_batch(count: int = 2) -> Batch:
    record = ClipRecord("a.mp4", ClipRequest(0, 0, 0, 0), FramePick((0,), (True,)), params=None, decoder="cpu")  # type: ignore[arg-type]
    tensors = {"video": torch.zeros(count, 3, 1, 4, 4), "label": torch.arange(count)}
    return Batch(tensors, (record,) * count, text={"title": ["x"] * count}, epoch=1, index=5)


def test_a_batch_is_a_mapping_of_its_tensors() -> None:
    batch = make_batch()

    def model(video: torch.Tensor, label: torch.Tensor) -> int:
        return len(video) + len(label)

    assert model(**batch) == 4
    assert list(batch) == ["video", "label"]
    assert batch.video is batch["video"]
    assert batch.paths == ["a.mp4", "a.mp4"]
    assert batch.text == {"title": ["x", "x"]}
    with pytest.raises(KeyError):
        batch["nothing"]


def test_a_batch_has_its_labels_by_name() -> None:
    """As ``help(Batch)`` has it; where there are none, the error says where labels come from."""
    labels = torch.tensor([1, 2])
    assert Batch({"label": labels}).label is labels
    without = Batch({"video": torch.zeros(2, 3)})
    assert getattr(without, "label", None) is None
    with pytest.raises(KeyError, match="'video': this batch has tokens"):
        _ = Batch({"tokens": torch.zeros(4, 3)}).video
    with pytest.raises(AttributeError, match="label_from"):
        _ = without.label
    assert "class of each clip" in str(Batch.label.__doc__)


def test_what_is_no_attribute_of_a_batch_is_told_of_as_a_key_is() -> None:
    batch = Batch({"score": torch.zeros(1)}, text={"caption": ["a"]})
    for name, says in (("caption", r"in batch\.text\['caption'\]"), ("score", r"batch\['score'\] has it"), ("x", "has score")):
        with pytest.raises(AttributeError, match=says):
            getattr(batch, name)
        assert not hasattr(batch, name)
    assert pickle.loads(pickle.dumps(batch)).text == copy.copy(batch).text == batch.text


def test_a_batch_shows_shapes_and_never_data() -> None:
    assert repr(make_batch()) == "Batch(epoch 1, index 5, video: float32[2, 3, 1, 4, 4], label: int64[2], on cpu)"


def test_trainers_may_rebuild_and_move_a_batch() -> None:
    batch = make_batch()
    rebuilt = type(batch)({name: tensor + 1 for name, tensor in batch.items()})  # as Lightning, Transformers and Accelerate do
    assert rebuilt["label"].tolist() == [1, 2]
    assert rebuilt.paths == []
    moved = batch.to("meta", non_blocking=True)
    assert {str(tensor.device) for tensor in moved.values()} == {"meta"}
    assert (moved.clips, moved.text, moved.epoch, moved.index) == (batch.clips, batch.text, batch.epoch, batch.index)


def test_a_batch_travels_between_processes() -> None:
    batch = make_batch()
    for twin in (pickle.loads(pickle.dumps(batch)), copy.deepcopy(batch)):
        assert torch.equal(twin.video, batch.video)
        assert (twin.clips, twin.text, twin.index) == (batch.clips, batch.text, batch.index)


def test_running_out_of_host_memory_names_the_stage() -> None:
    for fault in (MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")):
        with pytest.raises(DeviceMemoryError, match=r"TT_ERR_MEMORY.*'allocate'.*this machine"), stage("allocate"):
            raise fault


def test_a_batch_has_one_leading_dimension() -> None:
    good = make_batch()
    with pytest.raises(AssertionError, match="label has 3 rows for 2 clips"):
        Batch({"video": good.video, "label": torch.arange(3)}, good.clips)

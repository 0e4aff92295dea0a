"""Memory used again by shape: only what nobody refers to any more, within its bound, and by the loader on the CPU."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from gpupipe import VideoLoader
from gpupipe.data import tasks
from gpupipe.device.buffers import BufferPool
from gpupipe.errors import ConfigError, DeviceError
from gpupipe.train import PipelineExecutor, Precision


def test_what_was_given_back_is_used_again_for_its_shape_alone() -> None:
    buffers = BufferPool("cpu")
    first = buffers.take((4, 5))
    place = first.data_ptr()
    buffers.give_back(first)
    del first
    others = [buffers.take((5, 4)), buffers.take((4, 5), torch.float64), buffers.take((4, 5, 1, 1))]
    assert place not in {other.data_ptr() for other in others}
    assert buffers.take((4, 5)).data_ptr() == place
    assert (buffers.reused, buffers.made) == (1, 4)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_memory_order_is_part_of_the_shape(memory_format: torch.memory_format) -> None:
    buffers = BufferPool("cpu")
    for _ in range(2):
        for wanted in (memory_format, torch.contiguous_format):
            made = buffers.take((2, 3, 4, 5), memory_format=wanted)
            assert made.is_contiguous(memory_format=wanted)
            buffers.give_back(made)
            del made
    assert buffers.reused == (3 if memory_format is torch.contiguous_format else 2)


def _view(tensor: torch.Tensor) -> Any:
    return tensor[1:]


def _array(tensor: torch.Tensor) -> Any:
    return tensor.numpy()


def _graph(tensor: torch.Tensor) -> Any:
    weight = torch.ones(8, requires_grad=True)
    return (weight * tensor).sum()  # keeps its factor for the backward


def _capsule(tensor: torch.Tensor) -> Any:
    return torch.utils.dlpack.to_dlpack(tensor)  # type: ignore[attr-defined]


def _storage(tensor: torch.Tensor) -> Any:
    return tensor.untyped_storage()


def _typed_storage(tensor: torch.Tensor) -> Any:
    return torch.TypedStorage(wrap_storage=tensor.untyped_storage(), dtype=tensor.dtype, _internal=True)


def _piece_of_storage(tensor: torch.Tensor) -> Any:
    return tensor.untyped_storage()[4:8]


@pytest.mark.parametrize("hold", [_view, _array, _graph, _capsule, _storage, _typed_storage, _piece_of_storage])
def test_what_is_held_in_any_way_is_not_written_over(hold: Any) -> None:
    buffers = BufferPool("cpu")
    tensor = buffers.take((8,)).fill_(1.0)
    held = hold(tensor)
    buffers.give_back(tensor)
    place = tensor.data_ptr()
    del tensor
    assert buffers.take((8,)).data_ptr() != place
    del held
    assert buffers.take((8,)).data_ptr() == place


def test_what_another_process_may_read_is_not_kept() -> None:
    buffers = BufferPool("cpu")
    tensor = buffers.take((8,))
    tensor.share_memory_()
    place = tensor.data_ptr()
    buffers.give_back(tensor)
    del tensor
    assert buffers.take((8,)).data_ptr() != place
    assert buffers.held_bytes == 0


def test_a_storage_that_was_looked_at_and_dropped_does_not_keep_memory_from_use() -> None:
    buffers = BufferPool("cpu")
    tensor = buffers.take((8,))
    place = tensor.untyped_storage().data_ptr()
    tensor.untyped_storage().note = "kept by torch with the memory"  # type: ignore[attr-defined]
    buffers.give_back(tensor)
    del tensor
    assert buffers.take((8,)).data_ptr() == place


def test_memory_that_was_freed_by_hand_is_not_written_to() -> None:
    """As FSDP frees parameters. A tensor of the old shape over an empty storage ended the process when it was filled."""
    buffers = BufferPool("cpu")
    tensor = buffers.take((8,))
    buffers.give_back(tensor)
    tensor.untyped_storage().resize_(0)
    del tensor
    assert buffers.take((8,)).untyped_storage().nbytes() == 32
    assert buffers.held_bytes == 0


def test_memory_that_is_given_back_twice_is_used_by_one_at_a_time() -> None:
    """And not kept for ever, as of two tensors over it each would be the other's user."""
    buffers = BufferPool("cpu", idle_bytes=0)
    tensor = buffers.take((8,))
    buffers.give_back(tensor, tensor[2:])
    buffers.give_back(tensor)
    place = tensor.data_ptr()
    assert buffers.held_bytes == 32
    del tensor
    again = buffers.take((8,))
    assert (again.data_ptr(), buffers.held_bytes) == (place, 0)
    assert buffers.take((8,)).data_ptr() != place


def test_a_tensor_of_another_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="on meta was given back to a pool on cpu"):
        BufferPool("cpu").give_back(torch.empty(8, device="meta"))


def test_a_tensor_that_the_pool_did_not_make_is_refused() -> None:
    """It was handed to others, whatever its owner did with it then."""
    buffers = BufferPool("cpu")
    mine, others = buffers.take((8,)), BufferPool("cpu").take((8,))
    for foreign in (torch.empty(8), others, mine.clone(), None):
        with pytest.raises(ConfigError, match="was given back to a pool"):
            buffers.give_back(foreign)  # type: ignore[arg-type]
    buffers.give_back(mine[2:])
    assert buffers.held_bytes == 32


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("make", [BufferPool, lambda device: Precision(None, device)])
def test_a_device_that_is_not_there_is_told(make: Any) -> None:
    with pytest.raises(DeviceError, match="is not there"):
        make("cuda")


def test_those_who_keep_thousands_of_batches_do_not_wait_for_the_pool() -> None:
    """It went through all of them for each new one: 14 ms a batch with 5000, and more with each."""
    buffers = BufferPool("cpu")
    held = []
    for number in range(2000):
        held.append(buffers.take((8,)).fill_(number))
        buffers.give_back(held[-1])
    assert buffers.held_bytes <= 512 * 32
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(held))
    place = held.pop().data_ptr()
    assert buffers.take((8,)).data_ptr() == place, "the newest are used again as ever"


def test_idle_memory_stays_within_its_bound() -> None:
    buffers = BufferPool("cpu", idle_bytes=3 * 4096)
    lent = [buffers.take((1024,)) for _ in range(8)]
    buffers.give_back(*lent)
    assert buffers.held_bytes == 8 * 4096, "in use all the same: nothing is gained by letting go"
    lent.clear()
    lent.append(buffers.take((1024,)))
    assert buffers.held_bytes <= 3 * 4096
    buffers.clear()
    assert buffers.held_bytes == 0


def test_threads_never_get_the_same_memory() -> None:
    buffers = BufferPool("cpu")
    wrong = []

    def work(number: int) -> None:
        for _ in range(200):
            tensor = buffers.take((64,)).fill_(number)
            if not bool((tensor == number).all()):
                wrong.append(number)
            buffers.give_back(tensor)
            del tensor

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert buffers.made <= 8


def test_an_executor_s_preparation_and_its_loop_share_a_pool() -> None:
    """Taken in the preparing thread, given back in the loop: no batch is written over before it was trained on."""
    buffers = BufferPool("cpu")

    def prepare(number: int) -> torch.Tensor:
        return buffers.take((1000,)).fill_(float(number))

    with PipelineExecutor(range(40), prepare=prepare, device="cpu") as run:
        for number, batch in enumerate(run):
            assert bool((batch == number).all())
            buffers.give_back(batch)
            del batch
    assert buffers.made <= 4
    assert buffers.reused >= 36


@pytest.mark.parametrize("layout", ["stack", "pack"])
def test_a_loader_makes_batches_in_the_memory_of_those_that_were_dropped(
    clips: dict[str, Path], monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """And never in that of one that is held: all batches are as those of a loader that keeps every one."""
    pools: list[BufferPool] = []

    class Watched(BufferPool):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            pools.append(self)

    monkeypatch.setattr(tasks, "BufferPool", Watched)

    def loader() -> VideoLoader:
        return VideoLoader(
            [str(clips["h264"])] * 16,
            clip={"frames": 4},
            transform={"size": 32, "dtype": "float32"},
            batch={"size": 2, "layout": layout, "patch": (1, 16, 16)},
            jitter={"depth": 1},
            decode={"threads": 1},
            device="cpu",
        )

    name = "video" if layout == "stack" else "tokens"
    with loader() as kept_whole:
        held = [batch[name] for batch in kept_whole]
    assert len({tensor.data_ptr() for tensor in held}) == len(held) >= 7
    with loader() as dropping:
        sums = [batch[name].clone() for batch in dropping]
    assert all(torch.equal(one, other) for one, other in zip(held, sums, strict=True))
    assert pools[0].reused == 0
    assert pools[1].reused >= 3

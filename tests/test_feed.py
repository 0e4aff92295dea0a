"""The bytes of packets: read in pieces of bounded size into memory that is used again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpupipe.data import index as indices
from gpupipe.data.bytes import Identity, LocalFile
from gpupipe.data.decode import feed as feeds
from gpupipe.data.decode.bitstream import Bitstream
from gpupipe.data.decode.feed import PacketFeed, Scratch, ranges
from gpupipe.data.index import VideoIndex
from gpupipe.data.plan import Pass, Plan
from gpupipe.data.scan.bitstream.nal import START_CODE, to_annexb
from gpupipe.errors import OpenError

Laid = Callable[[list[tuple[int, int]]], VideoIndex]


@pytest.fixture
def laid(clips: dict[str, Path], tmp_path: Path) -> Laid:
    """Makes an index whose packets lie at the given (position, size) in a file of 4 MiB."""
    path = tmp_path / "bytes"
    path.write_bytes(np.random.default_rng(0).bytes(4 << 20))
    index = indices.load(str(clips["h264"]))

    def make(places: list[tuple[int, int]]) -> VideoIndex:
        position, size = np.array(places, np.int64).T
        return replace(index, identity=Identity.of(str(path)), position=position, size=size, pts=np.arange(len(places)))

    return make


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(position, bytes) of each read."""
    seen: list[tuple[int, int]] = []
    original = LocalFile.read_into

    def watched(self: LocalFile, position: int, memory: memoryview) -> int:
        seen.append((position, len(memory)))
        return original(self, position, memory)

    monkeypatch.setattr(LocalFile, "read_into", watched)
    return seen


def take(index: VideoIndex, run: Pass, scratch: Scratch | None = None) -> list[bytes]:
    with PacketFeed(index, scratch=scratch) as feed:
        return [bytes(data) for _, data in feed.packets(run)]


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_packets_are_the_files_bytes_wherever_they_lie(data: st.DataObject, laid: Laid) -> None:
    place = st.tuples(st.integers(0, (4 << 20) - 5000), st.integers(1, 5000))
    index = laid(data.draw(st.lists(place, min_size=1, max_size=40)))
    run = Pass(tuple(sorted(data.draw(st.sets(st.integers(0, len(index.size) - 1), min_size=1)))))
    content = Path(index.identity.path).read_bytes()
    expected = [content[index.position[n] : index.position[n] + index.size[n]] for n in run.packets]
    assert take(index, run) == expected


def test_neighbours_are_one_read_and_far_ones_are_not(laid: Laid, reads: list[tuple[int, int]]) -> None:
    index = laid([(0, 1000), (1000, 1000), (2500, 1000), (1 << 20, 1000), ((1 << 20) + 1000, 10)])
    take(index, Pass((0, 1, 2, 3, 4)))
    assert reads == [(0, 3500), (1 << 20, 1010)]
    assert ranges(index, Plan((Pass((0, 1, 2, 3, 4)),), {}, (), ())) == reads


def test_no_read_is_larger_than_a_window(laid: Laid, reads: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "_WINDOW_BYTES", 1 << 16)
    index = laid([(number * 20000, 20000) for number in range(20)] + [(400000, 1 << 18)])
    take(index, Pass(tuple(range(21))))
    assert [size for _, size in reads] == [60000] * 6 + [40000, 1 << 18], "a packet that is larger is a read of its own"


def test_memory_is_used_again(laid: Laid) -> None:
    index, scratch = laid([(0, 1000), (2 << 20, 3000), (10, 50)]), Scratch()
    take(index, Pass((1,)), scratch)
    memory = scratch.room(1).obj
    take(index, Pass((0, 2)), scratch)
    assert scratch.room(1).obj is memory
    assert take(index, Pass((0,)), scratch) == [Path(index.identity.path).read_bytes()[:1000]]


def test_a_file_that_ends_inside_a_packet(laid: Laid) -> None:
    index = laid([(0, 100), ((4 << 20) - 10, 11)])
    assert len(take(index, Pass((0,)))) == 1
    with pytest.raises(OpenError, match="ends inside packet 1"):
        take(index, Pass((0, 1)))


def test_without_positioned_reads_into_memory(laid: Laid, monkeypatch: pytest.MonkeyPatch) -> None:
    index = laid([(5, 100)])
    expected = take(index, Pass((0,)))
    monkeypatch.delattr("os.preadv")
    assert take(index, Pass((0,))) == expected


@pytest.mark.parametrize("length_size", [1, 2, 4])
def test_a_bitstream_holds_packets_behind_each_other(length_size: int) -> None:
    bitstream = Bitstream()
    units = [b"\x67abc", b"\x68d", b"\x65" + bytes(150)]
    packets = [b"".join(len(unit).to_bytes(length_size, "big") + unit for unit in part) for part in (units[:2], units[2:])]
    for _ in range(2):
        bitstream.clear()
        bitstream.put(START_CODE + b"\x09")
        for packet in packets:
            bitstream.put(memoryview(packet), length_size)
        held = bytes(bitstream.memory)
        assert held == START_CODE + b"\x09" + b"".join(to_annexb(packet, length_size) for packet in packets)


def test_a_bitstream_grows_and_keeps_what_it_holds() -> None:
    bitstream, parts = Bitstream(), [bytes([number]) * 700_000 for number in range(1, 5)]
    for part in parts:
        bitstream.put(part)
    assert bytes(bitstream.memory) == b"".join(parts)


def test_lengths_that_do_not_add_up_are_an_error() -> None:
    with pytest.raises(ValueError, match="do not add up"):
        Bitstream().put((9).to_bytes(4, "big") + b"short", 4)

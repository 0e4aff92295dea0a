"""Damaged files: whatever bytes are wrong, all ends in frames or in a clear error, soon and in little memory."""

from __future__ import annotations

import random
import resource
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import av
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpupipe.data import index as indices
from gpupipe.data.decode import DecodeProcess
from gpupipe.data.plan import make_plan
from gpupipe.data.scan import store
from gpupipe.data.scan.worker import ScanProcess
from gpupipe.errors import DecodeError, OpenError

NAMES = ["h264", "hevc", "vp9", "mpeg4", "ts", "mkv"]
SECONDS = 20.0
MEMORY_MIB = 1500


@pytest.fixture(scope="module")
def originals(clips: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("originals")
    made = {name: clips[name].read_bytes() for name in ("h264", "hevc", "vp9", "mpeg4")}
    for suffix in ("ts", "mkv"):
        with av.open(str(clips["h264"])) as source, av.open(str(folder / f"clip.{suffix}"), "w") as out:
            copy = out.add_stream_from_template(source.streams.video[0])
            for packet in source.demux(video=0):
                if packet.size:
                    packet.stream = copy
                    out.mux(packet)
        made[suffix] = (folder / f"clip.{suffix}").read_bytes()
    return made


@pytest.fixture(scope="module")
def scanner() -> Iterator[ScanProcess]:
    process = ScanProcess()
    yield process
    process.close()


@pytest.fixture(scope="module")
def decoder() -> Iterator[DecodeProcess]:
    process = DecodeProcess()
    yield process
    process.close()


def spoil(data: bytes, draw: random.Random) -> bytes:
    """Some of the ways in which files go bad: bytes changed, zeroed, lost, doubled; the end cut off."""
    spoilt = bytearray(data)
    for _ in range(draw.choice([1, 1, 3, 20])):
        at, size = draw.randrange(len(spoilt)), draw.choice([1, 4, 60, 3000])
        kind = draw.choice(["change", "change", "zero", "lose", "double", "cut"])
        if kind == "change":
            for k in range(at, min(at + size, len(spoilt))):
                spoilt[k] ^= 1 << draw.randrange(8)
        elif kind == "zero":
            spoilt[at : at + size] = bytes(len(spoilt[at : at + size]))
        elif kind == "lose":
            del spoilt[at : at + size]
        elif kind == "double":
            spoilt[at:at] = spoilt[at : at + size]
        elif at > 100:
            del spoilt[at:]
        if len(spoilt) < 2:
            break
    return bytes(spoilt)


@settings(max_examples=150, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(NAMES), seed=st.integers(0, 2**32))
def test_damage_ends_in_frames_or_in_an_error(
    name: str, seed: int, originals: dict[str, bytes], scanner: ScanProcess, decoder: DecodeProcess, tmp_path: Path
) -> None:
    """In processes of their own, as on a GPU machine: a crash in native code would show as their end."""
    draw = random.Random(seed)
    path = tmp_path / f"{seed}.{name}"
    path.write_bytes(spoil(originals[name], draw))
    begin = time.monotonic()
    others = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss  # other tests' processes count too
    index, why = None, ""
    try:
        index = indices.load(str(path), scanner.make)
    except OpenError as error:
        why = str(error)
    if index is None:
        assert str(path) in why
        assert not scanner.ended, "the scanning process crashed"
        with pytest.raises(OpenError) as told:  # the file's own turn gives the reason
            indices.load(str(path))
        assert str(path) in str(told.value)
    else:
        assert 0 < index.info.frames <= 4096
        for _ in range(3):
            wanted = [draw.randrange(index.info.frames) for _ in range(draw.choice([1, 4]))]
            planes, why = None, ""
            try:
                planes = decoder.decode(index, make_plan(index, wanted))
            except (DecodeError, OpenError) as error:
                why = str(error)
            assert planes is None or len(planes) == len(set(wanted))
            assert planes is not None or str(path) in why
            assert "process that decoded it ended" not in why, "the decoding process crashed"
    path.unlink()
    assert time.monotonic() - begin < SECONDS
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss <= max(MEMORY_MIB << 10, others)


@settings(max_examples=200, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_a_damaged_index_file_is_never_taken_for_a_whole_one(seed: int, clips: dict[str, Path], tmp_path: Path) -> None:
    draw = random.Random(seed)
    path = Path(shutil.copy(clips["h264"], tmp_path / "video.mp4"))
    identity = indices.Identity.of(str(path))
    record, _ = store.make(identity)
    spoilt = spoil(record, draw)
    if spoilt == record:
        return
    with suppress(ValueError, KeyError, TypeError):
        assert indices.VideoIndex.parse(spoilt, identity) is None

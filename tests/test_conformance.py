"""Streams of every structure: any frames in any order, alone or together, are those of a decode from the start."""

from __future__ import annotations

from pathlib import Path

import av
import pytest
from streams import FRAMES, STREAMS
from test_decode_cpu import check_random_access

from gpupipe.data.plan import make_plan

SHORT = {"mpeg2_interlaced": FRAMES - 1, "mpeg2_b": FRAMES - 1}
"""Streams that hold back a frame at their end when they are played, and so have one fewer."""


@pytest.mark.parametrize("name", STREAMS)
def test_random_access_equals_a_sequential_decode(name: str, tmp_path: Path) -> None:
    stream = STREAMS[name]
    if stream.codec not in av.codecs_available:
        pytest.skip(f"this PyAV has no encoder {stream.codec}")
    index = check_random_access(stream.make(tmp_path, name), trials=8, seed=len(name))
    assert index.info.frames >= SHORT.get(name, FRAMES)
    for frame in range(0, index.info.frames, 7):
        plan = make_plan(index, [frame])
        assert plan.packets <= plan.plain_packets

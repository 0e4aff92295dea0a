"""Streams of every structure: any frames in any order, alone or together, are those of a decode from the start."""

from __future__ import annotations

from pathlib import Path

import av
import pytest
from streams import STREAMS
from test_decode_cpu import check_random_access

from gpupipe.data.plan import make_plan

HELD_BACK = ("mpeg1", "mpeg2_interlaced", "mpeg2_b", "mpeg2_cut_start_ts")
"""Codecs of which some versions of FFmpeg hold back the last frame when a stream is played."""


@pytest.mark.parametrize("name", STREAMS)
def test_random_access_equals_a_sequential_decode(name: str, tmp_path: Path) -> None:
    stream = STREAMS[name]
    if stream.codec not in av.codecs_available:
        pytest.skip(f"this PyAV has no encoder {stream.codec}")
    index = check_random_access(stream.make(tmp_path, name), trials=8, seed=len(name))
    assert index.info.frames in range(stream.frames - (name in HELD_BACK), stream.frames + 1)
    for frame in range(0, index.info.frames, 7):
        plan = make_plan(index, [frame])
        assert plan.packets <= plan.plain_packets

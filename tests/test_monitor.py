"""What people and other programs are shown of a running loader: the table, plain lines, files, metrics, a profiler's ranges."""

from __future__ import annotations

import io
import json
import logging
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from gpupipe import VideoLoader
from gpupipe.device import inventory, nvtx
from gpupipe.errors import ConfigError, DeviceError
from gpupipe.observe import Look, monitor
from gpupipe.observe.live import line, table
from gpupipe.observe.machine import BusCounters
from gpupipe.observe.sinks import JsonLines, Prometheus, TensorBoard

SMALL: dict[str, Any] = {"clip": {"frames": 2}, "transform": {"size": 16}, "device": "cpu", "batch": 2}


@pytest.fixture
def loader(clips: dict[str, Path]) -> Iterator[VideoLoader]:
    """Four batches of two clips an epoch."""
    with VideoLoader([str(clips["h264"])] * 8, **SMALL) as made:
        yield made


class Kept:
    """A sink that keeps what it gets, and tells when it has some."""

    def __init__(self) -> None:
        self.looks: list[Look] = []
        self.closed = 0
        self.got = threading.Event()

    def write(self, look: Look) -> None:
        self.looks.append(look)
        self.got.set()

    def close(self) -> None:
        self.closed += 1


def watched(loader: VideoLoader, *sinks: Any) -> Look:
    """One epoch under watch; the look at its end."""
    with monitor(loader, sinks=sinks, every_seconds=60, show=False) as watch:
        list(loader)
    assert watch.latest is not None
    return watch.latest


# The monitor


def test_looks_come_while_the_loop_runs_and_one_at_the_end(loader: VideoLoader) -> None:
    kept = Kept()
    with monitor(loader, sinks=[kept], every_seconds=0.05, show=False):
        batches = iter(loader)
        next(batches)
        assert kept.got.wait(20), "a look while the loop does something else"
        rest = list(batches)
    assert kept.closed == 1
    last = kept.looks[-1]
    assert last.batches == 1 + len(rest) == 4
    assert sum(look.seconds * look.clips_per_s for look in kept.looks) == pytest.approx(8), "each clip is in one look"
    for look in kept.looks:
        for name, rates in look.stages.items():
            assert rates.busy + rates.input + rates.output == pytest.approx(1) or rates.busy == 0, name
    assert not [thread for thread in threading.enumerate() if thread.name == "gpupipe-monitor"]


def test_its_thread_ends_with_the_block_whatever_ends_that(loader: VideoLoader) -> None:
    kept = Kept()
    with pytest.raises(KeyboardInterrupt), monitor(loader, sinks=[kept], show=False):
        raise KeyboardInterrupt
    assert kept.closed == 1
    with monitor(loader, sinks=[kept], show=False):
        loader.close()  # a look at a closed loader is no error


def test_plain_lines_where_nobody_watches(loader: VideoLoader, capsys: pytest.CaptureFixture[str]) -> None:
    with monitor(loader):
        list(loader)
    shown = capsys.readouterr()
    assert shown.out == "", "the output of a script is its own"
    (told,) = shown.err.splitlines()
    assert told.startswith("4 batches, ")
    assert "busy: " in told
    assert " limits: " in told or " limit together: " in told or "evenly" in told or "keep pace" in told


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_live_table_on_a_terminal(loader: VideoLoader, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "stderr", terminal)
    with monitor(loader, every_seconds=0.05):
        list(loader)
    shown = terminal.getvalue()
    assert "4 batches" in shown
    for word in ("stage", "busy", "decode", "transform", "consumer"):
        assert word in shown


def test_a_table_fits_a_narrow_terminal(loader: VideoLoader) -> None:
    """No name of a stage is cut, and what limits is said below."""
    look = watched(loader)
    console = Console(file=io.StringIO(), width=80, record=True)
    console.print(table(look))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    for name in look.stages:
        assert f"\n{name} " in text
    assert "…" not in text
    assert " ".join(look.limit.text.split()) in " ".join(text.split())
    assert look.limit.text in line(look)


def test_a_terminal_that_goes_away_ends_no_run(loader: VideoLoader, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Gone())
    with monitor(loader):
        assert len(list(loader)) == 4


def test_a_sink_that_fails_gets_no_more_and_harms_nobody(loader: VideoLoader, caplog: pytest.LogCaptureFixture) -> None:
    class Full(Kept):
        def write(self, look: Look) -> None:
            super().write(look)
            raise OSError(28, "No space left on device")

    full, kept = Full(), Kept()
    with caplog.at_level(logging.WARNING, "gpupipe"), monitor(loader, sinks=[full, kept], every_seconds=0.05, show=False):
        assert full.got.wait(20)
        kept.got.clear()
        assert kept.got.wait(20)
        list(loader)
    assert (len(full.looks), full.closed, kept.closed) == (1, 1, 1)
    (told,) = [record.message for record in caplog.records]
    assert "Full failed" in told
    assert "No space left" in told


def test_a_monitor_that_cannot_start_closes_its_sinks(loader: VideoLoader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a metrics server would stay behind."""

    def fail(device: torch.device) -> None:
        raise RuntimeError("no NVML today")

    kept = Kept()
    monkeypatch.setattr(BusCounters, "open", fail)
    with pytest.raises(RuntimeError, match="no NVML"), monitor(loader, sinks=[kept], show=False):
        pass
    assert kept.closed == 1


def test_too_small_an_interval_is_refused(loader: VideoLoader) -> None:
    for seconds in (0, -1, float("nan")):
        with pytest.raises(ConfigError, match="every_seconds"):
            monitor(loader, every_seconds=seconds)


# Sinks


def test_json_lines(loader: VideoLoader, tmp_path: Path) -> None:
    file = tmp_path / "new" / "looks.jsonl"
    look = watched(loader, JsonLines(file))
    watched(loader, JsonLines(file))
    first, second = (json.loads(row) for row in file.read_text().splitlines())
    assert first["limit"] == look.limit.text
    assert (first["batches"], second["batches"]) == (4, 8), "a second run adds to the file"
    assert first["decode/busy"] == look.stages["decode"].busy > 0
    assert first["index/failures"] == 0
    with pytest.raises(ConfigError, match=r"looks\.jsonl"):
        JsonLines(file / "below")


def test_tensorboard(loader: VideoLoader, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    look = watched(loader, TensorBoard(tmp_path))
    read = EventAccumulator(str(tmp_path)).Reload()
    (event,) = read.Scalars("gpupipe/decode/busy")
    assert event.step == 4
    assert event.value == pytest.approx(look.stages["decode"].busy)
    assert {f"gpupipe/{name}" for name in look.flat()} == set(read.Tags()["scalars"])
    (text,) = read.Tensors("gpupipe/limit/text_summary")
    assert text.tensor_proto.string_val[0].decode() == look.limit.text


def test_a_writer_of_the_users_stays_open(loader: VideoLoader) -> None:
    calls: list[str] = []
    writer = SimpleNamespace(
        add_scalar=lambda tag, value, step: calls.append(tag), add_text=lambda tag, value, step: calls.append(tag),
        flush=lambda: None, close=lambda: calls.append("closed"),
    )  # fmt: skip
    watched(loader, TensorBoard(writer))
    assert "gpupipe/clips_per_s" in calls
    assert "closed" not in calls


def scraped(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        rows = [row for row in answer.read().decode().splitlines() if not row.startswith("#")]
    return {name: float(value) for name, _, value in (row.rpartition(" ") for row in rows)}


def test_prometheus(loader: VideoLoader) -> None:
    pytest.importorskip("prometheus_client")
    sink, kept = Prometheus(0, labels={"rank": "3"}), Kept()
    assert scraped(sink.port) == {}, "no look yet"
    with monitor(loader, sinks=[sink, kept], every_seconds=0.05, show=False):
        list(loader)
        done = loader.stats()
        while not kept.looks or kept.looks[-1].batches < 4:  # a look at all of it
            kept.got.clear()
            assert kept.got.wait(20)
        found = scraped(sink.port)
    assert found['gpupipe_clips_total{rank="3"}'] == 8
    assert found['gpupipe_stage_items_total{rank="3",stage="decode"}'] == 8
    assert found['gpupipe_stage_busy_seconds_total{rank="3",stage="decode"}'] == done["stages"]["decode"]["busy_seconds"]
    assert found['gpupipe_stage_queue{rank="3",stage="buffer"}'] == 0
    assert 'gpupipe_limits{rank="3",stage="decode"}' in found
    assert found['gpupipe_stage_item_seconds{quantile="0.99",rank="3",stage="decode"}'] > 0
    with pytest.raises(urllib.error.URLError):  # closed with the block
        scraped(sink.port)


def test_metrics_are_served_to_this_machine_alone_and_once(loader: VideoLoader) -> None:
    pytest.importorskip("prometheus_client")
    sink = Prometheus(0)
    try:
        assert sink._server.server_address[0] == "127.0.0.1"
        with pytest.raises(ConfigError, match=f"127.0.0.1:{sink.port}"):
            Prometheus(sink.port)
    finally:
        sink.close()
    with socket.socket() as free:
        free.bind(("127.0.0.1", sink.port))  # the port is given back
    with pytest.raises(ConfigError, match="70000"):
        Prometheus(70000)


@pytest.mark.parametrize(
    ("package", "make"), [("tensorboard", lambda: TensorBoard("x")), ("prometheus_client", lambda: Prometheus(0))]
)
def test_a_missing_package_is_named(package: str, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = inventory._import.__wrapped__
    monkeypatch.setattr(inventory, "_import", lambda name: (None, "No module") if name == package else missing(name))
    with pytest.raises(DeviceError, match=package) as error:
        make()
    assert "pip install" in str(error.value)
    assert "[observe]" in str(error.value)


# The bus


def test_the_bus_is_asked_of_nvml() -> None:
    class NoAnswer(Exception):
        pass

    def throughput(handle: str, counter: int) -> int:
        assert handle == "gpu"
        if counter == 7:
            raise NoAnswer
        return 3

    nvml: Any = SimpleNamespace(
        NVML_PCIE_UTIL_TX_BYTES=7, NVML_PCIE_UTIL_RX_BYTES=8, NVMLError=NoAnswer, nvmlDeviceGetPcieThroughput=throughput
    )
    assert BusCounters(nvml, "gpu").read() == (None, 3 * 1024), "what this GPU does not tell is None"
    assert BusCounters.open(torch.device("cpu")) is None


# A profiler's ranges


class Ranges:
    """A marker that keeps each thread's ranges."""

    def __init__(self) -> None:
        self.open: dict[int, list[str]] = {}
        self.seen: list[tuple[str, ...]] = []

    def push(self, name: str) -> None:
        stack = self.open.setdefault(threading.get_ident(), [])
        stack.append(name)
        self.seen.append(tuple(stack))

    def pop(self) -> None:
        self.open[threading.get_ident()].pop()


def test_stages_are_marked_with_their_batch(clips: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = Ranges()
    monkeypatch.setattr(nvtx, "marker", lambda device: ranges)
    with VideoLoader([str(clips["h264"])] * 8, **SMALL) as loader:
        list(loader)
    names = {stack[-1] for stack in ranges.seen}
    for stage in ("index", "decode", "transform", "assemble"):
        assert {f"gpupipe {stage} batch {number}" for number in range(4)} <= names
    assert {len(stack) for stack in ranges.open.values()} == {0}, "each range has an end"
    assert ("gpupipe decode batch 3", "gpupipe read batch 3") in ranges.seen
    assert ("gpupipe wait",) in ranges.seen, "the loop's own waits"
    assert not [name for name in names if name.startswith("gpupipe room batch")], "a thread without work is at no batch"


@pytest.mark.parametrize(("asked", "device", "there"), [("1", "cuda:0", True), ("1", "cpu", False), ("0", "cuda:0", False),
                                                        ("", "cuda:0", False)])  # fmt: skip
def test_ranges_are_made_where_asked_for_and_cuda_is(
    asked: str, device: str, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setenv("GPUPIPE_NVTX", asked)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("end"))
    made = nvtx.marker(torch.device(device))
    assert (made is not None) is there
    if made is not None:
        made.push("gpupipe decode")
        made.pop()
        assert calls == ["gpupipe decode", "end"]


def test_asking_for_ranges_on_the_cpu_changes_nothing(clips: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch without CUDA raises at each range."""
    monkeypatch.setenv("GPUPIPE_NVTX", "1")
    with VideoLoader([str(clips["h264"])] * 2, **SMALL) as loader:
        assert len(list(loader)) == 1
        assert loader._telemetry.marker is None

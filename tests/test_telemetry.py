"""Counters and durations: right sums from many threads, percentiles of the newest, one warning a key."""

from __future__ import annotations

import logging
import threading

import pytest

from gpupipe.telemetry import _KEPT, Telemetry


def test_counts_from_many_threads_add_up() -> None:
    telemetry = Telemetry()

    def work() -> None:
        for _ in range(2000):
            telemetry.count("packets")
            telemetry.count("bytes", by=3)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert telemetry.value("packets") == 16_000
    assert telemetry.snapshot()["bytes"] == 48_000
    assert telemetry.value("never seen") == 0


def test_percentiles() -> None:
    telemetry = Telemetry()
    assert telemetry.percentile("wait", 0.5) == 0.0
    for milliseconds in range(100):
        telemetry.observe("wait", milliseconds / 1000)
    assert telemetry.percentile("wait", 0.5) == pytest.approx(0.050)
    assert telemetry.percentile("wait", 0.99) == pytest.approx(0.099)
    assert telemetry.percentile("wait", 1.0) == pytest.approx(0.099)
    snapshot = telemetry.snapshot()
    assert snapshot["wait_seconds"] == pytest.approx(4.95)
    assert snapshot["wait_p50_seconds"] == pytest.approx(0.050)
    assert snapshot["wait_p99_seconds"] == pytest.approx(0.099)


def test_old_durations_leave_the_percentiles_but_not_the_total() -> None:
    telemetry = Telemetry()
    telemetry.observe("wait", 1000.0)
    for _ in range(_KEPT):
        telemetry.observe("wait", 0.0)
    assert telemetry.percentile("wait", 1.0) == 0.0
    assert telemetry.snapshot()["wait_seconds"] == 1000.0


def test_a_span_is_kept_even_when_its_block_fails() -> None:
    telemetry = Telemetry()
    with pytest.raises(ZeroDivisionError), telemetry.span("decode"):
        raise ZeroDivisionError
    assert telemetry.snapshot()["decode_seconds"] > 0


def test_a_warning_is_told_once_a_key(caplog: pytest.LogCaptureFixture) -> None:
    telemetry = Telemetry()
    with caplog.at_level(logging.WARNING, logger="gpupipe"):
        for key in ("a.mp4", "a.mp4", "b.mp4"):
            telemetry.warn_once(key, f"{key}: falls back to the CPU")
    assert [record.message for record in caplog.records] == ["a.mp4: falls back to the CPU", "b.mp4: falls back to the CPU"]

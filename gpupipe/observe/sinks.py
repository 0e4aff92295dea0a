"""Where a monitor's looks go: a file of JSON lines, TensorBoard, Prometheus."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Protocol, cast

from gpupipe.device.inventory import load
from gpupipe.errors import ConfigError
from gpupipe.observe.live import Look

PathLike = str | os.PathLike[str]


class JsonLines:
    """Appends one JSON object a look: ``time``, ``seconds``, ``batches``, ``limit``, ``limiting`` and all of :meth:`Look.flat`.

    Args:
        file: made where it is not there, with its folder; each line is on its way to the disk before the next look.

    Raises:
        ConfigError: when it cannot be written.
    """

    def __init__(self, file: PathLike) -> None:
        path = Path(file)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[str] = path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error}", fix="name a file in a folder of yours") from error

    def write(self, look: Look) -> None:
        head = {
            "time": look.time,
            "seconds": look.seconds,
            "batches": look.batches,
            "limit": look.limit.text,
            "limiting": look.limit.stages,
        }
        numbers = {name: value for name, value in look.flat().items() if math.isfinite(value)}
        self._file.write(json.dumps(head | numbers) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Writer(Protocol):
    """What :class:`TensorBoard` needs of torch's ``SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...
    def add_text(self, tag: str, text_string: str, global_step: int) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Writes all of :meth:`Look.flat` as scalars under ``gpupipe/`` over the number of batches taken; what limits as text.

    Args:
        to: a folder; or a ``SummaryWriter`` of yours, which stays open.

    Raises:
        DeviceError: when the package tensorboard is not there.
    """

    def __init__(self, to: PathLike | Writer) -> None:
        self._own = isinstance(to, str | os.PathLike)
        self._limit: tuple[str, ...] | None = None
        if isinstance(to, str | os.PathLike):
            load("tensorboard")
            from torch.utils.tensorboard import SummaryWriter

            self._writer = cast(Writer, SummaryWriter(os.fspath(to)))  # type: ignore[no-untyped-call]
        else:
            self._writer = to

    def write(self, look: Look) -> None:
        for name, value in look.flat().items():
            self._writer.add_scalar(f"gpupipe/{name}", value, look.batches)
        if look.limit.stages != self._limit:
            self._limit = look.limit.stages
            self._writer.add_text("gpupipe/limit", look.limit.text, look.batches)
        self._writer.flush()

    def close(self) -> None:
        if self._own:
            self._writer.close()


_COUNTERS = (
    ("items", "stage_items", "Items done"),
    ("busy_seconds", "stage_busy_seconds", "Thread-seconds at work"),
    ("input_seconds", "stage_input_seconds", "Thread-seconds spent waiting for what comes before"),
    ("output_seconds", "stage_output_seconds", "Thread-seconds spent waiting for what comes after"),
    ("bytes", "stage_bytes", "Bytes read or written"),
    ("failures", "stage_failures", "Failures"),
)
_TOTALS = (
    ("clips", "clips", "Clips made"),
    ("clips_padded", "clips_padded", "Clips of videos too short for them"),
    ("batches", "batches", "Batches taken"),
    ("bad_clips", "bad_clips", "Clips that could not be made"),
    ("substituted", "substituted", "Samples that took the place of bad ones"),
    ("to_device_bytes", "to_device_bytes", "Bytes that the pipeline sent to the GPU"),
    ("device_written_bytes", "device_written_bytes", "Bytes that the pipeline wrote in the GPU's memory"),
)


class Prometheus:
    """Serves the newest look at ``http://host:port/metrics``, until it is closed.

    Counters are those of ``loader.stats()`` since the loader was made, by ``stage``; what Prometheus makes rates of.

    Args:
        port: 0 takes a free one: :attr:`port` tells which.
        host: who may ask: this machine alone unless another address is named, such as ``0.0.0.0`` for everybody.
        labels: put on every metric, ``{"rank": "0"}`` say.

    Raises:
        DeviceError: when the package prometheus-client is not there.
        ConfigError: when the port cannot be had.
    """

    def __init__(self, port: int, host: str = "127.0.0.1", labels: dict[str, str] | None = None) -> None:
        client = load("prometheus_client")
        self._core = load("prometheus_client.core")
        self._labels = dict(labels or {})
        self._look: Look | None = None
        registry = client.CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = client.start_http_server(port, addr=host, registry=registry)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"metrics cannot be served at {host}:{port}: {error}", fix="name a free port, or 0 for any"
            ) from error
        self._thread.name = "gpupipe-metrics"
        self.port: int = self._server.server_address[1]

    def write(self, look: Look) -> None:
        self._look = look

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterator[Any]:
        """For prometheus-client: the metrics of the newest look."""
        look, core = self._look, self._core
        if look is None:
            return
        names, values = list(self._labels), list(self._labels.values())
        for key, name, text in _TOTALS:
            metric = core.CounterMetricFamily(f"gpupipe_{name}", text, labels=names)
            metric.add_metric(values, look.totals.get(key, 0))
            yield metric
        stages = look.totals["stages"]
        for key, name, text in _COUNTERS:
            metric = core.CounterMetricFamily(f"gpupipe_{name}", text, labels=[*names, "stage"])
            for stage, figures in stages.items():
                metric.add_metric([*values, stage], figures[key])
            yield metric
        queue = core.GaugeMetricFamily("gpupipe_stage_queue", "Items that wait for a stage", labels=[*names, "stage"])
        item = core.GaugeMetricFamily(
            "gpupipe_stage_item_seconds", "Time of one item, of the newest", labels=[*names, "stage", "quantile"]
        )
        limits = core.GaugeMetricFamily("gpupipe_limits", "1 for the stages that limit now", labels=[*names, "stage"])
        for stage, figures in stages.items():
            limits.add_metric([*values, stage], float(stage in look.limit.stages))
            if figures["queue"] is not None:
                queue.add_metric([*values, stage], figures["queue"])
            for key, share in (("p50_seconds", "0.5"), ("p99_seconds", "0.99")):
                if figures[key] is not None:
                    item.add_metric([*values, stage, share], figures[key])
        yield from (queue, item, limits)
        for way, value in (("to", look.pcie_to_device_bytes_per_s), ("from", look.pcie_from_device_bytes_per_s)):
            if value is not None:
                text = f"Bytes a second {way} the GPU over PCIe, of all processes"
                bus = core.GaugeMetricFamily(f"gpupipe_pcie_{way}_device_bytes_per_second", text, labels=names)
                bus.add_metric(values, value)
                yield bus

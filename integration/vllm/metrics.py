"""What kvferry counts, for vLLM's logger and for Prometheus. ``docs/metrics.md`` lists it.

Each side reports its own part, as differences to what it reported last: the scheduler what it
decides for all ranks at once, every rank what it moves. No metric is reported by both, so adding up
counts nothing twice. Gauges are kept by who reported them, the newest value of each, and added up
only when they are shown: vLLM merges the stats of ranks and those of later steps in the same way.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from prometheus_client import Counter, Gauge
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

PREFIX: Final = "vllm:kvferry_"
"""Whatever begins with "vllm:" is taken out of the registry before a second engine starts."""

SCHEDULER: Final = "scheduler"


def rank_name(rank: int) -> str:
    """Who reports a rank's part."""
    return f"rank {rank}"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric; ``sources`` are the keys of a snapshot, by the value of its label.

    A metric without a label has one source, under "".
    """

    name: str
    help: str
    sources: Mapping[str, str]
    label: str = ""

    @property
    def is_counter(self) -> bool:
        return self.name.endswith("_total")

    def series(self) -> list[tuple[str, str, str]]:
        """(key in the stats, label's value, key of the snapshot) of each time series."""
        short = self.name.removesuffix("_total")
        return [
            (f"{short}_{value}" if value else short, value, source)
            for value, source in self.sources.items()
        ]


def _one(name: str, source: str, help: str) -> Metric:
    return Metric(name, help, {"": source})


_DIRECTIONS = ("store", "load")

OF_SCHEDULER: Final = (
    _one("hits_total", "hits", "Requests admitted with tokens to load from the host"),
    _one("misses_total", "misses", "Requests admitted for which the host had nothing to load"),
    _one("declined_total", "declined", "Requests admitted whose hit was not worth loading"),
    _one("waits_total", "waits", "Answers that made a request wait for transfers of others"),
    _one("stored_chunks_total", "stored_chunks", "Chunks stored, on every rank"),
    _one("loaded_chunks_total", "loaded_chunks", "Chunks loaded, on every rank"),
    _one("evicted_chunks_total", "evicted_chunks", "Chunks evicted from the host"),
    Metric(
        "failed_jobs_total",
        "Jobs that did not succeed on every rank, stores that were skipped among them",
        {one: f"failed_{one}s" for one in _DIRECTIONS},
        "direction",
    ),
    Metric(
        "slots",
        "Places for chunks in host memory, on each rank",
        {state: state for state in ("free", "writing", "ready", "reading", "doomed")},
        "state",
    ),
    _one("jobs", "jobs", "Jobs that some rank is not done with: the queue of all transfers"),
    _one("fenced_blocks", "fences", "GPU blocks that a transfer still reads or writes"),
)
"""Reported once for all ranks."""

OF_RANKS: Final = (
    Metric(
        "bytes_total",
        "Bytes moved by transfers that succeeded, of all ranks",
        {"store": "stored_bytes", "load": "loaded_bytes"},
        "direction",
    ),
    Metric(
        "seconds_total",
        "Time that those transfers took on their device, of all ranks",
        {"store": "store_s", "load": "load_s"},
        "direction",
    ),
    _one("failed_transfers_total", "failed_jobs", "Transfers that failed, of all ranks"),
    _one("skipped_stores_total", "skipped_jobs", "Stores skipped because too much was queued"),
    _one("corrupt_chunks_total", "corrupt_chunks", "Loaded chunks whose checksums differed"),
    _one("flushes_total", "flushes", "Times that compute was held until blocks had been read"),
    _one("flush_seconds_total", "flush_s", "Time that compute stood still in those"),
    _one("transfers", "jobs", "Transfers under way or queued, of all ranks"),
    _one("queued_transfers", "queued", "Those of them that are not launched"),
    _one("queued_store_bytes", "store_bytes_in_flight", "Bytes of stores under way or queued"),
    _one("host_bytes", "arena_bytes", "Host memory taken, of all ranks"),
    _one("pinned_bytes", "pinned_bytes", "Host memory that is pinned, of all ranks"),
    _one("ranks_off", "off", "Ranks that stopped transferring after repeated failures"),
)
"""Reported by every rank, and added up."""

METRICS: Final = OF_SCHEDULER + OF_RANKS

_COUNTERS: Final = "counters"
_GAUGES: Final = "gauges"


class OffloadStats(KVConnectorStats):
    """What happened in an interval: counters by key, and gauges by reporter and key."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        """``data`` is copied: several loggers are given the same, and each adds to its own."""
        super().__init__(data=copy.deepcopy(data) if data else {})
        self.data.setdefault(_COUNTERS, {})
        self.data.setdefault(_GAUGES, {})

    def reset(self) -> None:
        self.data = {_COUNTERS: {}, _GAUGES: {}}

    def aggregate(self, other: KVConnectorStats) -> "OffloadStats":
        """Take in another rank's stats, or those of a later interval."""
        counters = self.data[_COUNTERS]
        for key, number in other.data.get(_COUNTERS, {}).items():
            counters[key] = counters.get(key, 0) + number
        self.data[_GAUGES].update(copy.deepcopy(other.data.get(_GAUGES, {})))
        return self

    def reduce(self) -> dict[str, int | float]:
        """One line of vLLM's log: what is not zero, and the rates that follow."""
        counters = self.data[_COUNTERS]
        shown = {**counters, **added_up(self.data[_GAUGES].values())}
        for direction in _DIRECTIONS:
            seconds = counters.get(f"seconds_{direction}", 0)
            if seconds:
                rate = counters.get(f"bytes_{direction}", 0) / seconds
                shown[f"{direction}_gb_per_s"] = rate / 1e9
        return {
            key: round(number, 3) if isinstance(number, float) else number
            for key, number in shown.items()
            if number
        }

    def is_empty(self) -> bool:
        return not (self.data[_COUNTERS] or self.data[_GAUGES])


def added_up(parts: Any) -> dict[str, int | float]:
    """The sums by key of gauges of several reporters."""
    sums: dict[str, int | float] = {}
    for part in parts:
        for key, number in part.items():
            sums[key] = sums.get(key, 0) + number
    return sums


class Reporter:
    """One side's stats, from its snapshots."""

    def __init__(self, name: str, metrics: tuple[Metric, ...]) -> None:
        self._name = name
        series = [(metric.is_counter, one) for metric in metrics for one in metric.series()]
        self._counters = [(key, source) for counts, (key, _, source) in series if counts]
        self._gauges = [(key, source) for counts, (key, _, source) in series if not counts]
        self._last: Mapping[str, int | float] = MappingProxyType({})

    def take(self, snapshot: Mapping[str, int | float]) -> OffloadStats | None:
        """What has changed since the last call; None when nothing has."""
        last, self._last = self._last, snapshot
        grown = {
            key: snapshot[source] - last.get(source, 0)
            for key, source in self._counters
            if snapshot[source] != last.get(source, 0)
        }
        gauges: dict[str, Any] = {}
        if any(snapshot[source] != last.get(source) for _, source in self._gauges):
            gauges[self._name] = {key: snapshot[source] for key, source in self._gauges}
        if not (grown or gauges):
            return None
        return OffloadStats({_COUNTERS: grown, _GAUGES: gauges})


class PromMetrics(KVConnectorPromMetrics):
    """The Prometheus side: every series exists, at 0, from the start."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._series: dict[tuple[int, str], Any] = {}
        self._gauges: dict[int, dict[str, dict[str, int | float]]] = {}
        for metric in METRICS:
            names = [*labelnames, *([metric.label] if metric.label else [])]
            about = {"name": PREFIX + metric.name, "documentation": metric.help}
            if metric.is_counter:
                family = metric_types[Counter](**about, labelnames=names)
            else:
                family = metric_types[Gauge](
                    **about, labelnames=names, multiprocess_mode="mostrecent"
                )
            for engine, values in per_engine_labelvalues.items():
                for key, value, _ in metric.series():
                    labels = [*values, *([value] if metric.label else [])]
                    series = family.labels(*labels)
                    if not metric.is_counter:
                        series.set(0)
                    self._series[engine, key] = series

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take in one step's stats of one engine."""
        for key, number in transfer_stats_data.get(_COUNTERS, {}).items():
            self._series[engine_idx, key].inc(number)
        if reported := transfer_stats_data.get(_GAUGES):
            known = self._gauges.setdefault(engine_idx, {})
            known.update(reported)
            for key, number in added_up(known.values()).items():
                self._series[engine_idx, key].set(number)

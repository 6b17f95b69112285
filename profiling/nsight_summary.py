"""How long things took and what they moved: one line for each kind of range, copy or kernel."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from .percentiles import percentile
from .plan_units import size_text

_FIELDS: Final = ("of", "direction", "strategy")
"""Fields of a range's message that tell kinds of it apart; the others differ every time."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One range, copy or kernel. ``device_ns`` is how long the device worked on what a range
    started; ``num_bytes`` is 0 where nothing says how much was moved."""

    kind: str
    start_ns: int
    end_ns: int
    num_bytes: int = 0
    device_ns: int = 0

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True)
class Summary:
    """All of one kind. Times in seconds. ``bytes_per_s`` is over the device's time, and None where
    there is none: a range that only queues a transfer says nothing about its speed."""

    kind: str
    count: int
    total_s: float
    p50_s: float
    p99_s: float
    device_s: float
    num_bytes: int
    bytes_per_s: float | None


def summarise(timed: Iterable[Timed]) -> list[Summary]:
    """One summary for each kind, the longest in total first."""
    by_kind: dict[str, list[Timed]] = {}
    for one in timed:
        by_kind.setdefault(one.kind, []).append(one)
    found = [_summary(kind, ones) for kind, ones in by_kind.items()]
    return sorted(found, key=lambda one: (-one.total_s, one.kind))


def _summary(kind: str, ones: Sequence[Timed]) -> Summary:
    durations = sorted(one.duration_ns for one in ones)
    total, device = sum(durations), sum(one.device_ns for one in ones)
    num_bytes = sum(one.num_bytes for one in ones)
    return Summary(
        kind,
        len(ones),
        total / 1e9,
        percentile(durations, 50) / 1e9,
        percentile(durations, 99) / 1e9,
        device / 1e9,
        num_bytes,
        num_bytes * 1e9 / device if num_bytes and device else None,
    )


def kind_and_bytes(message: str) -> tuple[str, int]:
    """``submit job=3 direction=store bytes=64`` -> ``("submit store", 64)``.

    The name is what comes before the first field; of the fields only those count that tell kinds
    apart, by their values.
    """
    words = message.split(" ")
    fields = dict(word.split("=", 1) for word in words if "=" in word)
    name = " ".join(word for word in words if "=" not in word)
    size = fields.get("bytes", "")
    return kind_of(name, fields), int(size) if size.isdigit() else 0


def kind_of(name: str, fields: Mapping[str, object]) -> str:
    """A range's name and the fields that tell kinds of it apart."""
    return " ".join([name, *(str(fields[key]) for key in _FIELDS if key in fields)])


def lines_of(title: str, summaries: Sequence[Summary]) -> list[str]:
    """A table for people."""
    width = max([len(title), *(len(one.kind) for one in summaries)])
    head = f"{title:<{width}} {'count':>7} {'total ms':>10} {'p50 us':>9} {'p99 us':>9}"
    lines = [f"{head} {'device ms':>9} {'bytes':>10} {'GB/s':>7}"]
    for one in summaries:
        rate = "-" if one.bytes_per_s is None else f"{one.bytes_per_s / 1e9:.2f}"
        device = f"{one.device_s * 1e3:.2f}" if one.device_s else "-"
        lines.append(
            f"{one.kind:<{width}} {one.count:>7,} {one.total_s * 1e3:>10.2f}"
            f" {one.p50_s * 1e6:>9.1f} {one.p99_s * 1e6:>9.1f} {device:>9}"
            f" {size_text(one.num_bytes) if one.num_bytes else '-':>10} {rate:>7}"
        )
    return lines

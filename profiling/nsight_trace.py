"""The built-in trace: the engine's ranges and jobs as a Chrome / Perfetto trace, on any machine.

``recording`` listens where a profiler would: every ``span`` of the engine becomes an event on the
lane of its thread, and every job an event on the lane of its direction, from its first submit to
the report that ends it. A step's event lasts from ``begin_step`` to the last ``poll`` before the
next one: beside the transfers it shows when the model computes.

It covers the process it runs in. Only one recording at a time.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ..engine import ranges
from ..engine.messages import JobReport
from ..engine.transfer import TransferEngine
from .nsight_summary import Timed, kind_of

STEPS: Final = "steps"
Fields = dict[str, str | int | float | None]

MAX_EVENTS: Final = 1_000_000
"""About 300 MB of trace: what comes later is counted and left out."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that lasted, on a lane. Times are of ``time.perf_counter_ns``."""

    lane: str
    name: str
    start_ns: int
    end_ns: int
    fields: Fields = field(default_factory=dict)

    def timed(self) -> Timed:
        num_bytes, device_s = self.fields.get("bytes"), self.fields.get("device_s")
        return Timed(
            kind_of(self.name, self.fields),
            self.start_ns,
            self.end_ns,
            num_bytes if isinstance(num_bytes, int) else 0,
            int(device_s * 1e9) if isinstance(device_s, float) else 0,
        )


class Recorder:
    """Events in the order in which they ended; safe from several threads."""

    def __init__(self, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self.events: list[Event] = []
        self.num_left_out = 0
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._launched_ns: dict[int, int] = {}
        self._step: tuple[int, int] | None = None

    def add(self, event: Event) -> None:
        with self._lock:
            if len(self.events) < MAX_EVENTS:
                self.events.append(event)
            else:
                self.num_left_out += 1

    @contextlib.contextmanager
    def span(self, name: str, fields: dict[str, object]) -> Iterator[None]:
        """Stands in for the range that a profiler would see."""
        begun = self._clock_ns()
        if name == "submit" and isinstance(job := fields.get("job"), int):
            self._launched_ns.setdefault(job, begun)
        try:
            yield
        finally:
            plain: Fields = {
                key: value if isinstance(value, int | float) else str(value)
                for key, value in fields.items()
            }
            lane = f"ranges of {threading.current_thread().name}"
            self.add(Event(lane, name, begun, self._clock_ns(), plain))

    def begin_step(self) -> None:
        self.end_step()
        now = self._clock_ns()
        self._step = (now, now)

    def end_step(self) -> None:
        """The step that is open, if any, ends with its last poll."""
        if self._step is not None and self._step[1] > self._step[0]:
            self.add(Event(STEPS, "step", *self._step))
        self._step = None

    def polled(self, reports: list[JobReport]) -> None:
        now = self._clock_ns()
        if self._step is not None:
            self._step = (self._step[0], now)
        for report in reports:
            begun = self._launched_ns.pop(report.job_id, None)
            if begun is None:  # given up before, or never launched
                continue
            fields: Fields = {
                "job": int(report.job_id),
                "bytes": report.num_bytes,
                "strategy": report.strategy,
                "device_s": report.seconds,
                "error": report.error,
            }
            lane = f"{report.direction}s, rank {report.rank}"
            self.add(Event(lane, str(report.direction), begun, now, fields))


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Record every engine of this process while the block runs."""
    recorder = Recorder()
    begin_step, poll = TransferEngine.begin_step, TransferEngine.poll
    listening, annotate = ranges.LISTENING, ranges._annotate

    def recorded_begin(engine: TransferEngine) -> None:
        recorder.begin_step()
        begin_step(engine)

    def recorded_poll(engine: TransferEngine) -> list[JobReport]:
        reports = poll(engine)
        recorder.polled(reports)
        return reports

    seams: list[tuple[Any, str, Any, Any]] = [
        (TransferEngine, "begin_step", recorded_begin, begin_step),
        (TransferEngine, "poll", recorded_poll, poll),
        (ranges, "_annotate", recorder.span, annotate),
        (ranges, "LISTENING", True, listening),
    ]
    for owner, name, ours, _ in seams:
        setattr(owner, name, ours)
    try:
        yield recorder
    finally:
        for owner, name, _, theirs in reversed(seams):
            setattr(owner, name, theirs)
        recorder.end_step()


def write_trace(recorder: Recorder, path: Path) -> None:
    """The events in Chrome's trace format, which Perfetto reads too: a track for each lane."""
    process = os.getpid()
    lanes = sorted({event.lane for event in recorder.events}, key=_order)
    tracks = {lane: number for number, lane in enumerate(lanes)}
    entries: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": process, "args": {"name": "kvferry"}}
    ]
    for lane, track in tracks.items():
        names = {"thread_name": {"name": lane}, "thread_sort_index": {"sort_index": track}}
        entries += [
            {"ph": "M", "name": name, "pid": process, "tid": track, "args": args}
            for name, args in names.items()
        ]
    zero = min((event.start_ns for event in recorder.events), default=0)
    entries += [
        {
            "ph": "X",
            "cat": "kvferry",
            "name": event.name,
            "pid": process,
            "tid": tracks[event.lane],
            "ts": (event.start_ns - zero) / 1e3,
            "dur": (event.end_ns - event.start_ns) / 1e3,
            "args": event.fields,
        }
        for event in recorder.events
    ]
    whole = {"traceEvents": entries, "otherData": {"left_out": recorder.num_left_out}}
    path.write_text(json.dumps(whole))


def _order(lane: str) -> tuple[int, str]:
    """Steps on top, then transfers, then ranges."""
    return (0 if lane == STEPS else 2 if lane.startswith("ranges") else 1), lane

"""The built-in trace: the engine's ranges and jobs as a Chrome / Perfetto trace, on any machine.

``recording`` listens where a profiler would (``engine/ranges.py``). A lane each for the engine's
steps, for compute, for the loads and the stores of a rank, and for flushes; every other range is on
the lane of its thread. A job lasts from its first submit to the report that ends it. Compute is the
model's forward: on a CPU all of it, on a GPU the launching, which is what the host sees.

It covers the process it runs in.
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
from .nsight_summary import Timed, kind_of

STEPS: Final = "steps"
COMPUTE: Final = "compute"
FLUSHES: Final = "flushes"
_LANES: Final = {"step": STEPS, "compute": COMPUTE, "flush": FLUSHES}
"""Lanes of ranges by their names; all others are on their thread's."""

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
        self._submitted_ns: dict[object, int] = {}
        self._stopped = False

    def add(self, event: Event) -> None:
        with self._lock:
            if self._stopped:
                return
            if len(self.events) < MAX_EVENTS:
                self.events.append(event)
            else:
                self.num_left_out += 1

    def stop(self) -> None:
        """What is still open belongs to no recording: it may end at any time later."""
        with self._lock:
            self._stopped = True

    @contextlib.contextmanager
    def span(self, name: str, fields: dict[str, object]) -> Iterator[None]:
        end = self.begin(name, fields)
        try:
            yield
        finally:
            end()

    def begin(self, name: str, fields: dict[str, object]) -> Callable[[], None]:
        begun = self._clock_ns()
        if name == "submit":
            self._submitted_ns.setdefault(fields.get("job"), begun)
        lane = _LANES.get(name) or f"ranges of {threading.current_thread().name}"

        def end() -> None:
            self.add(Event(lane, name, begun, self._clock_ns(), _plain(fields)))

        return end

    def mark(self, name: str, fields: dict[str, object]) -> None:
        """A job that is done lasted from its first submit until now; no other mark counts."""
        begun = self._submitted_ns.pop(fields.get("job"), None) if name == "done" else None
        if begun is None:  # given up before, or never submitted to the device
            return
        known = _plain(fields)
        direction, rank = known.pop("direction"), known.pop("rank")
        lane = f"{direction}s, rank {rank}"
        self.add(Event(lane, str(direction), begun, self._clock_ns(), known))


def _plain(fields: dict[str, object]) -> Fields:
    """The fields as JSON has them."""
    return {
        key: value if value is None or isinstance(value, int | float) else str(value)
        for key, value in fields.items()
    }


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Record every engine of this process while the block runs."""
    recorder = Recorder()
    try:
        with ranges.heard_by(recorder):
            yield recorder
    finally:
        recorder.stop()


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
    """Steps and compute on top, then transfers, flushes, other ranges."""
    if lane in (STEPS, COMPUTE):
        return (STEPS, COMPUTE).index(lane), lane
    return 4 if lane.startswith("ranges") else 3 if lane == FLUSHES else 2, lane

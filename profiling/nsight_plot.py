"""A picture of a few steps of the built-in trace: compute, loads, stores and flushes on lanes."""

import bisect
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from .nsight_trace import STEPS, Event

NUM_STEPS: Final = 8
VISIBLE: Final = 0.01
"""Share of the picture's width that a kind of event should cover to be seen well."""

LANES: Final = ("compute", "load", "store", "flush")
"""Names of events, by lane from the top."""

COLOURS: Final = dict(zip(LANES, ("#8894a8", "#2f6fb3", "#c8702a", "#8a3ffc"), strict=True))
_LABELS: Final = ("compute", "loads", "stores", "flushes")


def write_timeline(events: Sequence[Event], path: Path, num_steps: int = NUM_STEPS) -> bool:
    """A PNG of a few steps in which things were moved; False, and no file, when no step was
    recorded.

    Steps are parted by thin lines; a failed transfer is hatched; transfers that ran at once lie
    over each other. Times are in milliseconds from the first step shown. Needs matplotlib
    (``bench_plots.can_draw``).
    """
    shown = busiest(events, num_steps)
    steps = [event for event in shown if event.lane == STEPS]
    if not steps:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 2.8), layout="constrained")
    zero_ns = steps[0].start_ns
    for step in steps:
        axes.axvline((step.start_ns - zero_ns) / 1e6, color="#d0d0d0", linewidth=0.8, zorder=0)
    for height, name in enumerate(reversed(LANES)):
        for event in (one for one in shown if one.name == name):
            _draw(axes, event, height, zero_ns)
    axes.set_yticks([height + 0.5 for height in range(len(LANES))], list(reversed(_LABELS)))
    axes.set_ylim(0, len(LANES))
    axes.set_xlim(0, max((steps[-1].end_ns - zero_ns) / 1e6, 1e-6))
    axes.set_xlabel("milliseconds")
    axes.set_title(f"{len(steps)} steps of the engine")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)
    return True


def _draw(axes: Any, event: Event, height: int, zero_ns: int) -> None:
    axes.broken_barh(
        [((event.start_ns - zero_ns) / 1e6, (event.end_ns - event.start_ns) / 1e6)],
        (height + 0.1, 0.8),
        facecolor=COLOURS[event.name],
        edgecolor="white",
        linewidth=0.5,
        hatch="///" if event.fields.get("error") else None,
    )


def busiest(events: Sequence[Event], num_steps: int) -> list[Event]:
    """Of all runs of ``num_steps`` steps the one in which most kinds of events can be seen, and of
    those the shortest (the first steps of an engine are long ones); with all that goes on while it
    lasts."""
    steps = sorted((one for one in events if one.lane == STEPS), key=lambda one: one.start_ns)
    if not steps:
        return []
    others = [one for one in events if one.name in LANES]
    sums = [list(accumulate(row, initial=0)) for row in _covered(steps, others)]
    length = min(num_steps, len(steps))

    def rank(first: int) -> tuple[float, int]:
        duration = steps[first + length - 1].end_ns - steps[first].start_ns
        enough = max(1.0, VISIBLE * duration)
        seen = (min(1.0, (row[first + length] - row[first]) / enough) for row in sums)
        return sum(seen), -duration

    first = max(range(len(steps) - length + 1), key=rank)
    run = steps[first : first + length]
    begin_ns, end_ns = run[0].start_ns, run[-1].end_ns
    return [*run, *(one for one in others if one.start_ns <= end_ns and one.end_ns >= begin_ns)]


def _covered(steps: Sequence[Event], others: Sequence[Event]) -> list[list[int]]:
    """For each lane: how much of each step, and of what follows until the next, its events cover,
    in nanoseconds."""
    starts = [step.start_ns for step in steps]
    ends = [*starts[1:], steps[-1].end_ns]
    covered = {name: [0] * len(steps) for name in LANES}
    for event in others:
        number = max(0, bisect.bisect_right(starts, event.start_ns) - 1)
        while number < len(steps) and starts[number] < event.end_ns:
            begin_ns = max(event.start_ns, starts[number])
            covered[event.name][number] += max(0, min(event.end_ns, ends[number]) - begin_ns)
            number += 1
    return list(covered.values())

"""A picture of a few steps of the built-in trace: steps, loads, stores and flushes on lanes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from .nsight_trace import STEPS, Event

NUM_STEPS: Final = 8
LANES: Final = ("step", "load", "store", "flush")
_COLOURS: Final = dict(zip(LANES, ("#b0b7c3", "#2f6fb3", "#c8702a", "#8a3ffc"), strict=True))


def write_timeline(events: Sequence[Event], path: Path, num_steps: int = NUM_STEPS) -> bool:
    """A PNG of a few steps in which things were moved; False, and no file, where matplotlib or
    steps are missing.

    A failed transfer is hatched. Times are in milliseconds from the first step shown.
    """
    shown = busiest(events, num_steps)
    try:
        import matplotlib
    except ImportError:
        return False
    if not shown:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 2.8), layout="constrained")
    zero = min(event.start_ns for event in shown if event.lane == STEPS)
    for height, name in enumerate(reversed(LANES)):
        for event in (one for one in shown if one.name == name):
            bar = ((event.start_ns - zero) / 1e6, (event.end_ns - event.start_ns) / 1e6)
            failed = bool(event.fields.get("error"))
            axes.broken_barh(
                [bar],
                (height + 0.1, 0.8),
                color=_COLOURS[name],
                edgecolor="white",
                linewidth=0.5,
                hatch="///" if failed else None,
            )
    axes.set_yticks([height + 0.5 for height in range(len(LANES))], list(reversed(LANES)))
    axes.set_ylim(0, len(LANES))
    axes.set_xlabel("milliseconds")
    axes.set_title(f"{sum(event.lane == STEPS for event in shown)} steps of the engine")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def busiest(events: Sequence[Event], num_steps: int) -> list[Event]:
    """Of all runs of ``num_steps`` steps the one with most kinds of transfers in it, and of those
    the shortest (the first steps of an engine are long ones), with what begins in it."""
    steps = sorted((one for one in events if one.lane == STEPS), key=lambda one: one.start_ns)
    others = [one for one in events if one.name in LANES and one.lane != STEPS]
    best: list[Event] = []
    most = (-1, 0)
    for first in range(max(1, len(steps) - num_steps + 1)):
        run = steps[first : first + num_steps]
        if not run:
            return []
        inside = [one for one in others if run[0].start_ns <= one.start_ns <= run[-1].end_ns]
        rank = (len({one.name for one in inside}), run[0].start_ns - run[-1].end_ns)
        if rank > most:
            most, best = rank, [*run, *inside]
    return best

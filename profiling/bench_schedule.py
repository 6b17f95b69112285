"""``kvferry bench schedule``: what scheduling costs, against vLLM's own general connector."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from . import schedule
from .bench_result import Cell, Plot, Progress, Result, Series, Table
from .bench_transfer import at_least
from .schedule import Verdict

if TYPE_CHECKING:
    from .schedule_measure import Figure

QUICK_SIZES: Final = (10_000,)
QUICK_IDLE_SIZES: Final = (10_000, 100_000)
QUICK_NUM_FINISHED: Final = 2_000
SEED: Final = 1
SHOWN: Final = {"kvferry": "kvferry", "vllm": "vLLM"}

Step = tuple[str, Callable[[], None]]


@dataclass(frozen=True, slots=True)
class Choice:
    """What is measured, and how often."""

    sizes: Sequence[int]
    idle_sizes: Sequence[int]
    num_finished: int
    memory_slots: int
    num_rounds: int
    seed: int


def add_options(parser: argparse.ArgumentParser) -> None:
    """What is to be measured; where an option is not given, ``--quick`` decides."""
    positive = at_least(1)
    parser.add_argument(
        "--sizes", type=positive, nargs="*", metavar="SLOTS", help="caches, against vLLM's"
    )
    parser.add_argument(
        "--idle-sizes", type=positive, nargs="*", metavar="SLOTS", help="caches, for idle steps"
    )
    parser.add_argument(
        "--finished", type=at_least(0), metavar="N", help="requests that ended before idle steps"
    )
    parser.add_argument(
        "--memory-slots", type=at_least(0), metavar="SLOTS", help="cache to be weighed; 0: none"
    )
    parser.add_argument("--rounds", type=positive, help="how often each operation is timed")
    parser.add_argument("--seed", type=int, default=SEED, help=f"of the keys (default: {SEED})")


def measure_schedule(
    *,
    quick: bool,
    progress: Progress,
    sizes: Sequence[int] | None = None,
    idle_sizes: Sequence[int] | None = None,
    finished: int | None = None,
    memory_slots: int | None = None,
    rounds: int | None = None,
    seed: int = SEED,
) -> Result:
    """Measure both sides; None leaves a choice to ``quick``.

    Raises ValueError when nothing is to be measured, RuntimeError when the sides' answers differ.
    """
    choice = Choice(
        (QUICK_SIZES if quick else schedule.SIZES) if sizes is None else sizes,
        (QUICK_IDLE_SIZES if quick else schedule.IDLE_SIZES) if idle_sizes is None else idle_sizes,
        (QUICK_NUM_FINISHED if quick else schedule.NUM_FINISHED) if finished is None else finished,
        schedule.MEMORY_SLOTS if memory_slots is None else memory_slots,
        rounds or (11 if quick else 21),
        seed,
    )
    if not (choice.sizes or choice.idle_sizes or choice.memory_slots):
        raise ValueError("--sizes, --idle-sizes and --memory-slots are empty; allowed: not all")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    both: list[Figure] = []
    idle: list[Figure] = []
    memory: dict[str, float] = {}
    steps = _steps(choice, both, idle, memory)
    for number, (what, run) in enumerate(steps):
        progress(number, len(steps), what)
        run()
    progress(len(steps), len(steps), "done")
    return result_of(choice, both, idle, memory)


def _steps(
    choice: Choice, both: list[Figure], idle: list[Figure], memory: dict[str, float]
) -> list[Step]:
    """What is to be done, each with its name; figures go into the given lists."""
    from . import schedule_measure as measure
    from .schedule_sides import KVFerrySide, VllmSide

    rounds, seed = choice.num_rounds, choice.seed

    def compare(num_slots: int) -> None:
        both.extend(measure.compare(num_slots, rounds, seed))

    def idled(num_slots: int, num_finished: int) -> None:
        idle.append(measure.idle(num_slots, num_finished, 10 * rounds, seed))

    def weigh(make: Any) -> None:
        memory[make.name] = measure.bytes_per_slot(make, choice.memory_slots, seed)

    steps: list[Step] = [
        (f"both sides, {size:,} slots", partial(compare, size)) for size in choice.sizes
    ]
    steps += [
        (f"idle steps, {size:,} slots", partial(idled, size, 0)) for size in choice.idle_sizes
    ]
    if choice.idle_sizes and choice.num_finished:
        what = f"idle steps after {choice.num_finished:,} requests"
        steps.append((what, partial(idled, choice.idle_sizes[0], choice.num_finished)))
    if choice.memory_slots:
        steps += [
            (f"memory, {make.name}", partial(weigh, make)) for make in (KVFerrySide, VllmSide)
        ]
    return steps


def result_of(
    choice: Choice,
    both: Sequence[Figure],
    idle: Sequence[Figure],
    memory: Mapping[str, float],
) -> Result:
    """Tables, plots and verdicts of figures."""
    against = schedule.compared(both)
    idle_verdicts = schedule.idled(idle) if idle else []
    weighed = schedule.weighed(dict(memory))
    verdicts = [*against, *idle_verdicts, *weighed]
    data: dict[str, Any] = {
        "seed": choice.seed,
        "num_rounds": choice.num_rounds,
        "figures": [asdict(figure) for figure in (*both, *idle)],
        "shown": [asdict(verdict) | {"met": verdict.met} for verdict in verdicts],
        "missed": [str(verdict) for verdict in verdicts if not verdict.met],
    }
    tables = [_against_table(both, against)] if both else []
    tables += [_idle_table(idle, idle_verdicts)] if idle else []
    tables += [_memory_table(choice, memory, weighed)] if weighed else []
    title = "Scheduling: kvferry's general connector against vLLM's own"
    summary = _summary(both, against, verdicts)
    return Result("schedule", title, summary, tables, _plots(both, idle, memory), data)


def _summary(
    both: Sequence[Figure], against: Sequence[Verdict], verdicts: Sequence[Verdict]
) -> list[str]:
    lines = []
    for num_slots in dict.fromkeys(figure.num_slots for figure in both):
        of_it = [one.given for one in against if f", {num_slots} slots" in one.what]
        lines.append(
            f"With {num_slots:,} slots kvferry takes {min(of_it):.1f} to {max(of_it):.1f} times "
            "less processor time than vLLM's connector, which gives the same answers."
        )
    wanted = [one for one in verdicts if one.target is not None]
    lines.append(f"{sum(one.met for one in wanted)} of {len(wanted)} targets are met.")
    return lines


def _against_table(both: Sequence[Figure], against: Sequence[Verdict]) -> Table:
    from .schedule_measure import of

    rows: list[list[Cell]] = []
    ours = [figure for figure in both if figure.side == "kvferry"]
    for figure, verdict in zip(ours, against, strict=True):
        theirs = of(both, figure.operation, "vllm", figure.num_slots)
        times_s = figure.cpu_s, theirs.cpu_s, figure.wall_s, theirs.wall_s
        times_us = [1e6 * one for one in times_s]
        shown = verdict.given, verdict.target, _met(verdict)
        rows.append([figure.operation, figure.num_slots, *times_us, *shown])
    columns = [
        "operation", "slots", "kvferry, us", "vLLM, us", "kvferry, wall us", "vLLM, wall us",
        "times less", "wanted", "met",
    ]  # fmt: skip
    caption = (
        "Processor time of the scheduler's thread and wall time, medians. A prompt has 8,192 "
        "chunks, a store 512; 256 requests run while there is nothing to do."
    )
    return Table("The same work on both sides", columns, rows, caption)


def _idle_table(idle: Sequence[Figure], verdicts: Sequence[Verdict]) -> Table:
    rows = [[f.num_slots, f.num_finished, f.cpu_s * 1e6, f.wall_s * 1e6] for f in idle]
    columns = ["slots", "requests that had ended", "processor us", "wall us"]
    caption = "; ".join(str(verdict) for verdict in verdicts) + "."
    return Table("A step of kvferry's with nothing to do", columns, rows, caption)


def _memory_table(choice: Choice, sides: Iterable[str], weighed: Sequence[Verdict]) -> Table:
    rows = [
        [SHOWN[side], one.given, one.target, _met(one)]
        for side, one in zip(sides, weighed, strict=True)
    ]
    columns = ["side", "bytes a slot", "wanted, at most", "met"]
    caption = f"{choice.memory_slots:,} slots, each taken over once, beside vLLM's hashes."
    return Table("Memory of the scheduler half", columns, rows, caption)


def _met(verdict: Verdict) -> str | None:
    return None if verdict.target is None else "yes" if verdict.met else "no"


def _plots(
    both: Sequence[Figure], idle: Sequence[Figure], memory: Mapping[str, float]
) -> list[Plot]:
    time_us, plots = "processor time, us", []
    for num_slots in dict.fromkeys(figure.num_slots for figure in both):
        of_it = [figure for figure in both if figure.num_slots == num_slots]
        series = [
            Series(
                SHOWN[side],
                [f.operation for f in of_it if f.side == side],
                [f.cpu_s * 1e6 for f in of_it if f.side == side],
            )
            for side in dict.fromkeys(f.side for f in of_it)
        ]
        name, title = f"schedule-{num_slots}", f"Scheduling with {num_slots:,} slots"
        plots.append(Plot(name, title, "operation", time_us, series, "bar", log_y=True))
    if not_ended := [figure for figure in idle if not figure.num_finished]:
        sizes, times = [f.num_slots for f in not_ended], [f.cpu_s * 1e6 for f in not_ended]
        most = [schedule.MOST_IDLE_S * 1e6] * len(sizes)
        series = [
            Series("kvferry", sizes, times),
            Series("wanted: at most", sizes, most, reference=True),
        ]
        title = "A step with nothing to do"
        plots.append(Plot("schedule-idle", title, "slots", time_us, series, log_x=True))
    if memory:
        series = [Series("memory", [SHOWN[side] for side in memory], list(memory.values()))]
        title = "Memory of the scheduler half"
        plots.append(Plot("schedule-memory", title, "side", "bytes a slot", series, "bar"))
    return plots

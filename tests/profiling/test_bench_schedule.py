"""The benchmark of scheduling cost gives both sides the same; no timing is asserted.

What a step with nothing to do costs is counted here instead of timed: lines run, and memory taken.
"""

import argparse
import os
import random
import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

pytest.importorskip("vllm")
os.environ.update(VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")

from kvferry.profiling import bench_schedule, schedule
from kvferry.profiling import schedule_measure as measure
from kvferry.profiling import schedule_sides as sides

QUICK: dict[str, Any] = {"quick": True, "rounds": 2, "seed": 5, "finished": 3}


def work_of(call: Callable[[], object]) -> tuple[int, int]:
    """Lines of Python that ``call`` runs, and the most bytes that it holds at once."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    tracemalloc.start()
    try:
        call()
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return lines, most_bytes


def idle_work(num_slots: int, num_finished: int) -> tuple[int, int]:
    rng = random.Random(1)
    side = sides.KVFerrySide(num_slots)
    measure.fill(side, [rng.randbytes(32) for _ in range(num_slots)])
    for i in range(num_finished):
        sides.store(side, f"finished {i}", [rng.randbytes(32)])
    step = measure.running(side, rng)
    measure.idle_step(side, step)
    return work_of(lambda: measure.idle_step(side, step))


def test_a_step_with_nothing_to_do_is_the_same_work_whatever_there_is_and_was() -> None:
    lines, most_bytes = idle_work(2_100, 0)
    for num_slots, num_finished in [(12_000, 0), (2_100, 100)]:
        again, again_bytes = idle_work(num_slots, num_finished)
        assert again == lines, (num_slots, num_finished)
        assert again_bytes < most_bytes + 1_000, (num_slots, num_finished)
    assert lines < 20 * measure.NUM_RUNNING


def told(_num_done: int, _num_steps: int, _what: str) -> None:
    """Progress that nobody reads."""


def test_both_sides_are_measured_at_all_of_it() -> None:
    steps: list[str] = []
    result = bench_schedule.measure_schedule(
        **QUICK,
        progress=lambda _num_done, _num_steps, what: steps.append(what),
        sizes=[2500],
        idle_sizes=[600, 900],
        memory_slots=1100,
    )
    figures = result.data["figures"]
    done = {(figure["operation"], figure["side"]) for figure in figures}
    operations = [
        measure.LOOKUP_WARM,
        measure.LOOKUP_FRESH,
        measure.PLAN,
        measure.COMPLETE,
        measure.IDLE,
    ]
    assert done == {(operation, side) for operation in operations for side in ("kvferry", "vllm")}
    assert all(figure["cpu_s"] > 0 for figure in figures)
    assert [figure["num_finished"] for figure in figures[-3:]] == [0, 0, 3]
    assert len(result.data["shown"]) == len(operations) + 2 + 2
    assert [len(table.rows) for table in result.tables] == [len(operations), 3, 2]
    assert [plot.name for plot in result.plots] == [
        "schedule-2500",
        "schedule-idle",
        "schedule-memory",
    ]
    assert [len(one.x) for one in result.plots[0].series] == [len(operations)] * 2
    assert len(steps) == 1 + 2 + 1 + 2 + 1


def test_measuring_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="are empty; allowed: not all"):
        bench_schedule.measure_schedule(
            **QUICK, progress=told, sizes=[], idle_sizes=[], memory_slots=0
        )


@pytest.mark.parametrize("make", [sides.KVFerrySide, sides.VllmSide])
def test_a_side_that_does_not_find_all_is_not_timed(make: Callable[[int], sides.Side]) -> None:
    side = make(64)
    stored = [bytes([i]) * 32 for i in range(8)]
    measure.fill(side, stored)
    measure._look_up(measure.Times(), measure.LOOKUP_WARM, side, "all", stored)
    wanted = [*stored, b"absent" * 4]
    with pytest.raises(RuntimeError, match=r"128 tokens found; wanted: 144"):
        measure._look_up(measure.Times(), measure.LOOKUP_WARM, side, "too many", wanted)
    with pytest.raises(RuntimeError, match="tokens of a new request were found"):
        sides.store(side, "again", stored)


def test_memory_of_the_scheduler_half_is_at_most_300_bytes_a_slot() -> None:
    assert measure.bytes_per_slot(sides.KVFerrySide, 5_500, seed=1) <= 300


def figure(side: str, cpu_s: float, operation: str = measure.PLAN) -> measure.Figure:
    return measure.Figure(operation, side, 10_000, cpu_s, cpu_s, num_rounds=1)


def test_verdicts() -> None:
    (met,) = schedule.compared([figure("kvferry", 1e-3), figure("vllm", 2.5e-3)])
    (missed,) = schedule.compared([figure("kvferry", 1e-3), figure("vllm", 1.9e-3)])
    assert met.met
    assert not missed.met
    assert str(missed).endswith("1.9 times less, wanted >= 2: MISSED")
    longest, growth = schedule.idled([figure("kvferry", 50e-6), figure("kvferry", 90e-6)])
    assert longest.met
    assert not growth.met
    assert [one.met for one in schedule.weighed({"kvferry": 301, "vllm": 900})] == [False, True]


@pytest.mark.parametrize("wrong", [["--sizes", "0"], ["--rounds", "0"], ["--finished", "-1"]])
def test_wrong_arguments_are_refused(wrong: list[str]) -> None:
    parser = argparse.ArgumentParser()
    bench_schedule.add_options(parser)
    with pytest.raises(SystemExit) as stopped:
        parser.parse_args(wrong)
    assert stopped.value.code == 2

"""What is measured of the two scheduler halves: lookups, stores, steps with nothing to do, memory.

The sides take turns, so that a slow spell of the machine meets both, and every answer is checked:
a prompt of which not all is found, or a store of which not all is planned, ends the measurement.
Times are medians, of the thread's processor time and of wall time; other work on the machine
lengthens the latter more.
"""

import gc
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from . import schedule_sides as sides
from .schedule_sides import BLOCK_TOKENS, Hashes, KVFerrySide, Side, VllmSide

PROMPT_CHUNKS: Final = 8192
STORE_CHUNKS: Final = 512
NUM_WARM_UP: Final = 10
"""Stores that are not timed: Python specialises code that has run a few times."""

NUM_RUNNING: Final = 256
RUNNING_CHUNKS: Final = 8

LOOKUP_WARM: Final = "lookup, keys used before"
LOOKUP_FRESH: Final = "lookup, fresh keys in random order"
PLAN: Final = "store, plan"
COMPLETE: Final = "store, complete"
IDLE: Final = "step, nothing to do"


@dataclass(frozen=True, slots=True)
class Figure:
    """Median seconds of one operation on one side, and how often it was timed."""

    operation: str
    side: str
    num_slots: int
    cpu_s: float
    wall_s: float
    num_rounds: int
    num_finished: int = 0
    """Requests that had ended before."""


@dataclass(slots=True)
class Times:
    """Times by operation and side, until they become figures."""

    _taken: dict[tuple[str, str], list[tuple[float, float]]] = field(default_factory=dict)

    def time(self, operation: str, side: Side, call: Callable[[], Any]) -> Any:
        """Call, and take the time; returns what the call does."""
        begun_s, begun_cpu_s = time.perf_counter(), time.thread_time()
        result = call()
        cpu_s, wall_s = time.thread_time() - begun_cpu_s, time.perf_counter() - begun_s
        self._taken.setdefault((operation, side.name), []).append((cpu_s, wall_s))
        return result

    def figures(self, num_slots: int, num_finished: int = 0) -> list[Figure]:
        return [
            Figure(
                operation,
                side,
                num_slots,
                statistics.median(cpu_s for cpu_s, _ in taken),
                statistics.median(wall_s for _, wall_s in taken),
                len(taken),
                num_finished,
            )
            for (operation, side), taken in self._taken.items()
        ]


def compare(num_slots: int, num_rounds: int, seed: int) -> list[Figure]:
    """Lookups and stores with both caches full of the same chunks, then steps with nothing to do.

    The prompt has up to ``PROMPT_CHUNKS`` chunks, a store up to ``STORE_CHUNKS``, fewer only where
    there are fewer slots.
    """
    rng = random.Random(seed)
    stored = [rng.randbytes(32) for _ in range(num_slots)]
    both: tuple[Side, Side] = (KVFerrySide(num_slots), VllmSide(num_slots))
    for side in both:
        fill(side, stored)
    times = Times()
    with _frozen():
        prompt = stored[-PROMPT_CHUNKS:]
        for turn in range(num_rounds):
            for side in both:
                _look_up(Times(), LOOKUP_WARM, side, f"before {turn}", prompt)  # brings the keys
                _look_up(times, LOOKUP_WARM, side, f"warm {turn}", prompt)
        for turn in range(num_rounds):
            for side in both:
                chosen = rng.sample(stored, min(PROMPT_CHUNKS, num_slots))
                fresh = [bytes(bytearray(block_hash)) for block_hash in chosen]
                _look_up(times, LOOKUP_FRESH, side, f"fresh {turn}", fresh)
        for turn in range(NUM_WARM_UP + num_rounds):
            new = [rng.randbytes(32) for _ in range(min(STORE_CHUNKS, num_slots))]
            for side in both:
                _store(times if turn >= NUM_WARM_UP else Times(), side, f"store {turn}", new)
        for side in both:
            step = running(side, rng)
            for _ in range(num_rounds):
                times.time(IDLE, side, partial(idle_step, side, step))
    return times.figures(num_slots)


def idle(num_slots: int, num_finished: int, num_rounds: int, seed: int) -> Figure:
    """A step of kvferry's with nothing to do, all slots taken, after that many requests ended."""
    rng = random.Random(seed)
    side = KVFerrySide(num_slots)
    fill(side, [rng.randbytes(32) for _ in range(num_slots)])
    for i in range(num_finished):
        sides.store(side, f"finished {i}", [rng.randbytes(32)])
    step = running(side, rng)
    times = Times()
    with _frozen():
        for _ in range(num_rounds):
            times.time(IDLE, side, partial(idle_step, side, step))
    return times.figures(num_slots, num_finished)[0]


def bytes_per_slot(make: Callable[[int], Side], num_slots: int, seed: int) -> float:
    """What a side's scheduler half keeps, beside the hashes that it is given, over its slots.

    Every slot is taken and taken over once. Chunks are those of prompts of 1,024.
    """
    rng = random.Random(seed)
    chunks = [rng.randbytes(32) for _ in range(2 * num_slots)]
    sides.store(make(num_slots), "before", chunks[:1])  # what is made once for all connectors
    gc.collect()
    tracemalloc.start()
    try:
        side = make(num_slots)
        fill(side, chunks, at_once=1024)
        gc.collect()
        used_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return used_bytes / num_slots


def fill(side: Side, chunks: Hashes, *, at_once: int = PROMPT_CHUNKS) -> None:
    """Store ``chunks``, as requests with ``at_once`` of them each."""
    for begin in range(0, len(chunks), at_once):
        sides.store(side, f"fill {begin}", chunks[begin : begin + at_once])


def running(side: Side, rng: random.Random) -> SchedulerOutput:
    """Let ``NUM_RUNNING`` requests come and their prompts be stored; a step of one token each.

    No request fills a block in that step, so there is nothing to do.
    """
    requests, tables = [], {}
    for i in range(NUM_RUNNING):
        hashes = [rng.randbytes(32) for _ in range(RUNNING_CHUNKS)]
        request = sides.request_with(f"running {i}", hashes, max_tokens=BLOCK_TOKENS)
        block_ids = sides.blocks_for(request, 1 + i * (RUNNING_CHUNKS + 1))
        sides.begin(side, request, block_ids)
        metadata = side.connector.build_connector_meta(sides.new_step(request, block_ids))
        _check(side, "chunks planned", side.num_stored(metadata), RUNNING_CHUNKS)
        side.connector.update_connector_output(side.done(metadata))
        request.num_computed_tokens = request.num_prompt_tokens
        request.append_output_token_ids(0)
        requests.append(request)
        tables[request.request_id] = block_ids
    step = sides.decode_step(requests, tables)
    _check(side, "chunks planned", side.num_stored(idle_step(side, step)), 0)
    return step


def idle_step(side: Side, step: SchedulerOutput) -> Any:
    """The connector's part of a step in which no rank has anything to report."""
    metadata = side.connector.build_connector_meta(step)
    side.connector.update_connector_output(KVConnectorOutput())
    return metadata


def _look_up(times: Times, operation: str, side: Side, request_id: str, hashes: Hashes) -> None:
    request = sides.request_with(request_id, hashes)
    ask = side.connector.get_num_new_matched_tokens
    side.connector.on_new_request(request)
    found, _ = times.time(operation, side, lambda: ask(request, 0))
    _check(side, "tokens found", found, len(hashes) * BLOCK_TOKENS)
    sides.end(side, request, [])


def _store(times: Times, side: Side, request_id: str, hashes: Hashes) -> None:
    request = sides.request_with(request_id, hashes)
    block_ids = sides.blocks_for(request)
    sides.begin(side, request, block_ids)
    step = sides.new_step(request, block_ids)
    metadata = times.time(PLAN, side, lambda: side.connector.build_connector_meta(step))
    _check(side, "chunks planned", side.num_stored(metadata), len(hashes))
    output = side.done(metadata)
    times.time(COMPLETE, side, lambda: side.connector.update_connector_output(output))
    sides.end(side, request, block_ids)
    again = sides.request_with(f"{request_id} again", hashes)
    side.connector.on_new_request(again)
    found, _ = side.connector.get_num_new_matched_tokens(again, 0)
    _check(side, "tokens found", found, len(hashes) * BLOCK_TOKENS)
    sides.end(side, again, [])


def _check(side: Side, what: str, number: int | None, wanted: int) -> None:
    if number != wanted:
        raise RuntimeError(f"{side.name}: {number} {what}; wanted: {wanted}")


@contextmanager
def _frozen() -> Iterator[None]:
    """What is there now is left out of garbage collections, as vLLM's engine does at start."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def of(figures: Sequence[Figure], operation: str, side: str, num_slots: int) -> Figure:
    """The one figure of these."""
    (found,) = (
        figure
        for figure in figures
        if (figure.operation, figure.side, figure.num_slots) == (operation, side, num_slots)
    )
    return found

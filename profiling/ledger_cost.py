"""Scheduling cost of the ledger against vLLM's general offload manager, in one run.

    python -m kvferry.profiling.ledger_cost --json

Both sides hold the same chunks and answer the same questions: the keys and the lookup of a prompt
of 8,192 chunks that are all there (with key objects used just before, and with fresh ones in random
order), planning a store of 512 new chunks while the cache is full, and taking its completion.
kvferry's keys are the request's block hashes themselves. vLLM's side is its own code: its request
state makes the keys, its scheduler's prefix walk looks them up, its CPU manager (LRU) plans and
completes. Medians of the thread's processor time; the sides take turns, so that a slow spell meets
both.
"""

import argparse
import gc
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any, Final, cast

from ..engine.ledger import Ledger
from ..engine.types import GroupId, Key

PROMPT_CHUNKS: Final = 8192
STORE_CHUNKS: Final = 512
SIZES: Final = (10_000, 1_000_000)
G0: Final = GroupId(0)

Hashes = list[bytes]


@dataclass(frozen=True, slots=True)
class Cost:
    """Median seconds of one operation; ``ratio`` is how many times less kvferry takes."""

    operation: str
    num_slots: int
    kvferry_s: float
    vllm_s: float
    ratio: float


class KVFerrySide:
    """The ledger, asked as the scheduling core asks it."""

    def __init__(self, num_slots: int) -> None:
        self.ledger = Ledger(num_slots)
        self.lease: Any = None

    def lookup(self, hashes: Hashes) -> int:
        return self.ledger.readable(G0, cast("list[Key]", hashes[::1]))

    def plan(self, hashes: Hashes) -> None:
        keys = cast("list[Key]", hashes)
        absent = self.ledger.absent(G0, keys)
        self.lease = self.ledger.reserve(G0, [keys[i] for i in absent], protect=keys)
        self.ledger.take_evicted()

    def complete(self, hashes: Hashes) -> None:
        self.ledger.commit(self.lease)


class VllmSide:
    """vLLM's manager, and the two of its connector's functions that make keys and look them up."""

    def __init__(self, num_slots: int) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler
        from vllm.v1.kv_offload.base import ReqContext, make_offload_key
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        self._scheduler = scheduler
        self._context = ReqContext
        self._key = make_offload_key
        self.manager = CPUOffloadingManager(num_slots)
        self._group = SimpleNamespace(group_idx=0, hashes_per_chunk=1, tokens_per_chunk=16)
        tracker = SimpleNamespace(record_lookup=lambda *args: None)  # no KV events wanted
        self._connector: Any = SimpleNamespace(manager=self.manager, _events_tracker=tracker)

    def lookup(self, hashes: Hashes) -> int:
        context = self._context("request")
        group_state = self._scheduler.RequestGroupState()
        request: Any = SimpleNamespace(
            config=SimpleNamespace(kv_group_configs=(self._group,)),
            group_states=(group_state,),
            req=SimpleNamespace(block_hashes=hashes),
            req_context=context,
        )
        self._scheduler.RequestOffloadState.update_offload_keys(request)
        walk: Any = self._scheduler.OffloadingConnectorScheduler._maximal_prefix_lookup
        keys = group_state.offload_keys
        return int(walk(self._connector, keys, context, request.req, self._group, 0))

    def plan(self, hashes: Hashes) -> None:
        self._keys = [self._key(h, 0) for h in hashes]
        self._store_context = self._context("store")
        if self.manager.prepare_store(self._keys, self._store_context) is None:
            raise RuntimeError("vLLM's manager refused the store")

    def complete(self, hashes: Hashes) -> None:
        self.manager.complete_store(self._keys, self._store_context)


def measure(num_slots: int, num_rounds: int, seed: int) -> list[Cost]:
    """All operations at one size, the sides in turns."""
    rng = random.Random(seed)
    stored = [rng.randbytes(32) for _ in range(num_slots)]
    sides: dict[str, Any] = {"kvferry": KVFerrySide(num_slots), "vllm": VllmSide(num_slots)}
    for begin in range(0, num_slots, PROMPT_CHUNKS):
        for side in sides.values():
            side.plan(stored[begin : begin + PROMPT_CHUNKS])
            side.complete([])
    gc.collect()
    gc.freeze()  # as vLLM's engine does at start
    prompt = stored[-PROMPT_CHUNKS:]
    costs = [
        _lookup_cost(
            "lookup, keys used before", num_slots, sides, lambda: prompt, num_rounds, warm=True
        ),
        _lookup_cost(
            "lookup, fresh keys in random order",
            num_slots,
            sides,
            lambda: [bytes(bytearray(h)) for h in rng.sample(stored, PROMPT_CHUNKS)],
            num_rounds,
            warm=False,
        ),
    ]
    times: dict[str, dict[str, list[float]]] = {"plan": {}, "complete": {}}
    for _ in range(num_rounds):
        hashes = [rng.randbytes(32) for _ in range(STORE_CHUNKS)]
        for name, side in sides.items():
            for step in ("plan", "complete"):
                taken = _timed(getattr(side, step), hashes)
                times[step].setdefault(name, []).append(taken)
    costs += [_median(f"store, {step}", num_slots, times[step]) for step in times]
    gc.unfreeze()
    return costs


def _lookup_cost(
    operation: str,
    num_slots: int,
    sides: dict[str, Any],
    hashes: Callable[[], Hashes],
    num_rounds: int,
    *,
    warm: bool,
) -> Cost:
    times: dict[str, list[float]] = {}
    for side in sides.values():
        if side.lookup(hashes()) != PROMPT_CHUNKS:
            raise RuntimeError(f"{operation}: not all chunks were found")
    for _ in range(num_rounds):
        for name, side in sides.items():
            asked = hashes()
            if warm:
                side.lookup(asked)  # brings the key objects into the processor's cache
            times.setdefault(name, []).append(_timed(side.lookup, asked))
    return _median(operation, num_slots, times)


def _timed(function: Callable[[Hashes], object], hashes: Hashes) -> float:
    begin = time.thread_time()
    function(hashes)
    return time.thread_time() - begin


def _median(operation: str, num_slots: int, times: dict[str, list[float]]) -> Cost:
    ours, theirs = statistics.median(times["kvferry"]), statistics.median(times["vllm"])
    return Cost(operation, num_slots, ours, theirs, theirs / ours)


def table(costs: Sequence[Cost]) -> str:
    """The costs as a table in Markdown."""
    lines = [
        "| operation | slots | kvferry ms | vLLM ms | times less |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {c.operation} | {c.num_slots} | {c.kvferry_s * 1e3:.2f} | {c.vllm_s * 1e3:.2f} "
        f"| {c.ratio:.1f} |"
        for c in costs
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, or with ``--json`` one object; returns the exit status."""
    parser = argparse.ArgumentParser(prog="ledger_cost", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of slots")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    if min(options.sizes) < PROMPT_CHUNKS or options.rounds < 1:
        parser.error(f"allowed: --sizes from {PROMPT_CHUNKS}, --rounds from 1")
    costs = [c for size in options.sizes for c in measure(size, options.rounds, options.seed)]
    if options.json:
        print(json.dumps({"seed": options.seed, "costs": [asdict(c) for c in costs]}, indent=1))
    else:
        print(table(costs))
    return 0


if __name__ == "__main__":
    sys.exit(main())

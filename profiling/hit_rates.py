"""Prefix hit rates of the eviction policies, on a recorded trace and on generated ones.

    python -m kvferry.profiling.hit_rates --trace conversation_trace.jsonl.gz --json

A request hits the leading chunks that the ledger can read, then all its missing chunks are stored,
one request at a time. The rate is hit chunks over asked chunks. Each policy runs behind the real
ledger; "optimum" is Belady's: with the future known, what is needed last (or never) is not kept.
"""

import argparse
import heapq
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..engine.ledger import Ledger
from ..engine.policy import POLICIES, EvictionPolicy, make_policy
from ..engine.types import GroupId, Key
from .prefix_traces import Trace, agents, chat, read_trace

SIZES = (1000, 2000, 5000, 10000, 20000, 30000, 50000)
SMALL_SIZES = (1000, 2000, 4000, 8000, 16000)
GENERATED: dict[str, Callable[[int], Trace]] = {
    "chat": lambda seed: chat(seed),
    "chat with scans": lambda seed: chat(seed, scans=0.3),
    "agents": lambda seed: agents(seed),
    "agents with scans": lambda seed: agents(seed, scans=0.3),
}
NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class Row:
    """The hit rates of one trace at one size, by policy."""

    trace: str
    num_slots: int
    rates: dict[str, float]


def hit_rate(trace: Trace, num_slots: int, policy: EvictionPolicy) -> float:
    """Hit chunks over asked chunks of ``trace`` with ``num_slots`` slots behind a ledger."""
    ledger = Ledger(num_slots, policy=policy)
    group = GroupId(0)
    hits = asked = 0
    for keys in trace:
        hits += ledger.readable(group, keys)
        asked += len(keys)
        ledger.touch(group, keys)
        absent = [keys[i] for i in ledger.absent(group, keys)]
        lease = ledger.reserve(group, absent, protect=keys)
        if lease is not None:
            ledger.commit(lease)
        ledger.take_evicted()
    return hits / asked


def optimal_hit_rate(trace: Trace, num_slots: int) -> float:
    """The same under Belady's rule, which may also choose not to keep a chunk at all."""
    upcoming: dict[Key, int] = {}
    next_uses: list[list[int]] = []
    for time in range(len(trace) - 1, -1, -1):
        next_uses.append([upcoming.get(key, NEVER) for key in trace[time]])
        upcoming.update(dict.fromkeys(trace[time], time))
    next_uses.reverse()
    kept: dict[Key, int] = {}
    latest: list[tuple[int, int, Key]] = []  # (minus next use, minus depth, key): tails go first
    hits = asked = 0
    for keys, uses in zip(trace, next_uses, strict=True):
        asked += len(keys)
        hits += next((i for i, key in enumerate(keys) if key not in kept), len(keys))
        for depth, (key, use) in enumerate(zip(keys, uses, strict=True)):
            kept.pop(key, None)
            if use != NEVER:
                kept[key] = use
                heapq.heappush(latest, (-use, -depth, key))
        while len(kept) > num_slots:
            use, _, key = heapq.heappop(latest)
            if kept.get(key) == -use:
                del kept[key]
    return hits / asked


def rows_of(name: str, trace: Trace, sizes: Sequence[int], policies: Sequence[str]) -> list[Row]:
    """One row a size, every policy and the optimum in each; progress goes to stderr."""
    rows: list[Row] = []
    for num_slots in sizes:
        print(f"{name}: {num_slots} slots", file=sys.stderr, flush=True)
        rates = {
            policy: hit_rate(trace, num_slots, make_policy(policy, num_slots))
            for policy in policies
        }
        rates["optimum"] = optimal_hit_rate(trace, num_slots)
        rows.append(Row(name, num_slots, rates))
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows as a table in Markdown; rates in percent."""
    names = list(rows[0].rates)
    lines = [
        "| trace | slots | " + " | ".join(names) + " |",
        "|---|---:|" + "---:|" * len(names),
    ]
    for row in rows:
        rates = " | ".join(f"{100 * row.rates[name]:.1f}" for name in names)
        lines.append(f"| {row.trace} | {row.num_slots} | {rates} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, or with ``--json`` one object; returns the exit status."""
    parser = argparse.ArgumentParser(prog="hit_rates", description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--trace", type=Path, help="a recorded trace; without it, generated ones only"
    )
    parser.add_argument("--sizes", type=int, nargs="+", help="numbers of slots, for all traces")
    parser.add_argument(
        "--policies", nargs="+", default=list(POLICIES), help="names or import paths"
    )
    parser.add_argument("--generated", nargs="*", default=list(GENERATED), choices=list(GENERATED))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    if any(size < 1 for size in options.sizes or ()):
        parser.error(f"--sizes {options.sizes}; allowed: 1 or more")
    rows: list[Row] = []
    if options.trace is not None:
        if not options.trace.is_file():
            parser.error(f"--trace {options.trace} is not a file")
        recorded = read_trace(options.trace)
        rows += rows_of("recorded", recorded, options.sizes or SIZES, options.policies)
    for name in options.generated:
        trace = GENERATED[name](options.seed)
        rows += rows_of(name, trace, options.sizes or SMALL_SIZES, options.policies)
    if not rows:
        parser.error("nothing to run; allowed: --trace, or at least one --generated")
    if options.json:
        print(json.dumps({"seed": options.seed, "rows": [asdict(row) for row in rows]}, indent=1))
    else:
        print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

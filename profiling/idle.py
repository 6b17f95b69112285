"""Turned on and idle: what kvferry costs an engine whose prompts have nothing in common.

The same prompts go through engines with and without the connector, each in a process of its own,
in turns: while one runs the others wait. Nothing can be loaded, so what is measured is looking up
and storing. Tokens must be equal on all sides in every round, and no hit may be counted. A round
ends when the engine has nothing left to do, its stores included. A ratio is the time without the
connector over the time with it, in one round; 1 is as fast. Beside wall time stands the processor
time of the whole process, which says more on a machine that is busy with something else.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from ..demo.engine import EngineSetup, InProcessEngine, kv_transfer_of
from .engine_process import EngineProcess

CONNECTOR: Final = "KVFerrySimpleConnector"
PLAIN: Final = "plain"
MODES: Final[Mapping[str, Mapping[str, Any]]] = {"eager": {}, "lazy": {"lazy_offload": True}}
TARGETS: Final = {"eager": 0.97, "lazy": 0.99}
BLOCK_TOKENS: Final = 32
_LOWEST_TOKEN: Final = 100
_HIGHEST_TOKEN: Final = 10_000


@dataclass(frozen=True, slots=True)
class Load:
    """One round: prompts of random tokens, none like another. ``pool_rounds``: how many rounds the
    GPU pool holds, so that with more of them the oldest blocks are evicted."""

    num_prompts: int = 8
    prompt_tokens: int = 256
    answer_tokens: int = 16
    pool_rounds: float = 2.0

    def __post_init__(self) -> None:
        counts = self.num_prompts, self.prompt_tokens, self.answer_tokens
        if min(counts) < 1 or self.pool_rounds < 1:
            raise ValueError(f"{self}; allowed: all of them from 1")

    @property
    def num_pool_blocks(self) -> int:
        per_prompt = -(-(self.prompt_tokens + self.answer_tokens) // BLOCK_TOKENS)
        return int(self.pool_rounds * self.num_prompts * per_prompt) + 2

    def prompts(self, seed: int, num_tokens: int = _HIGHEST_TOKEN) -> list[list[int]]:
        """The prompts of one round, of tokens up to ``num_tokens``."""
        rng = random.Random(seed)
        low = min(_LOWEST_TOKEN, num_tokens // 2)
        return [
            [rng.randrange(low, num_tokens) for _ in range(self.prompt_tokens)]
            for _ in range(self.num_prompts)
        ]


@dataclass(frozen=True, slots=True)
class Taken:
    """What one round brought on one side. ``tokens`` is ``[num_prompts][answer_tokens]``."""

    wall_s: float
    processor_s: float
    tokens: list[list[int]]
    num_hits: int = 0
    num_stored: int = 0


Side = Callable[[list[list[int]]], Taken]


def setup_of(model: Path, load: Load, mode: str, host_bytes: str) -> EngineSetup:
    """The engine of one side: ``mode`` is ``PLAIN`` or a name in ``MODES``."""
    transfer = None
    if mode != PLAIN:
        transfer = kv_transfer_of(CONNECTOR, cpu_bytes_to_use=host_bytes, **MODES[mode])
    longest = load.prompt_tokens + load.answer_tokens
    return EngineSetup(model, longest, load.num_pool_blocks, BLOCK_TOKENS, "float32", transfer)


def run_round(engine: InProcessEngine, prompts: list[list[int]], answer_tokens: int) -> Taken:
    """All prompts at once, until the engine has nothing left to do."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=answer_tokens, ignore_eos=True, detokenize=False
    )
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    begun_s, begun_processor_s = time.perf_counter(), time.process_time()
    outputs = engine.llm.generate(asked, params, use_tqdm=False)  # type: ignore[arg-type]
    engine.settle()
    wall_s, processor_s = time.perf_counter() - begun_s, time.process_time() - begun_processor_s
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    if engine.setup.kv_transfer is None:
        return Taken(wall_s, processor_s, tokens)
    counts = engine.connector.snapshot()  # type: ignore[attr-defined]
    return Taken(wall_s, processor_s, tokens, counts["hits"], counts["stored_chunks"])


@contextmanager
def side_in_process(setup: EngineSetup, answer_tokens: int) -> Iterator[Side]:
    """An engine in a process of its own. Raises ``RuntimeError`` when it does not come up."""
    with EngineProcess(setup, partial(run_round, answer_tokens=answer_tokens)) as side:
        side.wait_until_up()
        yield side


def in_turns(
    sides: Mapping[str, Side], load: Load, num_rounds: int, seed: int, num_warm: int = 2
) -> dict[str, list[Taken]]:
    """``num_rounds`` rounds on every side, each beginning with another one, after some that do not
    count. Raises ``RuntimeError`` when sides differ in a token or a prompt was found in a cache."""
    names = list(sides)
    taken: dict[str, list[Taken]] = {name: [] for name in names}
    for number in range(num_warm + num_rounds):
        prompts = load.prompts(seed + number)
        shift = number % len(names)
        answers = {name: sides[name](prompts) for name in names[shift:] + names[:shift]}
        for name, answer in answers.items():
            if answer.tokens != answers[names[0]].tokens:
                raise RuntimeError(f"round {number}: tokens of {name} and {names[0]} differ")
            if answer.num_hits:
                raise RuntimeError(f"round {number}: {name} loaded for {answer.num_hits} prompts")
            if number >= num_warm:
                taken[name].append(answer)
    return taken


@dataclass(frozen=True, slots=True)
class Cost:
    """Medians of the ratios of one mode, round by round; ``target`` is for wall time at rest."""

    mode: str
    wall_ratio: float
    processor_ratio: float
    target: float
    num_stored: int


def costs_of(taken: Mapping[str, Sequence[Taken]]) -> list[Cost]:
    """Every mode against ``PLAIN``."""
    costs = []
    for mode in (name for name in taken if name != PLAIN):
        pairs = list(zip(taken[PLAIN], taken[mode], strict=True))
        costs.append(
            Cost(
                mode,
                statistics.median(plain.wall_s / ours.wall_s for plain, ours in pairs),
                statistics.median(plain.processor_s / ours.processor_s for plain, ours in pairs),
                TARGETS[mode],
                taken[mode][-1].num_stored,
            )
        )
    return costs


def table(costs: Sequence[Cost]) -> str:
    """The costs as a table in Markdown."""
    lines = ["| mode | wall | processor | target | chunks stored |", "|---|---:|---:|---:|---:|"]
    lines += [
        f"| {c.mode} | {c.wall_ratio:.3f} | {c.processor_ratio:.3f} | {c.target:.2f} "
        f"| {c.num_stored} |"
        for c in costs
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, or with ``--json`` one object. Fails (1) with ``--check`` under a target."""
    parser = argparse.ArgumentParser(prog="idle", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", type=Path, help="a model folder; without it, the demo's model")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--answer-tokens", type=int, default=16)
    parser.add_argument("--pool-rounds", type=float, default=2.0)
    parser.add_argument("--host-bytes", default="512MiB")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--check", action="store_true", help="judge the wall ratios")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    try:
        load = Load(
            options.prompts, options.prompt_tokens, options.answer_tokens, options.pool_rounds
        )
    except ValueError as error:
        parser.error(str(error))
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}; allowed: 1 or more")
    model = options.model or _demo_model()
    with ExitStack() as stack:
        sides = {
            name: stack.enter_context(
                side_in_process(setup_of(model, load, name, options.host_bytes), load.answer_tokens)
            )
            for name in (PLAIN, *options.modes)
        }
        costs = costs_of(in_turns(sides, load, options.rounds, options.seed))
    busy = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    if options.json:
        print(json.dumps({"load": busy, "costs": [asdict(cost) for cost in costs]}, indent=1))
    else:
        print(table(costs), busy, sep="\n\n")
    return int(options.check and any(cost.wall_ratio < cost.target for cost in costs))


def _demo_model() -> Path:
    from ..demo.model import demo_model

    return demo_model()


if __name__ == "__main__":
    sys.exit(main())

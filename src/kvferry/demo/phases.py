"""The demo's run: six ways to serve the same chat, on an engine with kvferry and on one without."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from .chat import chat_tokens, other_prompt
from .engine import Answer, EngineSetup, InProcessEngine, kv_transfer_of

CONNECTOR: Final = "KVFerrySimpleConnector"
BLOCK_SIZE: Final = 32
HOST_BYTES: Final = "512MiB"
NUM_ANSWER_TOKENS: Final = 24
NUM_REPEATS: Final = 5
NUM_SPARE_BLOCKS: Final = 12
NUM_FILLERS: Final = 2
"""Prompts as long as the chat: together they take every block of a pool of less than two chats."""

Snapshot = dict[str, int | float]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Phase:
    """One row of the table: the same request, ``NUM_REPEATS`` times or once."""

    name: str
    answers: tuple[Answer, ...]

    @property
    def last(self) -> Answer:
        return self.answers[-1]

    @property
    def first_token_s(self) -> float:
        """The median time to the first token."""
        times = sorted(answer.first_token_s for answer in self.answers)
        return times[len(times) // 2]


@dataclass(frozen=True, slots=True)
class Ending:
    """The connector's account of itself: fresh, before (5), and after it with all work done."""

    fresh: Snapshot
    before_bypass: Snapshot
    settled: Snapshot
    settled_worker: Snapshot


@dataclass(frozen=True, slots=True)
class DemoRun:
    """Everything that was seen; what to think of it is decided in ``checks``."""

    model: str
    device: str
    dtype: str
    block_size: int
    cold: Phase
    gpu_hit: Phase
    host_hit: Phase
    bypass: Phase
    plain: Phase
    plain_logprobs: Phase
    connector_answers: tuple[tuple[int | None, bool], ...]
    ending: Ending

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (
            self.cold,
            self.gpu_hit,
            self.host_hit,
            self.bypass,
            self.plain,
            self.plain_logprobs,
        )


def plan_engine(model: Path, num_prompt_tokens: int, device: str) -> EngineSetup:
    """An engine whose GPU pool holds the chat once, and not twice."""
    num_blocks = -(-(num_prompt_tokens + NUM_ANSWER_TOKENS) // BLOCK_SIZE) + NUM_SPARE_BLOCKS
    return EngineSetup(
        model=model,
        max_model_len=(num_blocks - 1) * BLOCK_SIZE,
        num_gpu_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        dtype="float32" if device == "cpu" else "bfloat16",
    )


def with_kvferry(setup: EngineSetup) -> EngineSetup:
    return replace(
        setup,
        kv_transfer=kv_transfer_of(
            CONNECTOR,
            cpu_bytes_to_use=HOST_BYTES,
            min_load_tokens=0,  # to be shown a load, not a decision against it
        ),
    )


def evict(engine: InProcessEngine, tokens: list[int]) -> None:
    """Push the prompt's blocks out of the GPU pool by serving other prompts."""
    for number in range(NUM_FILLERS):
        engine.ask(other_prompt(tokens, seed=100 + number), 1)
        engine.settle()


def serve(engine: InProcessEngine, tokens: list[int], **options: Any) -> Answer:
    answer = engine.ask(tokens, NUM_ANSWER_TOKENS, **options)
    engine.settle()
    return answer


def repeat(once: Callable[[], Answer], num_repeats: int) -> tuple[Answer, ...]:
    return tuple(once() for _ in range(num_repeats))


@contextmanager
def watched_matches(engine: InProcessEngine) -> Iterator[list[tuple[int | None, bool]]]:
    """What the connector itself answers: vLLM overrules it for a bypassing request afterwards."""
    connector = engine.connector
    match = connector.get_num_new_matched_tokens
    answers: list[tuple[int | None, bool]] = []

    def watched(*args: Any, **kwargs: Any) -> tuple[int | None, bool]:
        answer = match(*args, **kwargs)
        answers.append(answer)
        return answer

    connector.get_num_new_matched_tokens = watched  # type: ignore[method-assign]
    try:
        yield answers
    finally:
        connector.get_num_new_matched_tokens = match  # type: ignore[method-assign]


def snapshot_of(connector: Any) -> Snapshot:
    snapshot: Snapshot = connector.snapshot()
    return snapshot


class _Ways:
    """The ways to serve one prompt on one engine, for the warm-up and for the chat alike."""

    def __init__(self, engine: InProcessEngine, tokens: list[int]) -> None:
        self._engine = engine
        self._tokens = tokens

    def cold(self) -> Answer:
        self._engine.forget()
        return serve(self._engine, self._tokens)

    def again(self) -> Answer:
        return serve(self._engine, self._tokens)

    def after_eviction(self) -> Answer:
        evict(self._engine, self._tokens)
        return serve(self._engine, self._tokens)

    def with_logprobs(self) -> Answer:
        return serve(self._engine, self._tokens, prompt_logprobs=True)


def run_with_kvferry(
    engine: InProcessEngine, tokens: list[int], num_repeats: int, say: Say
) -> dict[str, Any]:
    """Phases (1) to (5); the fields of ``DemoRun`` that come from them."""
    fresh = snapshot_of(engine.connector)
    say("warming up with another prompt")
    warm = _Ways(engine, other_prompt(tokens, seed=1))
    for way in (warm.cold, warm.again, warm.after_eviction, warm.with_logprobs):
        way()
    chat = _Ways(engine, tokens)
    say("(1) the chat, cold")
    cold = Phase("(1) cold", repeat(chat.cold, num_repeats))
    say("(2) again, from vLLM's own prefix cache")
    gpu_hit = Phase("(2) again, from the GPU", repeat(chat.again, num_repeats))
    say("(3) other prompts until its blocks are evicted, (4) again, from the host")
    host_hit = Phase("(4) evicted, from the host", repeat(chat.after_eviction, num_repeats))
    say("(5) with prompt logprobs, which must bypass the cache")
    before = snapshot_of(engine.connector)
    with watched_matches(engine) as answers:
        bypass = Phase("(5) with prompt logprobs", (chat.with_logprobs(),))
    ending = Ending(
        fresh=fresh,
        before_bypass=before,
        settled=snapshot_of(engine.connector),
        settled_worker=snapshot_of(engine.worker_connector),
    )
    return {
        "cold": cold,
        "gpu_hit": gpu_hit,
        "host_hit": host_hit,
        "bypass": bypass,
        "connector_answers": tuple(answers),
        "ending": ending,
    }


def run_without(engine: InProcessEngine, tokens: list[int], num_repeats: int) -> dict[str, Any]:
    """Phase (6): the same prompts without kvferry."""
    warm = _Ways(engine, other_prompt(tokens, seed=1))
    for way in (warm.cold, warm.with_logprobs):
        way()
    chat = _Ways(engine, tokens)
    return {
        "plain": Phase("(6) without kvferry, cold", repeat(chat.cold, num_repeats)),
        "plain_logprobs": Phase("(6) with prompt logprobs", (chat.with_logprobs(),)),
    }


def run_demo(model: Path, device: str, say: Say, num_repeats: int = NUM_REPEATS) -> DemoRun:
    """All phases, on two engines one after the other. ``device`` is "cpu" or "cuda"."""
    started = time.monotonic()

    def timed(text: str) -> None:
        say(f"[{time.monotonic() - started:5.1f} s] {text}")

    tokens = chat_tokens(model)
    setup = plan_engine(model, len(tokens), device)
    timed("starting vLLM with kvferry")
    with InProcessEngine(with_kvferry(setup)) as engine:
        seen = run_with_kvferry(engine, tokens, num_repeats, timed)
    timed("(6) the same prompts on an engine without kvferry")
    with InProcessEngine(setup) as engine:
        seen |= run_without(engine, tokens, num_repeats)
    timed("done")
    return DemoRun(
        model=model.name, device=device, dtype=setup.dtype, block_size=BLOCK_SIZE, **seen
    )

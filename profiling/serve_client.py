"""The clients of the serving benchmark: in the engine's process, with every question at hand.

The loop is closed: a client asks, waits for its answer, and asks the next question in the queue. A
wave ends when the engine has nothing left to do, so stores count towards its time.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..demo.engine import Answer, InProcessEngine


@dataclass(frozen=True, slots=True)
class Wave:
    """Prompts to ask. ``is_warm_up``: twice, and with a connector from the host the second time, so
    that all that is warm, then everything is forgotten; ``is_first``: forget everything before."""

    prompts: Sequence[Sequence[int]]
    answer_tokens: int
    num_clients: int
    is_first: bool = False
    is_warm_up: bool = False


@dataclass(frozen=True, slots=True)
class Played:
    """The answers in the order of the prompts, and the time from the first question to rest.

    ``admitted``: how many requests kvferry loaded for (``hits``), had nothing for (``misses``), and
    declined to load for (``declined``); empty where another connector or none runs.
    """

    answers: tuple[Answer, ...]
    wall_s: float
    admitted: Mapping[str, int]


def play(engine: InProcessEngine, wave: Wave) -> Played:
    """Ask a wave of questions."""
    if wave.is_first:
        engine.forget()
    played = _play_once(engine, wave)
    if wave.is_warm_up:
        if engine.setup.kv_transfer is not None:
            engine.forget(host_too=False)
        played = _play_once(engine, wave)
        engine.forget()
    return played


def _play_once(engine: InProcessEngine, wave: Wave) -> Played:
    queue = deque(enumerate(wave.prompts))
    places: dict[str, int] = {}
    answers: dict[int, Answer] = {}
    before = _admitted(engine)
    begun_s = time.perf_counter()
    while queue or places:
        while queue and len(places) < wave.num_clients:
            place, prompt = queue.popleft()
            places[engine.submit(prompt, wave.answer_tokens)] = place
        for request_id, answer in engine.step().items():
            answers[places.pop(request_id)] = answer
    engine.settle()
    wall_s = time.perf_counter() - begun_s
    admitted = {name: count - before[name] for name, count in _admitted(engine).items()}
    return Played(tuple(answers[place] for place in range(len(wave.prompts))), wall_s, admitted)


def _admitted(engine: InProcessEngine) -> dict[str, int]:
    if engine.setup.kv_transfer is None or not hasattr(engine.connector, "snapshot"):
        return {}
    snapshot = engine.connector.snapshot()
    return {name: snapshot[name] for name in ("hits", "misses", "declined")}

"""Request traces for hit rates: who asks what, as chains of chunk keys. Seeded, no text.

A trace is a list of requests in the order of their arrival; a request is the list of its chunks'
keys, in prefix order. Equal keys mean an equal prefix up to and with that chunk.
"""

import gzip
import json
import random
from pathlib import Path

from ..engine.types import Key

Trace = list[list[Key]]


def read_trace(path: Path) -> Trace:
    """A trace of one JSON object a line with ``hash_ids``, plain or gzipped (Mooncake's format)."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        return [[_key(chunk) for chunk in json.loads(line)["hash_ids"]] for line in lines]


def _key(number: int) -> Key:
    return Key(number.to_bytes(8, "little"))


class _Fresh:
    """Gives out chunks that nobody had before."""

    def __init__(self) -> None:
        self._next = 0

    def chunks(self, number: int) -> list[Key]:
        first, self._next = self._next, self._next + number
        return [_key(chunk) for chunk in range(first, self._next)]


def chat(seed: int, num_requests: int = 6000, num_users: int = 400, scans: float = 0.0) -> Trace:
    """Conversations of six turns on average behind one system prompt, users taking turns at random.

    A turn adds one to six chunks. ``scans`` is the share of requests that are one-off documents of
    64 chunks, which nobody asks for again.
    """
    rng, fresh, trace = random.Random(seed), _Fresh(), Trace()
    system = fresh.chunks(4)
    users: list[list[Key]] = []
    while len(trace) < num_requests:
        if rng.random() < scans:
            trace.append(fresh.chunks(64))
            continue
        opening = system + fresh.chunks(rng.randint(2, 12))
        user = rng.randrange(num_users)
        if len(users) < num_users:
            users.append(opening)
            user = len(users) - 1
        elif rng.random() < 1 / 6:
            users[user] = opening
        else:
            users[user] = users[user] + fresh.chunks(rng.randint(1, 6))
        trace.append(users[user])
    return trace


def agents(seed: int, num_requests: int = 6000, num_agents: int = 24, scans: float = 0.0) -> Trace:
    """Agents with a long shared prompt each (40 chunks), which work on tasks of several steps.

    A step adds one to three chunks to the task's prompt; agents differ in how busy they are.
    ``scans`` as in ``chat``.
    """
    rng, fresh, trace = random.Random(seed), _Fresh(), Trace()
    prompts = [fresh.chunks(40) for _ in range(num_agents)]
    busy = [1 / (rank + 1) for rank in range(num_agents)]
    tasks: list[list[Key]] = []
    while len(trace) < num_requests:
        if rng.random() < scans:
            trace.append(fresh.chunks(64))
            continue
        if len(tasks) < 40 or rng.random() < 0.1:
            (agent,) = rng.choices(range(num_agents), busy)
            tasks.append(prompts[agent] + fresh.chunks(rng.randint(2, 8)))
            tasks = tasks[-40:]
            task = len(tasks) - 1
        else:
            task = rng.randrange(len(tasks))
            tasks[task] = tasks[task] + fresh.chunks(rng.randint(1, 3))
        trace.append(tasks[task])
    return trace

"""Run by a test under ``kvferry profile``: a real engine, a tiny model, prompts that come twice.

The pool is too small for its requests and the link is busy, so blocks are given away before they
are stored: compute is held for those. ``tests/integration`` has to be on the path.
"""

import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from kvferry.engine.devices.base import Piece, Ticket
from kvferry.engine.devices.cpu import CpuDevice
from kvferry.engine.strategy import Strategy
from kvferry.engine.types import Direction
from kvferry.integration.vllm import worker
from tiny_models import build_model, shared_prefix_prompts, tiny_engine

SEED = 3
WAIT_S = 30.0
NUM_THREADS = 8
"""Enough for loads to find one beside the stores that wait."""


class BusyLink(CpuDevice):
    """Stores move only while somebody waits: compute that is held, or an engine with nothing else
    to do. So what is given away in between is always still to be stored."""

    def __init__(self) -> None:
        self._awaited = threading.Event()
        super().__init__(NUM_THREADS)

    def wait(self, tickets: Sequence[Ticket], timeout_s: float) -> bool:
        self._awaited.set()
        try:
            return super().wait(tickets, timeout_s)
        finally:
            self._awaited.clear()

    def close(self, timeout_s: float) -> bool:
        self._awaited.set()
        return super().close(timeout_s)

    def _move(self, piece: Piece, begin: int, end: int, strategy: Strategy) -> list[int]:
        if piece.direction is Direction.STORE:
            assert self._awaited.wait(WAIT_S), "nobody waits, and nothing ends"
        return super()._move(piece, begin, end, strategy)


if __name__ == "__main__":
    print(f"seed {SEED}")
    worker.CpuDevice = BusyLink
    model = build_model("llama", Path(sys.argv[1]))
    prompts = shared_prefix_prompts(SEED, 24)
    with tiny_engine(
        model,
        num_blocks=34,
        max_model_len=512,
        max_num_seqs=10,
        max_num_batched_tokens=256,
        extra_config={"measure_s": 0},
    ) as engine:
        for _ in range(2):
            engine.generate(prompts)
            engine.drain()
            engine.scheduler.reset_prefix_cache()
        num_preemptions, loaded = engine.num_preemptions, engine.connector.snapshot()
    print(f"{num_preemptions} preemptions, {loaded['loaded_chunks']} chunks loaded")

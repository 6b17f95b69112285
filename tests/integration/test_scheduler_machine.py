"""vLLM's real scheduler under a Hypothesis state machine, held to the design's invariants.

Requests come (sharing prefixes, some bypassing, some of another tenant), are aborted, preempted and
reset in any order, while each rank completes, fails, gives up and settles its jobs when told. After
every step the contents that ``symbolic_ranks`` keeps must be what they should be. 100 runs of up to
100 steps for each connector; with ``KVFERRY_SLOW=1``, 2,000.

``test_a_broken_core_is_caught`` breaks the code in one way at a time, and the machine must notice.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase
from kvferry.engine import core as core_module
from kvferry.engine import storing as storing_module
from kvferry.engine.core import SchedulingCore
from kvferry.engine.jobs import Ended, Jobs
from kvferry.engine.ledger import Ledger
from kvferry.engine.messages import JobOrder, JobReport
from kvferry.engine.types import BlockId, Direction, JobId, Key, Rank, RequestId
from kvferry.integration.vllm.connector import OffloadConnectorBase
from scheduler_machine import run_machine
from symbolic_ranks import BrokenInvariant
from vllm.v1.request import Request

NUM_RUNS = 2000 if os.environ.get("KVFERRY_SLOW") == "1" else 100


@pytest.mark.parametrize("connector", ["KVFerrySimpleConnector", "KVFerryOffloadingConnector"])
def test_the_invariants_hold_under_vllms_scheduler(model_config_dir: Path, connector: str) -> None:
    run_machine(model_config_dir, connector, NUM_RUNS, Phase.generate, Phase.shrink)


# -- breaking it on purpose -----------------------------------------------------------------------

Patch = Callable[[pytest.MonkeyPatch], None]


def no_flush(patch: pytest.MonkeyPatch) -> None:
    """Nobody asks for a fenced block's jobs."""
    patch.setattr(Jobs, "fenced", lambda self, blocks: set())


def one_rank_speaks_for_all(patch: pytest.MonkeyPatch) -> None:
    right = Jobs.report

    def report(self: Jobs, report: JobReport) -> Ended | None:
        ends = [right(self, replace(report, rank=Rank(r))) for r in range(self.num_ranks)]
        return next((end for end in ends if end is not None), None)

    patch.setattr(Jobs, "report", report)


def given_up_is_settled(patch: pytest.MonkeyPatch) -> None:
    right = Jobs.report
    patch.setattr(Jobs, "report", lambda self, r: right(self, replace(r, settled=True)))


def failed_is_stored(patch: pytest.MonkeyPatch) -> None:
    right = Jobs.report
    patch.setattr(Jobs, "report", lambda self, r: right(self, replace(r, error=None)))


def stores_after_a_reset(patch: pytest.MonkeyPatch) -> None:
    right = SchedulingCore.due

    def due(self: SchedulingCore, request_id: RequestId, num_computed: int) -> bool:
        request = self._requests.get(request_id)
        if request is not None:
            request.stale = False
        return right(self, request_id, num_computed)

    patch.setattr(SchedulingCore, "due", due)


def a_reset_forgets_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "invalidate_all", lambda self: 0)


def stores_the_block_before(patch: pytest.MonkeyPatch) -> None:
    right = storing_module.sources

    def sources(*args: Any) -> dict[Key, Sequence[BlockId]]:
        geometry, keys, absent, table, first, boundary = args
        shifted = [*table[1:], *table[:1]]
        return right(geometry, keys, absent, shifted, first, boundary)

    patch.setattr(storing_module, "sources", sources)


def loads_the_chunk_behind(patch: pytest.MonkeyPatch) -> None:
    right = core_module.order_of

    def order_of(job_id: JobId, direction: Direction, leases: Any, *rest: Any) -> JobOrder:
        if direction is Direction.LOAD:
            leases = [replace(lease, slots=lease.slots[::-1]) for lease in leases]
        return right(job_id, direction, leases, *rest)

    patch.setattr(core_module, "order_of", order_of)


def idle_too_soon(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SchedulingCore, "busy", property(lambda self: False))


def never_idle(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SchedulingCore, "busy", property(lambda self: True))


def no_guard(patch: pytest.MonkeyPatch) -> None:
    right = OffloadConnectorBase.get_num_new_matched_tokens

    def ask(self: OffloadConnectorBase, request: Request, num: int) -> tuple[int | None, bool]:
        bypass, request.skip_reading_prefix_cache = request.skip_reading_prefix_cache, False
        answer = right(self, request, num)
        request.skip_reading_prefix_cache = bypass
        return answer

    patch.setattr(OffloadConnectorBase, "get_num_new_matched_tokens", ask)


BROKEN: list[tuple[Patch, str]] = [
    (no_flush, "I1"),
    (one_rank_speaks_for_all, "I1, I3|I2|I8"),
    (given_up_is_settled, "I2"),
    (failed_is_stored, "I1, I3|I7"),
    (stores_after_a_reset, "I6"),
    (a_reset_forgets_nothing, "I6"),
    (stores_the_block_before, "I1"),
    (loads_the_chunk_behind, "I7, I10"),
    (idle_too_soon, "I8"),
    (never_idle, "I8"),
    (no_guard, "I5"),
]


@pytest.mark.parametrize(
    ("broken", "number"), [pytest.param(*case, id=case[0].__name__) for case in BROKEN]
)
def test_a_broken_core_is_caught(
    model_config_dir: Path, monkeypatch: pytest.MonkeyPatch, broken: Patch, number: str
) -> None:
    broken(monkeypatch)
    with pytest.raises(BrokenInvariant, match=f"^({number})"):
        run_machine(model_config_dir, "KVFerryOffloadingConnector", 100, Phase.generate)

"""The Hypothesis state machine of ``test_scheduler_machine``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from kv_groups import full, grouped_config, window
from kvferry.engine.types import JobId
from real_scheduler import tokens
from symbolic_ranks import BrokenInvariant, SymbolicEngine
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.request import Request, RequestStatus

FAMILIES = [tokens(seed, 24) for seed in range(2)]
INDEX = st.integers(0, 7)
RESETS = [
    {},
    {"reset_running_requests": True},
    {"reset_running_requests": True},
    {"reset_connector": True},
    {"reset_running_requests": True, "reset_connector": True},
]


class SchedulerMachine(RuleBasedStateMachine):
    """``connector`` and ``model`` are set by the test."""

    connector: ClassVar[str]
    model: ClassVar[Path]
    second_group: ClassVar[Callable[[], KVCacheSpec]] = staticmethod(lambda: window(8))

    @initialize(
        num_ranks=st.integers(1, 2),
        is_async=st.booleans(),
        num_slots=st.sampled_from([3, 5, 12]),
        num_blocks=st.sampled_from([11, 24]),
        max_batched_tokens=st.sampled_from([9, 64]),
        has_second=st.booleans(),
    )
    def start(
        self,
        num_ranks: int,
        is_async: bool,
        num_slots: int,
        num_blocks: int,
        max_batched_tokens: int,
        has_second: bool,
    ) -> None:
        """``has_second``: ``second_group`` too, and twice as many blocks and slots."""
        specs = [full(), self.second_group()] if has_second else [full()]
        num_blocks = num_blocks * len(specs)
        extra: dict[str, Any] = {"min_load_tokens": 0}
        if self.connector == "KVFerryOffloadingConnector":
            extra["offload_prompt_only"] = False
        self.engine = SymbolicEngine(
            self.model,
            connector=self.connector,
            num_ranks=num_ranks,
            num_slots=num_slots * len(specs),
            num_blocks=num_blocks,
            kv_cache_config=grouped_config(num_blocks, specs),
            max_batched_tokens=max_batched_tokens,
            async_scheduling=is_async,
            extra_config=extra,
        )
        self.num_added = 0
        self.is_sound = True
        self._watch_the_guard()

    def _watch_the_guard(self) -> None:
        """I5, at the connector's own answer."""
        connector = self.engine.connector
        ask = connector.get_num_new_matched_tokens

        def asked(request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
            self.engine.ranks.stale_requests.discard(request.request_id)
            before = self.engine.snapshot()
            answer: tuple[int | None, bool] = ask(request, num_computed_tokens)
            if request.skip_reading_prefix_cache:
                after = self.engine.snapshot()
                looked = any(after[name] != before[name] for name in ("lookups", "waits"))
                if answer != (0, False) or looked or after["leases"] > before["leases"]:
                    raise BrokenInvariant(f"I5: {request.request_id} bypasses, got {answer}")
            return answer

        connector.get_num_new_matched_tokens = asked

    # -- requests ---------------------------------------------------------------------------

    @rule(
        family=st.integers(0, 1),
        shared=st.integers(0, 24),
        own=st.integers(0, 3),
        max_tokens=st.integers(1, 6),
        bypass=st.sampled_from([None, None, None, True]),
        salt=st.sampled_from([None, None, None, "tenant"]),
    )
    def add(
        self,
        family: int,
        shared: int,
        own: int,
        max_tokens: int,
        bypass: bool | None,
        salt: str | None,
    ) -> None:
        if len(self.engine.scheduler.requests) >= 6:
            return
        prompt = [*FAMILIES[family][:shared], *[8 + self.num_added % 5] * own] or [8]
        request = self.engine.request(
            f"r{self.num_added}",
            prompt,
            max_tokens=max_tokens,
            cache_salt=salt,
            skip_reading_prefix_cache=bypass,
        )
        self.num_added += 1
        self.engine.scheduler.add_request(request)

    @rule(family=st.integers(0, 1), shared=st.integers(4, 24))
    def warm(self, family: int, shared: int) -> None:
        """Have a prompt in the host only, so that a later one hits it."""
        self.add(family, shared, 1, 1, bypass=None, salt=None)
        for _ in range(4):
            self._step()
            self.end_all()
        self._step()
        self._reset()

    @precondition(lambda self: self.engine.scheduler.requests)
    @rule(index=INDEX)
    def abort(self, index: int) -> None:
        live = sorted(self.engine.scheduler.requests)
        if index < len(live):
            self.engine.scheduler.finish_requests(live[index], RequestStatus.FINISHED_ABORTED)

    @precondition(lambda self: self.engine.scheduler.requests)
    @rule(how=st.sampled_from(RESETS))
    def reset(self, how: dict[str, bool]) -> None:
        """Also what preempts everything."""
        self._reset(**how)

    def _reset(self, **what: bool) -> None:
        ranks = self.engine.ranks
        try:
            done = self.engine.scheduler.reset_prefix_cache(**what)
        except RuntimeError:  # vLLM's own: not while a request is loading; it has preempted all
            return
        if what.get("reset_connector"):
            ranks.stale_jobs = set(range(self.engine.manager.core.jobs.next_id))
            ranks.stale_requests = set(self.engine.scheduler.requests)
            if done:
                ranks.generation += 1

    # -- steps and jobs -----------------------------------------------------------------------

    @rule(times=st.integers(1, 3))
    def step(self, times: int) -> None:
        for _ in range(times):
            self._step()

    def _step(self) -> None:
        self.is_sound = False  # unless this comes to its end
        self.engine.step()
        self.engine.now_s += 0.7
        self.engine.check_content()
        self.engine.manager.core.check()
        if any(self.engine.ranks.unanswered.values()) and not self._is_busy():
            raise BrokenInvariant("I8: a rank works, and the connector says that it is idle")
        self.is_sound = True

    def _job(self, index: int, table: dict[JobId, set[int]]) -> tuple[JobId, int] | None:
        pairs = [(job_id, rank) for job_id in table for rank in sorted(table[job_id])]
        return pairs[index % len(pairs)] if pairs else None

    @precondition(lambda self: self.engine.ranks.open)
    @rule(index=INDEX, how=st.sampled_from(["well", "well", "badly", "late"]))
    def end_job(self, index: int, how: str) -> None:
        """One rank ends one job; the other may take its time."""
        ranks = self.engine.ranks
        job = self._job(index, ranks.unanswered)
        if job is not None and how == "late":
            ranks.give_up(*job)
        elif job is not None:
            ranks.report(*job, error="told to fail" if how == "badly" else None)

    @precondition(lambda self: self.engine.ranks.open)
    @rule(index=INDEX)
    def settle(self, index: int) -> None:
        ranks = self.engine.ranks
        given_up = {j: ranks.unsettled[j] - ranks.unanswered[j] for j in ranks.open}
        job = self._job(index, given_up)
        if job is not None:
            ranks.settle(*job)

    @rule(index=INDEX, times=st.integers(1, 2))
    def end_well(self, index: int, times: int) -> None:
        """A rank ends a job, and steps follow."""
        job = self._job(index, self.engine.ranks.unanswered)
        if job is not None:
            self.engine.ranks.report(*job)
        self.step(times)

    @precondition(lambda self: self.engine.ranks.open)
    @rule()
    def end_all(self) -> None:
        """Every rank ends all that it has not given up."""
        ranks = self.engine.ranks
        for job_id in list(ranks.open):
            for rank in sorted(ranks.unanswered[job_id]):
                ranks.report(job_id, rank)

    def _settle_all(self) -> None:
        ranks = self.engine.ranks
        for job_id in list(ranks.open):
            for rank in sorted(ranks.unsettled[job_id]):
                ranks.settle(job_id, rank)

    # -- what always holds --------------------------------------------------------------------

    def _is_busy(self) -> bool:
        return bool(self.engine.connector.has_pending_push_work())

    def teardown(self) -> None:
        """I8: with every job ended, every request ends, the work stops, and nothing is left."""
        if not getattr(self, "is_sound", False):
            return  # do not hide what broke it
        for _ in range(300):
            if not self.engine.scheduler.has_requests() and not self.engine.ranks.open:
                break
            self.end_all()
            self._settle_all()
            self._step()
        else:
            raise BrokenInvariant(f"I8: does not come to rest: {self.engine.connector!r}")
        self._step()
        self._step()
        if self._is_busy():
            raise BrokenInvariant("I8: nothing is in flight, and the connector says it is busy")
        self.engine.check_idle()


def run_machine(model: Path, connector: str, num_runs: int, *phases: Phase, **members: Any) -> None:
    """Seeded: the same runs each time (``derandomize``). ``members`` replace the machine's own."""
    members = {"connector": connector, "model": model, **members}
    machine = type(connector, (SchedulerMachine,), members)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_runs,
            stateful_step_count=100,
            deadline=None,
            derandomize=True,
            database=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            phases=phases,
        ),
    )

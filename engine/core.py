"""The scheduling core: what both offload managers do, without a word of vLLM.

It keeps three things: the ledger (what is where), the jobs (what is moving) and, per live request,
where storing stands. A manager asks it to match and load while a step is being built, offers what
the step computes, and ends the step with ``build``, which returns the orders for the ranks. Reports
come back through ``take``.

Two rules hold everywhere:

- GPU blocks are *fenced* from the moment a job is planned until every rank has let go of them. A
  block that is given to somebody else while it is fenced puts its jobs on the step's flush list, so
  it is read (or written) before anything overwrites it. This one rule covers preemption, finish,
  windows and other connectors.
- What a request computed may be stored only while its own cache is sound: not while a load of it is
  in flight, not after a load of it failed, and not after a reset until it has started over.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from .admission import GpuPool, LoadAdmission
from .changes import Change, Journal
from .core_options import CoreOptions
from .freshness import FreshBlocks
from .geometry import GroupGeometry
from .jobs import Ended, Jobs
from .ledger import Ledger
from .matching import Matcher
from .messages import JobOrder, StepOrders, StepReports
from .orders import order_of, refusal
from .planner import Part, PlannedStore, Tables, wanted
from .policy import make_policy
from .recovery import Recovery
from .requests import NO_LIMITS, Limits, TrackedRequest
from .state import SlotState
from .storing import Reserved, StoreReserver
from .types import BlockId, Direction, JobId, RequestId
from .worth import LoadWorth, StepClock


class SchedulingCore:
    """Ledger, jobs and request bookkeeping behind a manager. One thread."""

    def __init__(
        self,
        groups: Sequence[GroupGeometry],
        num_slots: int,
        num_ranks: int,
        options: CoreOptions | None = None,
        *,
        gpu_pool: GpuPool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.groups = tuple(groups)
        self.options = options or CoreOptions()
        num_ids = max(geometry.group for geometry in groups) + 1
        self.ledger = Ledger(num_slots, num_ids, make_policy(self.options.policy, num_slots))
        self.ledger.journal = Journal() if self.options.journal else None
        self.jobs = Jobs(self.ledger, num_ranks)
        self.fresh = FreshBlocks()
        self._storing = StoreReserver(self.groups, self.ledger, self.options)
        self._worth = LoadWorth(self.options.min_load_tokens)
        self._matcher = Matcher(
            self.groups, self.ledger, self.jobs, self._worth, self.options.wait_s, clock
        )
        self._recovery = Recovery()
        self._admission = LoadAdmission(self.groups, gpu_pool or GpuPool())
        self._load_tokens: dict[JobId, int] = {}
        self._steps = StepClock()
        self._clock = clock
        self._requests: dict[RequestId, TrackedRequest] = {}
        self._loads: list[JobOrder] = []
        self._stores: list[JobOrder] = []
        self._prior_stores: list[JobOrder] = []
        self._allocated: set[BlockId] = set()
        self._counts: Counter[str] = Counter()
        self._off = False

    # -- requests ---------------------------------------------------------------------------

    def start_over(
        self,
        request_id: RequestId,
        hashes: Sequence[bytes],
        *,
        num_prompt_tokens: int,
        num_local_tokens: int,
        limits: Limits = NO_LIMITS,
    ) -> None:
        """The request starts from nothing (new, or after preemption); so does its bookkeeping."""
        self._drop_pins(request_id)
        self._admission.over(request_id)
        self._requests[request_id] = TrackedRequest(
            hashes, num_prompt_tokens, num_local_tokens, limits, [0] * len(self.groups)
        )

    def forget(self, request_id: RequestId) -> None:
        self._drop_pins(request_id)
        self._requests.pop(request_id, None)
        self._matcher.forget(request_id)
        self._recovery.over(request_id)
        self._admission.over(request_id)

    def _drop_pins(self, request_id: RequestId) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            for lease in request.pins:
                self.ledger.release(lease)
            request.pins = ()

    # -- matching ---------------------------------------------------------------------------

    def match(self, request_id: RequestId, num_tokens: int, *, wait: bool) -> int | None:
        """Tokens that can be loaded behind what vLLM's own cache serves (see ``Matcher.match``).

        A request whose load has failed is served none (see ``Recovery``), and one whose load would
        hold blocks that others need for theirs is asked again (see ``admission``).
        """
        if request_id in self._recovery:
            return self._recovery.match(request_id, self._requests)
        if self._off:
            return 0
        request = self._requests[request_id]
        num_hit_tokens = self._matcher.match(request_id, request, num_tokens, wait=wait)
        if num_hit_tokens:
            request.claim = self._admission.claim(num_tokens, request.hit_tokens)
            if not self._admission.allows(request_id, request.claim):
                self._matcher.counts["waits"] += 1
                return None
        return num_hit_tokens

    def pin(self, request_id: RequestId) -> None:
        """Hold the chunks of the last match until they are loaded or the request goes away."""
        request = self._requests[request_id]
        parts = wanted(self.groups, request, request.hit_tokens)
        request.pins = tuple(
            self.ledger.pin(part.geometry.group, part.keys) for part in parts if part.keys
        )

    # -- loads ------------------------------------------------------------------------------

    def given(self, request_id: RequestId, tables: Tables, num_external_tokens: int) -> None:
        """The request was given its blocks, to load ``num_external_tokens`` of the hit into."""
        request = self._requests.get(request_id)
        if request is None:  # another connector's, or never asked about: only fence
            for table in tables:
                self.allocated(table)
                self.fresh.given(table, fresh=False)
            return
        if request.outcome != "hits" or num_external_tokens:
            self._counts[request.outcome] += 1
        if request.outcome == "declined":
            self._worth.saw_decline()
        request.outcome = ""
        request.stale |= self.fresh.begins_old(self.groups, tables, request.num_local_tokens)
        for geometry, table in zip(self.groups, tables, strict=True):
            written = table[request.num_local_tokens // geometry.block_tokens :]
            self._allocated.update(written)
            self.fresh.given(written, fresh=not request.stale)
        if num_external_tokens:
            self._load(request_id, request, tables, num_external_tokens)
        else:
            request.loading = False  # it goes on to compute: a load is complete or discarded
            self._recovery.over(request_id)
            self._admission.over(request_id)
        self._drop_pins(request_id)

    def grew(self, request_id: RequestId, blocks: Sequence[BlockId]) -> None:
        """A running request was given these blocks too; told only while ``fresh`` is watching."""
        request = self._requests.get(request_id)
        self.fresh.given(blocks, fresh=request is not None and not request.stale)

    def _load(
        self, request_id: RequestId, request: TrackedRequest, tables: Tables, num_tokens: int
    ) -> None:
        end = request.num_local_tokens + num_tokens
        parts = [part for part in wanted(self.groups, request, end, tables) if part.keys]
        request.loading = True
        self._admission.began(request_id, request.claim)
        if not all(self._is_readable(part) for part in parts):
            # Fewer tokens were taken than answered, and a window now begins where nothing is
            # stored. The ranks say that the load failed, and what they do not load is computed.
            self._loads.append(refusal(parts, request_id))
            self._recovery.failed(request_id)
            return
        leases = tuple(self.ledger.pin(part.geometry.group, part.keys) for part in parts)
        blocks = [block for part in parts for block in part.blocks]
        job_id = self.jobs.start(Direction.LOAD, leases, request_id, blocks)
        self._load_tokens[job_id] = num_tokens
        self._matcher.load_began((lease.group, key) for lease in leases for key in lease.keys)
        self._loads.append(order_of(job_id, Direction.LOAD, leases, parts, request_id))

    def _is_readable(self, part: Part) -> bool:
        return self.ledger.readable(part.geometry.group, part.keys) == len(part.keys)

    # -- stores -----------------------------------------------------------------------------

    def due(self, request_id: RequestId, num_computed: int) -> bool:
        """Whether the request may have chunks to offer with ``num_computed`` tokens computed."""
        request = self._requests.get(request_id)
        return (
            request is not None
            and num_computed >= request.next_due_tokens
            and not (request.loading or request.stale or self._off)
        )

    def offer(
        self, request_id: RequestId, num_computed: int, tables: Tables, *, finished: bool = False
    ) -> PlannedStore | None:
        """Plan the store of the request's full, hashed chunks that were not offered yet.

        ``finished`` says that the request has ended: all of it was computed before this step, and
        nothing of it is volatile any more. Chunks that are there already are touched. Returns what
        is stored, None when that is nothing.
        """
        if not self.due(request_id, num_computed):
            return None
        request = self._requests[request_id]
        reserved = self._storing.of_request(request, num_computed, tables, finished=finished)
        return self._store(reserved, request_id, self._prior_stores if finished else self._stores)

    def rescue(self, parts: Sequence[Part]) -> PlannedStore | None:
        """Plan a store, of no request, of blocks that are about to be given away.

        They were computed before the step being built. Chunks that are there already are touched,
        and not evicted to make room for the others. None when nothing is stored.
        """
        if self._off:
            return None
        return self._store(self._storing.of_blocks(parts), None, self._prior_stores)

    def _store(
        self, reserved: Reserved, request_id: RequestId | None, orders: list[JobOrder]
    ) -> PlannedStore | None:
        if not reserved:
            return None
        leases = [lease for lease, _ in reserved]
        parts = tuple(part for _, part in reserved)
        blocks = [block for part in parts for block in part.blocks]
        job_id = self.jobs.start(Direction.STORE, tuple(leases), request_id, blocks)
        orders.append(order_of(job_id, Direction.STORE, leases, parts, request_id))
        return PlannedStore(job_id, parts)

    # -- steps ------------------------------------------------------------------------------

    def allocated(self, blocks: Iterable[BlockId]) -> None:
        """These GPU blocks will be written in the step being built, by whomever."""
        self._allocated.update(blocks)

    def build(self, num_scheduled_tokens: int = 0) -> StepOrders:
        """End the step being built, which computes ``num_scheduled_tokens``: its orders."""
        if num_scheduled_tokens:
            self._steps.built(self._clock(), num_scheduled_tokens)
        own = {order.job_id for order in (*self._loads, *self._stores)}
        flush = self.jobs.fenced(self._allocated) - own
        orders = StepOrders(
            flush=tuple(sorted(flush)),
            prior_stores=tuple(self._prior_stores),
            stores=tuple(self._stores),
            loads=tuple(self._loads),
            idle=not num_scheduled_tokens,
        )
        self._prior_stores, self._stores, self._loads = [], [], []
        self._allocated = set()
        self._admission.step_built()
        self.ledger.forget_evicted()
        return orders

    def take(self, reports: StepReports) -> list[Ended]:
        """Take the ranks' reports; returns the jobs that have ended with them."""
        ended = []
        for report in reports.reports:
            # One rank that refuses everything is enough: no job can end well any more.
            self._off = self._off or report.off
            end = self.jobs.report(report)
            if end is None:
                continue
            ended.append(end)
            if end.direction is Direction.LOAD:
                self._matcher.load_ended((group, key) for group, keys in end.chunks for key in keys)
                num_tokens = self._load_tokens.pop(end.job_id)
                if end.error is None:
                    self._worth.saw_load(num_tokens, end.seconds)
                elif end.request_id in self._requests:
                    self._recovery.failed(end.request_id)
            if end.error is not None:
                self._counts[f"failed_{end.direction}s"] += 1
            elif end.direction is Direction.STORE:
                self._counts["stored_chunks"] += end.num_chunks
            else:
                self._counts["loaded_chunks"] += end.num_chunks
        return ended

    def take_changes(self) -> list[Change]:
        """What became readable and stopped being so since the last call, where that is kept."""
        journal = self.ledger.journal
        return journal.take() if journal is not None else []

    def step_ended(self) -> None:
        """The oldest step that computes tokens has run."""
        step = self._steps.ended(self._clock())
        if step is not None:
            self._worth.saw_step(*step)

    def reset(self) -> None:
        """Forget every stored chunk. What live requests have computed is not stored any more."""
        for request_id, request in self._requests.items():
            self._drop_pins(request_id)
            request.stale = True
        self.fresh.reset()
        self.ledger.invalidate_all()

    @property
    def busy(self) -> bool:
        """Whether orders wait for a step, or a rank has yet to answer for a job."""
        return bool(self._prior_stores or self.jobs.num_unanswered)

    def check(self) -> None:
        """Prove the ledger's invariants; KVFerryError (a bug) where one does not hold."""
        self.ledger.check()

    def snapshot(self) -> dict[str, int | float]:
        """Live counts; slots by state first."""
        states = self.ledger.counts()
        counted = ("stored_chunks", "loaded_chunks", "failed_stores", "failed_loads")
        answered = ("hits", "misses", "declined")
        return {
            **{state.name.lower(): states[state] for state in SlotState},
            "leases": self.ledger.num_leases,
            "jobs": self.jobs.num_jobs,
            "fences": self.jobs.num_fences,
            "requests": len(self._requests),
            "evicted_chunks": self.ledger.num_evicted,
            **self._matcher.counts,
            **{name: self._counts[name] for name in (*answered, *counted)},
            "failed_jobs": self._counts["failed_stores"] + self._counts["failed_loads"],
        }

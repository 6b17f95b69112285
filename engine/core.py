"""The scheduling core: what both offload managers do, without a word of vLLM.

It keeps three things: the ledger (what is where), the jobs (what is moving) and, per live request,
where storing stands. A manager asks it to match and load while a step is being built, offers the
requests that the step computes, and ends the step with ``build``, which returns the orders for the
ranks. Reports come back through ``take``.

Two rules hold everywhere:

- GPU blocks are *fenced* from the moment a job is planned until every rank has let go of them. A
  block that is given to somebody else while it is fenced puts its jobs on the step's flush list, so
  it is read (or written) before anything overwrites it. This one rule covers preemption, finish,
  windows and other connectors.
- What a request computed may be stored only while its own cache is sound: not while a load of it is
  in flight, not after a load of it failed, and not after a reset until it has started over.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .errors import KVFerryError
from .jobs import Ended, Jobs
from .ledger import Ledger, ReadLease, WriteLease
from .messages import JobOrder, Segment, StepOrders, StepReports
from .state import SlotState
from .types import (
    NO_BLOCK,
    BlockId,
    Direction,
    GroupId,
    JobId,
    Key,
    RequestId,
    seed_of,
)


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """How one KV cache group is cut: sizes in tokens.

    ``hash_tokens`` is the granularity of the request's block hashes; a chunk's key is the hash of
    its last ``hash_tokens`` tokens, which carries all tokens before them.
    """

    group: GroupId
    block_tokens: int
    blocks_per_chunk: int
    hash_tokens: int

    def __post_init__(self) -> None:
        if min(self.block_tokens, self.blocks_per_chunk, self.hash_tokens) < 1:
            raise ValueError(f"sizes of a group must be at least 1; given {self}")
        if self.block_tokens % self.hash_tokens:
            raise ValueError(
                f"block_tokens must be a multiple of hash_tokens; given {self.block_tokens} and "
                f"{self.hash_tokens} in group {self.group}"
            )

    @property
    def chunk_tokens(self) -> int:
        return self.block_tokens * self.blocks_per_chunk

    def keys(self, hashes: Sequence[bytes], first: int, last: int) -> list[Key]:
        """Keys of the chunks ``first <= i < last``; all of them must be hashed."""
        per_chunk = self.chunk_tokens // self.hash_tokens
        return [Key(h) for h in hashes[(first + 1) * per_chunk - 1 : last * per_chunk : per_chunk]]

    def num_hashed_chunks(self, hashes: Sequence[bytes]) -> int:
        return len(hashes) * self.hash_tokens // self.chunk_tokens


@dataclass(slots=True)
class TrackedRequest:
    """Where one live request stands. ``hashes`` is the request's own list, which grows."""

    hashes: Sequence[bytes]
    num_offered_chunks: int = 0
    """Chunks already offered for storing; storing starts behind them."""
    loading: bool = False
    """A load into its blocks is in flight or has failed, and it has not gone on to compute yet."""
    stale: bool = False
    """Part of what it computed is from before a reset."""


class SchedulingCore:
    """Ledger, jobs and request bookkeeping behind a manager. One thread."""

    def __init__(self, geometry: GroupGeometry, num_slots: int, num_ranks: int) -> None:
        self.geometry = geometry
        self.ledger = Ledger(num_slots)
        self.jobs = Jobs(self.ledger, num_ranks)
        self._requests: dict[RequestId, TrackedRequest] = {}
        self._loads: list[JobOrder] = []
        self._stores: list[JobOrder] = []
        self._prior_stores: list[JobOrder] = []
        self._allocated: set[BlockId] = set()
        self._num_lookups = 0
        self._num_hits = 0
        self._num_stored_chunks = 0
        self._num_loaded_chunks = 0
        self._num_failed_jobs = 0

    # -- requests ---------------------------------------------------------------------------

    def start_over(self, request_id: RequestId, hashes: Sequence[bytes]) -> None:
        """The request starts from nothing (new, or after preemption); so does its bookkeeping."""
        self._requests[request_id] = TrackedRequest(hashes)

    def forget(self, request_id: RequestId) -> None:
        self._requests.pop(request_id, None)

    def resume(self, request_id: RequestId) -> None:
        """The request goes on to compute: whatever was loaded for it is complete or discarded."""
        request = self._requests.get(request_id)
        if request is not None:
            request.loading = False

    # -- loads ------------------------------------------------------------------------------

    def match(self, request_id: RequestId, num_computed: int, num_tokens: int) -> list[Key]:
        """Keys of the readable chunks that follow ``num_computed`` tokens, the last token left out.

        ``num_tokens`` is the request's length; its last token is always computed, as in vLLM's own
        prefix cache, so that there are logits to sample from. Changes nothing but the counters.
        """
        self._num_lookups += 1
        geometry = self.geometry
        if num_computed % geometry.chunk_tokens:
            return []  # a chunk is loaded whole: no start in the middle of one
        hashes = self._requests[request_id].hashes
        first = num_computed // geometry.chunk_tokens
        last = min((num_tokens - 1) // geometry.chunk_tokens, geometry.num_hashed_chunks(hashes))
        if last <= first:
            return []
        keys = geometry.keys(hashes, first, last)
        keys = keys[: self.ledger.readable(geometry.group, keys)]
        self._num_hits += bool(keys)
        return keys

    def load(self, request_id: RequestId, lease: ReadLease, blocks: Sequence[BlockId]) -> JobId:
        """Plan the load of the leased chunks into ``blocks`` (``[num_chunks * blocks_per_chunk]``).

        The job owns the lease from here on.
        """
        job_id = self.jobs.start(Direction.LOAD, (lease,), request_id, _real(blocks))
        self._loads.append(self._order(job_id, Direction.LOAD, lease, blocks, request_id))
        self._requests[request_id].loading = True
        return job_id

    # -- stores -----------------------------------------------------------------------------

    def due(self, request_id: RequestId, num_computed: int) -> int:
        """How many chunks the request could offer once ``num_computed`` tokens are computed."""
        request = self._requests.get(request_id)
        if request is None or request.loading or request.stale:
            return 0
        num_chunks = num_computed // self.geometry.chunk_tokens
        if num_chunks <= request.num_offered_chunks:
            return 0
        num_chunks = min(num_chunks, self.geometry.num_hashed_chunks(request.hashes))
        return num_chunks - request.num_offered_chunks

    def offer(
        self,
        request_id: RequestId,
        num_computed: int,
        blocks: Sequence[BlockId],
        *,
        prior: bool = False,
    ) -> None:
        """Plan the store of the request's full, hashed chunks that were not offered yet.

        ``blocks`` is the request's block table. ``prior`` says that they were computed before this
        step, so the store need not wait for its forward. Chunks that are there already are touched.
        """
        num_due = self.due(request_id, num_computed)
        if not num_due:
            return
        geometry, request = self.geometry, self._requests[request_id]
        first = request.num_offered_chunks
        last = first + num_due
        keys = geometry.keys(request.hashes, first, last)
        size = geometry.blocks_per_chunk
        wanted = {
            keys[i]: blocks[(first + i) * size : (first + i + 1) * size]
            for i in self.ledger.absent(geometry.group, keys)
        }
        wanted = {key: own for key, own in wanted.items() if NO_BLOCK not in own}
        self.ledger.touch(geometry.group, keys)
        lease = self._reserve(request, list(wanted), last)
        num_reserved = len(lease.keys) if lease is not None else 0
        if num_reserved < len(wanted):
            # No slot for this chunk now: it is offered again, since those after it are of no use
            # without it.
            last = first + keys.index(list(wanted)[num_reserved])
        request.num_offered_chunks = last
        if lease is None:
            return
        source = [block for key in lease.keys for block in wanted[key]]
        job_id = self.jobs.start(Direction.STORE, (lease,), request_id, source)
        orders = self._prior_stores if prior else self._stores
        orders.append(self._order(job_id, Direction.STORE, lease, source, request_id))

    def _reserve(self, request: TrackedRequest, keys: list[Key], last: int) -> WriteLease | None:
        """Slots for as many leading ``keys`` as fit, none taken from the request's own prefix."""
        if not keys:
            return None
        group = self.geometry.group
        prefix: list[Key] = []
        if self.ledger.counts()[SlotState.FREE] < len(keys):
            prefix = self.geometry.keys(request.hashes, 0, last)
        return self.ledger.reserve(group, keys, protect=prefix)

    def _order(
        self,
        job_id: JobId,
        direction: Direction,
        lease: ReadLease | WriteLease,
        blocks: Sequence[BlockId],
        request_id: RequestId | None,
    ) -> JobOrder:
        seeds = tuple(seed_of(lease.group, key) for key in lease.keys)
        segment = Segment(lease.group, lease.slots, tuple(blocks), seeds)
        return JobOrder(job_id, direction, (segment,), request_id)

    # -- steps ------------------------------------------------------------------------------

    def allocated(self, blocks: Iterable[BlockId]) -> None:
        """These GPU blocks will be written in the step being built, by whomever."""
        self._allocated.update(blocks)

    def build(self) -> StepOrders:
        """End the step being built: its orders, flush list first."""
        own = {order.job_id for order in self._loads} | {order.job_id for order in self._stores}
        flush = self.jobs.fenced(self._allocated) - own
        orders = StepOrders(
            flush=tuple(sorted(flush)),
            prior_stores=tuple(self._prior_stores),
            stores=tuple(self._stores),
            loads=tuple(self._loads),
        )
        self._prior_stores, self._stores, self._loads = [], [], []
        self._allocated = set()
        return orders

    def take(self, reports: StepReports) -> list[Ended]:
        """Take the ranks' reports; returns the jobs that have ended with them."""
        ended = []
        for report in reports.reports:
            end = self.jobs.report(report)
            if end is None:
                continue
            ended.append(end)
            if end.error is not None:
                self._num_failed_jobs += 1
            elif end.direction is Direction.STORE:
                self._num_stored_chunks += end.num_chunks
            else:
                self._num_loaded_chunks += end.num_chunks
        return ended

    def reset(self) -> None:
        """Forget every stored chunk. What live requests have computed is not stored any more."""
        self.ledger.invalidate_all()
        for request in self._requests.values():
            request.stale = True

    @property
    def busy(self) -> bool:
        """Whether orders wait for a step, or a rank has yet to answer for a job."""
        return bool(self._prior_stores or self.jobs.num_unanswered)

    def check(self) -> None:
        """Prove the ledger's invariants, and that nothing is left over when nothing is going on."""
        self.ledger.check()
        if not self.jobs.num_jobs and self.jobs.num_fences:
            raise KVFerryError(f"{self.jobs.num_fences} fences without a job")

    def snapshot(self) -> dict[str, int | float]:
        counts = self.ledger.counts()
        return {
            **{state.name.lower(): counts[state] for state in SlotState},
            "leases": self.ledger.num_leases,
            "jobs": self.jobs.num_jobs,
            "fences": self.jobs.num_fences,
            "requests": len(self._requests),
            "lookups": self._num_lookups,
            "hits": self._num_hits,
            "stored_chunks": self._num_stored_chunks,
            "loaded_chunks": self._num_loaded_chunks,
            "evicted_chunks": self.ledger.num_evicted,
            "failed_jobs": self._num_failed_jobs,
        }


def _real(blocks: Iterable[BlockId]) -> list[BlockId]:
    return [block for block in blocks if block != NO_BLOCK]

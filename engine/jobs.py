"""Transfers in flight: which leases they hold, which ranks still owe a report, what they fence.

A job goes to every rank. Each rank *answers* it once, with its first report; a rank that gives up
on a hung transfer answers with ``settled=False`` and *settles* later, when the device has let go of
the bytes. From that follow the two moments of a job:

- it **ends** when every rank has answered: whoever waits for it is told, exactly once (``Ended``);
- it **settles** when every rank has settled: only then are its leases closed and its fences taken
  down, since until then a rank may still touch the slots and the GPU blocks.

A failure on one rank is a failure of the job. It invalidates the job's slots at the moment it is
reported, so that nothing can find them from then on, whatever the other ranks still do.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

from .leases import Lease, ReadLease, WriteLease
from .ledger import Ledger
from .messages import JobReport
from .types import NO_BLOCK, BlockId, Direction, GroupId, JobId, Key, Rank, RequestId


@dataclass(frozen=True, slots=True)
class Ended:
    """A job that every rank has answered. ``error`` is the first failure reported, else None.

    ``settled`` is False when a rank gave up while its device may still touch the job's bytes.
    ``chunks`` are the keys that its leases hold or held, by group. ``seconds`` is what the transfer
    took on its device, on the rank where it took longest.
    """

    job_id: JobId
    direction: Direction
    request_id: RequestId | None
    error: str | None
    settled: bool
    chunks: tuple[tuple[GroupId, tuple[Key, ...]], ...]
    seconds: float = 0.0

    @property
    def num_chunks(self) -> int:
        return sum(len(keys) for _, keys in self.chunks)


@dataclass(slots=True)
class _Job:
    direction: Direction
    leases: tuple[Lease, ...]
    request_id: RequestId | None
    blocks: frozenset[BlockId]
    unanswered: set[Rank]
    unsettled: set[Rank]
    error: str | None = field(default=None)
    seconds: float = 0.0


class Jobs:
    """All jobs that are not settled. Job ids increase and are never used again."""

    def __init__(self, ledger: Ledger, num_ranks: int) -> None:
        if num_ranks < 1:
            raise ValueError(f"num_ranks is {num_ranks}; allowed: at least 1")
        self.num_ranks = num_ranks
        self.num_stray_reports = 0
        self._ledger = ledger
        self._next_id = 0
        self._jobs: dict[JobId, _Job] = {}
        self._num_unanswered = 0
        self._fences: dict[BlockId, tuple[JobId, ...]] = {}
        self._loads: dict[RequestId, int] = {}

    def start(
        self,
        direction: Direction,
        leases: tuple[Lease, ...],
        request_id: RequestId | None = None,
        fences: Iterable[BlockId] = (),
    ) -> JobId:
        """Take over ``leases`` for a new job, which fences the GPU blocks ``fences``.

        A store has write leases, a load read leases, at least one; else ``ValueError``.
        ``NO_BLOCK`` among the fences is left out.
        """
        kind = WriteLease if direction is Direction.STORE else ReadLease
        if not leases or not all(isinstance(lease, kind) for lease in leases):
            names = [type(lease).__name__ for lease in leases]
            raise ValueError(
                f"a {direction} has leases {names}; allowed: one or more {kind.__name__}"
            )
        job_id = JobId(self._next_id)
        self._next_id += 1
        blocks = frozenset(fences) - {NO_BLOCK}
        ranks = range(self.num_ranks)
        unanswered, unsettled = set(map(Rank, ranks)), set(map(Rank, ranks))
        self._jobs[job_id] = _Job(direction, leases, request_id, blocks, unanswered, unsettled)
        self._num_unanswered += 1
        shared = blocks & self._fences.keys()
        self._fences.update(dict.fromkeys(blocks - shared, (job_id,)))
        for block in shared:
            self._fences[block] = (*self._fences[block], job_id)
        if direction is Direction.LOAD and request_id is not None:
            self._loads[request_id] = self._loads.get(request_id, 0) + 1
        return job_id

    def report(self, report: JobReport) -> Ended | None:
        """Take one rank's report; returns the job's end when this answer was the last one due.

        A report that nobody waits for (an unknown or settled job or rank, a second give-up) changes
        nothing and is counted in ``num_stray_reports``: a late message must not stop the engine.
        """
        job = self._jobs.get(report.job_id)
        first = job is not None and report.rank in job.unanswered
        settles = job is not None and report.settled and report.rank in job.unsettled
        if job is None or report.direction is not job.direction or not (first or settles):
            self.num_stray_reports += 1
            return None
        if report.error is not None or not report.settled:
            self._fail(job, report)
        job.seconds = max(job.seconds, report.seconds)
        job.unanswered.discard(report.rank)
        if settles:
            job.unsettled.discard(report.rank)
            if not job.unsettled:
                self._settle(report.job_id, job)
        return self._end(report.job_id, job) if first and not job.unanswered else None

    def fenced(self, blocks: Iterable[BlockId]) -> set[JobId]:
        """The jobs that are not settled and fence any of ``blocks``."""
        if not self._fences:
            return set()
        fences = set(map(self._fences.__getitem__, self._fences.keys() & blocks))
        return set(chain.from_iterable(fences))

    def loading(self, request_id: RequestId) -> bool:
        """Whether a load of this request has not been answered by every rank."""
        return request_id in self._loads

    @property
    def next_id(self) -> JobId:
        """The id that the next job will get."""
        return JobId(self._next_id)

    @property
    def oldest_unanswered(self) -> JobId | None:
        """The oldest job that some rank still owes its answer; None when all have ended."""
        return next((job_id for job_id, job in self._jobs.items() if job.unanswered), None)

    @property
    def num_fences(self) -> int:
        """How many GPU blocks are fenced."""
        return len(self._fences)

    @property
    def num_jobs(self) -> int:
        """How many jobs are not settled."""
        return len(self._jobs)

    @property
    def num_unanswered(self) -> int:
        """How many jobs have not ended: some rank still owes its answer."""
        return self._num_unanswered

    def __repr__(self) -> str:
        return (
            f"Jobs(jobs={self.num_jobs} unanswered={self.num_unanswered} fences={self.num_fences} "
            f"strays={self.num_stray_reports})"
        )

    def _fail(self, job: _Job, report: JobReport) -> None:
        if job.error is None:
            reason = report.error or "given up without a reason"
            job.error = f"rank {report.rank}: {reason}"
            for lease in job.leases:
                self._ledger.invalidate(lease.group, lease.slots)

    def _end(self, job_id: JobId, job: _Job) -> Ended:
        self._num_unanswered -= 1
        if job.direction is Direction.LOAD and job.request_id is not None:
            remaining = self._loads[job.request_id] - 1
            if remaining:
                self._loads[job.request_id] = remaining
            else:
                del self._loads[job.request_id]
        chunks = tuple((lease.group, lease.keys) for lease in job.leases)
        return Ended(
            job_id,
            job.direction,
            job.request_id,
            job.error,
            not job.unsettled,
            chunks,
            job.seconds,
        )

    def _settle(self, job_id: JobId, job: _Job) -> None:
        for lease in job.leases:
            if isinstance(lease, ReadLease):
                self._ledger.release(lease)
            elif job.error is None:
                self._ledger.commit(lease)
            else:
                self._ledger.abort(lease)
        alone = (job_id,)
        fences = list(map(self._fences.pop, job.blocks))
        if fences.count(alone) < len(fences):
            for block, holders in zip(job.blocks, fences, strict=True):
                if holders != alone:
                    self._fences[block] = tuple(other for other in holders if other != job_id)
        del self._jobs[job_id]

"""What crosses processes: orders down to every rank, reports back up. Plain data, small.

A job is one transfer in one direction with the same id on every rank. Each rank reports it once
when it ends; a job that missed its deadline is reported as failed at once (``settled=False``) and a
second time when the device has really let go of its bytes (``settled=True``).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from .types import BlockId, Direction, GroupId, JobId, Rank, RequestId, SlotId


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of a job that lies in one KV cache group.

    ``blocks`` is ``[num_chunks * blocks_per_chunk]``, chunk after chunk, with ``NO_BLOCK`` where a
    chunk has no block. ``slots`` and ``seeds`` (checksum seeds, see ``types.seed_of``) are
    ``[num_chunks]``.
    """

    group: GroupId
    slots: tuple[SlotId, ...]
    blocks: tuple[BlockId, ...]
    seeds: tuple[int, ...]

    def __post_init__(self) -> None:
        chunks = len(self.slots)
        if chunks == 0 or len(self.blocks) % chunks or len(self.seeds) != chunks:
            raise ValueError(
                f"segment of group {self.group} has {chunks} slots, {len(self.blocks)} blocks and "
                f"{len(self.seeds)} seeds; allowed: one seed and whole numbers of blocks a slot"
            )


@dataclass(frozen=True, slots=True)
class JobOrder:
    """One job as a rank carries it out. ``request_id`` is None for a lazy store."""

    job_id: JobId
    direction: Direction
    segments: tuple[Segment, ...]
    request_id: RequestId | None = None


@dataclass(frozen=True, slots=True)
class StepOrders:
    """What every rank does in one step.

    Before the forward: submit ``prior_stores`` (their source blocks were computed in earlier
    steps), then make the jobs in ``flush`` finish before anything overwrites their blocks;
    ``flush`` may name jobs of ``prior_stores``. Then ``loads``. After the forward: ``stores``,
    whose source blocks it computes.
    """

    flush: tuple[JobId, ...] = ()
    prior_stores: tuple[JobOrder, ...] = ()
    stores: tuple[JobOrder, ...] = ()
    loads: tuple[JobOrder, ...] = ()
    idle: bool = False
    """Nothing is computed in this step: a rank may as well wait a moment for a transfer to end."""

    @property
    def empty(self) -> bool:
        return not (self.flush or self.prior_stores or self.stores or self.loads)


@dataclass(frozen=True, slots=True)
class JobReport:
    """How one job went on one rank.

    ``error`` is None for a good transfer. ``settled`` is False when the job is given up (deadline)
    while the device may still touch its bytes; a report with ``settled=True`` then follows.
    """

    job_id: JobId
    rank: Rank
    direction: Direction
    error: str | None = None
    settled: bool = True
    num_bytes: int = 0
    seconds: float = 0.0
    strategy: str = ""
    off: bool = False
    """The rank has turned offloading off for good: it will refuse every job from now on."""


@dataclass(frozen=True, slots=True)
class StepReports:
    """The reports of one step, of one rank or (after ``merge``) of several."""

    reports: tuple[JobReport, ...] = field(default=())

    @staticmethod
    def merge(parts: Iterable["StepReports"]) -> "StepReports":
        return StepReports(tuple(report for part in parts for report in part.reports))

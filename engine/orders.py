"""Plans and leases -> the orders that the ranks carry out."""

from collections.abc import Sequence

from .leases import Lease
from .messages import JobOrder, Segment
from .planner import Part
from .types import NO_JOB, Direction, JobId, RequestId, SlotId, seeds_of


def order_of(
    job_id: JobId,
    direction: Direction,
    leases: Sequence[Lease],
    parts: Sequence[Part],
    request_id: RequestId | None,
) -> JobOrder:
    """The order of a job: ``parts[i]`` moves between its blocks and the slots of ``leases[i]``."""
    segments = tuple(
        Segment(
            lease.group,
            lease.slots,
            part.blocks,
            seeds_of(lease.group, lease.keys),
        )
        for lease, part in zip(leases, parts, strict=True)
    )
    return JobOrder(job_id, direction, segments, request_id)


def refusal(parts: Sequence[Part], request_id: RequestId) -> JobOrder:
    """An order to report a load as failed: it has no job, and names only the blocks."""
    segments = tuple(
        Segment(
            part.geometry.group,
            (SlotId(0),) * len(part.keys),
            part.blocks,
            (0,) * len(part.keys),
        )
        for part in parts
    )
    return JobOrder(NO_JOB, Direction.LOAD, segments, request_id)

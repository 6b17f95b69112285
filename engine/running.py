"""One job on this rank, from submit to its last report."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from .devices.base import Device, Lane, Mark, Piece, Ticket
from .errors import IntegrityError, TransferError
from .messages import JobOrder, JobReport
from .ranges import anyone_listens, mark, span
from .strategy import Strategy
from .types import Direction, JobId, Rank, SlotId, key_start

MAX_PLACES: Final = 8
"""As many corrupt chunks as one log line names."""


@dataclass(slots=True, eq=False)
class RunningJob:
    """Pieces, then tickets, then an outcome.

    ``launched`` becomes True once, even when launching failed. ``given_up`` says that the job was
    reported as failed with ``settled=False``. A job is over when it is launched and every ticket
    is done.
    """

    order: JobOrder
    lane: Lane
    pieces: list[Piece]
    deadline_s: float
    num_bytes: int
    launched: bool = False
    given_up: bool = False
    tickets: list[Ticket] = field(default_factory=list)
    error: Exception | None = None
    strategy: str = ""

    @property
    def job_id(self) -> JobId:
        return self.order.job_id

    @property
    def direction(self) -> Direction:
        return self.order.direction

    def launch(self, device: Device, after: Sequence[Mark], strategies: list[Strategy]) -> None:
        """Queue all pieces; a piece that cannot be queued fails the job and cancels the others."""
        self.launched = True
        try:
            for piece, strategy in zip(self.pieces, strategies, strict=True):
                self.strategy = str(strategy)
                with span(
                    "submit",
                    job=self.job_id,
                    direction=self.direction,
                    bytes=piece.num_bytes,
                    strategy=strategy,
                ):
                    self.tickets.append(device.launch(piece, self.lane, after, strategy))
        except Exception as error:
            self.fail(error)
        self.pieces = []

    def fail(self, error: Exception) -> None:
        """The job has failed; what is still queued of it is cancelled. The first error stays."""
        self.error = self.error or error
        for ticket in self.tickets:
            ticket.cancel()

    def notice_errors(self) -> None:
        """Let one failed ticket fail the job before the others are done."""
        if self.error is None:
            for ticket in self.tickets:
                if ticket.done() and (error := ticket.error()) is not None:
                    self.fail(error)
                    return

    def waiting(self) -> list[Ticket]:
        """The tickets that are not done."""
        return [ticket for ticket in self.tickets if not ticket.done()]

    def over(self) -> bool:
        return self.launched and all(ticket.done() for ticket in self.tickets)

    def corrupt_slots(self) -> list[SlotId]:
        return sorted({slot for ticket in self.tickets for slot in ticket.corrupt_slots()})

    def places_of_corrupt(self) -> str:
        """Group, slot and key of the chunks that came out corrupt, the first few."""
        corrupt = set(self.corrupt_slots())
        places = [
            f"group {part.group} slot {slot} key {key_start(part.group, seed)}..."
            for part in self.order.segments
            for slot, seed in zip(part.slots, part.seeds, strict=True)
            if slot in corrupt
        ]
        return ", ".join(places[:MAX_PLACES])

    def report(self, rank: Rank) -> JobReport:
        """The last report of a job that is over."""
        self.notice_errors()  # a ticket may have ended between the last look and this one
        if self.error is None and (corrupt := self.corrupt_slots()):
            self.error = IntegrityError(f"checksums differ in slots {corrupt}")
        return JobReport(
            self.job_id,
            rank,
            self.direction,
            error=None if self.error is None else error_text(self.error),
            num_bytes=self.num_bytes if self.error is None else 0,
            seconds=sum(ticket.seconds() for ticket in self.tickets),
            strategy=self.strategy,
        )


def error_text(error: Exception) -> str:
    """What a report says: always one of our own errors' names first."""
    if isinstance(error, TransferError):
        return f"{type(error).__name__}: {error}"
    return f"TransferError: {type(error).__name__}: {error}"


def told_of(jobs: Sequence[RunningJob]) -> dict[str, Callable[[], object]]:
    """Fields of a range about several jobs, for ``ranges.span``."""
    return {
        "jobs": lambda: ",".join(str(job.job_id) for job in jobs),
        "direction": lambda: "+".join(sorted({job.direction for job in jobs})),
        "bytes": lambda: sum(job.num_bytes for job in jobs),
        "strategy": lambda: "+".join(sorted({job.strategy for job in jobs if job.strategy})),
    }


def tell_ends(reports: Iterable[JobReport]) -> None:
    """A mark ``done`` for every report, for those who listen."""
    if not anyone_listens():
        return
    for report in reports:
        mark(
            "done",
            job=report.job_id,
            rank=report.rank,
            direction=report.direction,
            bytes=report.num_bytes,
            strategy=report.strategy,
            device_s=report.seconds,
            error=report.error,
        )

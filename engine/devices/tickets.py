"""Marks and tickets of a stream device."""

import enum
from dataclasses import dataclass, field
from typing import Protocol

from ..strategy import Strategy
from ..types import SlotId
from .base import Lane, Piece
from .descriptors import Descriptors
from .runtime import Event, Runtime


@dataclass(eq=False, slots=True, weakref_slot=True)
class StreamMark:
    """A point in the compute stream. Its event is used again once nothing refers to the mark."""

    event: Event
    runtime: Runtime

    def done(self) -> bool:
        """False too when the device does not say."""
        try:
            return self.runtime.is_done(self.event)
        except Exception:
            return False


class TicketState(enum.Enum):
    """WAITING on the host, QUEUED on the device, or ENDED."""

    WAITING = enum.auto()
    QUEUED = enum.auto()
    ENDED = enum.auto()


class TicketOwner(Protocol):
    """What a ticket asks of its device."""

    def look_at(self, ticket: "StreamTicket") -> None: ...

    def withdraw(self, ticket: "StreamTicket") -> None: ...


@dataclass(eq=False, slots=True)
class StreamTicket:
    """One piece, with everything it owns on the device. Implements ``Ticket``.

    ``end`` is done when the device has let go of the piece's bytes. A QUEUED ticket without one
    failed so badly that nothing can tell; it never ends.
    """

    owner: TicketOwner
    piece: Piece
    lane: Lane
    after: tuple[StreamMark, ...]
    strategy: Strategy
    made_s: float
    state: TicketState = TicketState.WAITING
    begun: Event | None = None
    end: Event | None = None
    worked_s: float = 0.0
    descriptors: Descriptors | None = None
    pinned: bool = True
    corrupt: tuple[int, ...] = ()
    failure: list[Exception] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return self.piece.num_bytes

    def done(self) -> bool:
        if self.state is not TicketState.ENDED:
            self.owner.look_at(self)
        return self.state is TicketState.ENDED

    def error(self) -> Exception | None:
        return self.failure[0] if self.failure else None

    def seconds(self) -> float:
        return self.worked_s

    def corrupt_slots(self) -> tuple[SlotId, ...]:
        return tuple(SlotId(slot) for slot in self.corrupt)

    def cancel(self) -> None:
        """A piece on the device cannot be called back."""
        self.owner.withdraw(self)

    def fail(self, error: Exception) -> None:
        """The first error is the one that is told."""
        if not self.failure:
            self.failure.append(error)

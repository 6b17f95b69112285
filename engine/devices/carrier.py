"""Takes what one piece needs on its way, queues it, and gives everything back at its end.

What a ticket holds (descriptors in pinned memory, two events) is taken in ``start`` and goes back
to its pool in ``finish``: once its end event is done and not before, since the device reads
descriptors until then.
"""

import logging
from typing import Final

import torch

from ..layout import Layout
from ..strategy import Method
from ..types import Direction, GroupId
from .base import HostMemory, Lane
from .descriptors import describe
from .group import MovedGroup
from .host_checks import HostChecks
from .launches import Launches
from .moves import LaneStreams, Move, Staging
from .pools import BufferPool, EventPool
from .runtime import Event, Priority, Runtime
from .tickets import StreamTicket, TicketState

logger = logging.getLogger(__name__)

STAGING_BYTES: Final = 8 << 20


class Carrier:
    """The lanes of a stream device and the tables of its groups. ``timers`` are for its events."""

    def __init__(self, runtime: Runtime, timers: EventPool, staging_bytes: int) -> None:
        self._runtime = runtime
        self._timers = timers
        self.seams: list[int] = []
        """Where registered pieces of host memory end; the arena's pinning thread adds to it."""
        self._staging_bytes = staging_bytes
        self._buffers = BufferPool(runtime)
        self._groups: dict[GroupId, MovedGroup] = {}
        self._checks: HostChecks | None = None
        self._memory: HostMemory | None = None
        self._lanes = {lane: self._open_lane(lane) for lane in Lane}

    @property
    def num_taken(self) -> int:
        """Buffers that are out."""
        return self._buffers.num_taken

    @property
    def can_pack(self) -> bool:
        """Whether packing is worth asking for; a group may turn out too large for the staging."""
        return self._staging_bytes > 0

    def attach(self, layout: Layout, memory: HostMemory) -> None:
        """Build the tables; allocate the staging buffers while the GPU still has room."""
        self._memory = memory
        self._checks = HostChecks(memory)
        for group in layout.groups:
            self._groups[group.group] = MovedGroup(group, memory, self._runtime.device, self.seams)
        for lane in (Lane.LOADS, Lane.STORES):
            self._lanes[lane].stagings = self._make_stagings()

    def start(self, ticket: StreamTicket) -> None:
        """Queue a piece. Raises only when nothing of it was queued; it then owns nothing."""
        assert self._memory is not None
        ticket.pinned = self._memory.is_pinned(ticket.piece.slots)
        lane = self._lanes[ticket.lane]
        touched = False
        try:
            move = self._move(ticket, lane)
            try:
                last = move.queue(self._method(ticket, lane))
            finally:
                touched = move.touched
            ticket.end = self._timers.take()
            self._runtime.record(ticket.end, last)
        except Exception as error:
            if not touched:
                self._release(ticket)
                raise
            ticket.fail(error)
            if ticket.end is not None:
                self._timers.give_back(ticket.end)
                ticket.end = None
            self.end_late(ticket)
        ticket.state = TicketState.QUEUED
        ticket.after = ()

    def end_late(self, ticket: StreamTicket) -> None:
        """A piece was queued in part: it has ended when both streams of its lane pass this point.

        Where even that fails, the ticket stays without an end: try again at the next look.
        """
        lane = self._lanes[ticket.lane]
        taken: list[Event] = []
        try:
            taken += [self._timers.take()]
            taken += [self._timers.take()]
            joined, end = taken
            self._runtime.record(joined, lane.kernels)
            self._runtime.wait(lane.copies, joined)
            self._runtime.record(end, lane.copies)
            ticket.end = taken.pop()
        except Exception as error:
            logger.error("job %d: nothing tells when it ends (%s)", ticket.piece.job_id, error)
        for event in taken:
            self._timers.give_back(event)

    def finish(self, ticket: StreamTicket) -> None:
        """The device has let go of a piece."""
        piece = ticket.piece
        if ticket.error() is None and ticket.begun is not None and ticket.end is not None:
            ticket.worked_s = self._elapsed_s(ticket.begun, ticket.end)
            if piece.any_checked:
                try:
                    self._conclude_checks(ticket)
                except Exception as error:  # not checked is not good
                    ticket.fail(error)
        self._release(ticket)
        ticket.state = TicketState.ENDED

    def close(self) -> None:
        self._lanes = {}
        self._groups = {}
        self._memory = self._checks = None

    def _elapsed_s(self, begun: Event, end: Event) -> float:
        try:
            return self._runtime.elapsed_s(begun, end)
        except Exception as error:
            logger.debug("a piece could not be timed: %s", error)
            return 0.0

    def _open_lane(self, lane: Lane) -> LaneStreams:
        priority = Priority.LOW if lane is Lane.STORES else Priority.HIGH
        name = lane.name.lower()
        return LaneStreams(
            self._runtime.create_stream(f"{name}:kernels", priority),
            self._runtime.create_stream(f"{name}:copies", priority),
        )

    def _make_stagings(self) -> tuple[Staging, ...]:
        """Two buffers, or none where a block does not fit or the GPU has no room for them."""
        largest = max(group.block_bytes for group in self._groups.values())
        if largest > self._staging_bytes:
            return ()
        try:
            buffers = [self._runtime.allocate(self._staging_bytes) for _ in range(2)]
        except (RuntimeError, MemoryError) as error:
            logger.warning("no room for staging buffers (%s): nothing will be packed", error)
            return ()
        make = self._runtime.create_event
        return tuple(Staging(buffer, make(), make()) for buffer in buffers)

    def _move(self, ticket: StreamTicket, lane: LaneStreams) -> Move:
        """Take what the ticket will own, and describe the way of its piece."""
        piece, group = ticket.piece, self._groups[ticket.piece.group]
        if piece.any_checked and not ticket.pinned and piece.direction is Direction.LOAD:
            assert self._checks is not None
            ticket.corrupt = self._checks.find_corrupt(piece, group)
        ticket.descriptors = describe(piece, self._buffers, self._runtime)
        ticket.begun = self._timers.take()
        name = f"{piece.direction} {piece.job_id}"
        return Move(
            self._runtime,
            lane,
            group,
            ticket.descriptors,
            Launches(name, group, ticket.descriptors, ticket.strategy.width),
            piece.direction,
            [mark.event for mark in ticket.after],
            ticket.begun,
            piece.job_id,
            ticket.strategy,
            ticket.pinned,
        )

    def _method(self, ticket: StreamTicket, lane: LaneStreams) -> Method:
        """What was asked for, or what comes next to it where that cannot be done."""
        method = ticket.strategy.method
        if method is Method.ZERO_COPY and not ticket.pinned:
            method = Method.PACKED
        if method is Method.PACKED and not lane.stagings:
            method = Method.ZERO_COPY if ticket.pinned else Method.COPY_ENGINE
        return method

    def _conclude_checks(self, ticket: StreamTicket) -> None:
        """Read what the kernels found, or do on the host what they could not reach."""
        piece, group = ticket.piece, self._groups[ticket.piece.group]
        if not ticket.pinned:
            if piece.direction is Direction.STORE and self._checks is not None:
                self._checks.write(piece, group)
        elif piece.direction is Direction.LOAD and ticket.descriptors is not None:
            flags = self._runtime.read_host(ticket.descriptors.flags)
            slots = torch.from_numpy(ticket.descriptors.places.slots)
            ticket.corrupt = tuple(torch.unique(slots[flags != 0]).tolist())

    def _release(self, ticket: StreamTicket) -> None:
        """Give back what the ticket owns."""
        if ticket.descriptors is not None:
            self._buffers.give_back(ticket.descriptors.buffer)
        for event in (ticket.begun, ticket.end):
            if event is not None:
                self._timers.give_back(event)
        ticket.descriptors = ticket.begun = ticket.end = None
        ticket.after = ()

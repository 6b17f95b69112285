"""The device for GPUs: lanes of streams, and waits on them instead of waits of the host.

Everything it asks of the GPU goes through a ``Runtime``, so the same code runs on CUDA and on the
simulator. The host never waits here, except where it is asked to (``wait``, ``close``).

A ticket owns its descriptors and its end event until that event is done; only then does the engine
use slots and blocks again, and only then do its buffers go back to their pools.

Stores give way: while loads are on their way a store stays on the host, until the loads have
ended, or it has waited ``give_way_s``, or a flush names it. Traffic in both directions slows loads
down, and the priority of a stream means nothing to a copy engine. (A wait of the store's stream for
the loads would do the same, but would let a load that hangs take the stores and every flush with
it.)
"""

import logging
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Final

import torch

from ..errors import TransferError
from ..layout import Layout
from ..strategy import Method, Strategy
from ..types import Direction
from .base import HostMemory, Lane, Mark, Piece, Ticket
from .carrier import STAGING_BYTES, Carrier
from .pools import EventPool
from .runtime import Event, Runtime
from .tickets import StreamMark, StreamTicket, TicketState

logger = logging.getLogger(__name__)

GIVE_WAY_S: Final = 0.005
MAX_HOLD_TIMES: Final = 1024


_still_running: list["StreamDevice"] = []
"""Closed with work that never ended: what they hold must not be given to anyone else."""


def open_cuda(device: torch.device) -> "StreamDevice":
    """The device for one GPU. Raises ValueError for anything that is not one."""
    from .cuda_runtime import CudaRuntime  # asks for a driver, which a machine need not have

    return StreamDevice(CudaRuntime(device))


class StreamDevice:
    """See the module docstring. Implements ``Device``.

    ``staging_bytes`` is the size of each of the four staging buffers, two for loads and two for
    stores; with 0 nothing is packed.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        staging_bytes: int = STAGING_BYTES,
        give_way_s: float = GIVE_WAY_S,
    ) -> None:
        self._runtime = runtime
        self._give_way_s = give_way_s
        self._marks = EventPool(runtime)
        self._timers = EventPool(runtime, timed=True)
        self._carrier = Carrier(runtime, self._timers, staging_bytes)
        self._live: dict[StreamTicket, None] = {}
        self._waiting: dict[StreamTicket, None] = {}
        self._holds: deque[tuple[Event, Event]] = deque()
        self._hold_times_s: deque[float] = deque(maxlen=MAX_HOLD_TIMES)
        self._closed = False

    # What the arena needs

    @property
    def can_pin(self) -> bool:
        return True

    @property
    def numa_node(self) -> int | None:
        return self._runtime.numa_node

    def register(self, address: int, num_bytes: int) -> None:
        try:
            self._runtime.register(address, num_bytes)
        except Exception as error:
            raise TransferError(f"registering {num_bytes} bytes at {address:#x} failed") from error
        self._carrier.seams.append(address + num_bytes)

    def unregister(self, address: int) -> None:
        try:
            self._runtime.unregister(address)
        except Exception as error:
            raise TransferError(f"unregistering the memory at {address:#x} failed") from error

    # What the engine needs

    @property
    def identity(self) -> str:
        return self._runtime.identity

    @property
    def num_taken(self) -> int:
        """Events and buffers that are out; 0 when idle and no mark is kept."""
        return self._marks.num_taken + self._timers.num_taken + self._carrier.num_taken

    def attach(self, layout: Layout, memory: HostMemory) -> None:
        self._carrier.attach(layout, memory)

    def strategies(self, direction: Direction) -> Sequence[Strategy]:
        packed = (Strategy(Method.PACKED),) if self._carrier.can_pack else ()
        direct = (Strategy(Method.ZERO_COPY), Strategy(Method.COPY_ENGINE))
        return (*packed, *direct) if direction is Direction.STORE else (*direct, *packed)

    def mark_compute(self) -> Mark:
        event = self._marks.take()
        try:
            self._runtime.record(event, self._runtime.compute_stream())
        except Exception:
            self._marks.give_back(event)
            raise
        mark = StreamMark(event, self._runtime)
        weakref.finalize(mark, self._marks.give_back, event).atexit = False
        return mark

    def launch(self, piece: Piece, lane: Lane, after: Sequence[Mark], strategy: Strategy) -> Ticket:
        if self._closed:
            raise TransferError("the device is closed")
        marks = []
        for mark in after:
            assert isinstance(mark, StreamMark)
            marks.append(mark)
        ticket = StreamTicket(self, piece, lane, tuple(marks), strategy, self._runtime.now_s())
        self._start_waiting()
        if lane is Lane.STORES and self._loads_in_flight():
            self._waiting[ticket] = None
        else:
            self._start(ticket)
        return ticket

    def hold_compute(self, tickets: Sequence[Ticket], timeout_s: float) -> bool:
        live = self._started(tickets)
        if not live:
            return True
        self._end_holds()
        compute = self._runtime.compute_stream()
        begun, ended = self._timers.take(), self._timers.take()
        try:
            self._runtime.record(begun, compute)
            for ticket in live:
                if ticket.end is not None:
                    self._runtime.wait(compute, ticket.end)
            self._runtime.record(ended, compute)
        except Exception as error:
            logger.warning("compute cannot wait on its stream (%s): the host does", error)
            self._timers.give_back(begun)
            self._timers.give_back(ended)
            begun_s = self._runtime.now_s()
            held = self.wait(live, timeout_s)
            self._hold_times_s.append(self._runtime.now_s() - begun_s)
            return held
        self._holds.append((begun, ended))
        # A piece without an end failed half-way: nothing on the device says when it is over.
        return all(ticket.end is not None for ticket in live)

    def wait(self, tickets: Sequence[Ticket], timeout_s: float) -> bool:
        deadline_s = self._runtime.now_s() + timeout_s
        all_ended = True
        for ticket in self._started(tickets):
            # A piece without an end failed half-way: wait for the others all the same.
            if ticket.end is None or not self._wait_for(ticket, ticket.end, deadline_s):
                all_ended = False
            else:
                self._finish(ticket)
        return all_ended

    def take_hold_times_s(self) -> list[float]:
        self._end_holds()
        times, self._hold_times_s = list(self._hold_times_s), deque(maxlen=MAX_HOLD_TIMES)
        return times

    def close(self, timeout_s: float) -> bool:
        self._closed = True
        for ticket in list(self._waiting):
            self.withdraw(ticket)
        if not self.wait(list(self._live), timeout_s):
            logger.error("%d transfers did not end: their memory is kept", len(self._live))
            if self not in _still_running:
                _still_running.append(self)
            return False
        self._end_holds()
        if self in _still_running:
            _still_running.remove(self)
        self._carrier.close()
        self._runtime.close()
        return True

    # What tickets need

    def look_at(self, ticket: StreamTicket) -> None:
        """Look whether a piece has ended, or whether a store has given way long enough."""
        if ticket.state is TicketState.WAITING:
            self._start_waiting()
        elif ticket.end is None:
            self._carrier.end_late(ticket)
        else:
            try:
                ended = self._runtime.is_done(ticket.end)
            except Exception as error:
                # An error is no word that the device has let go: only a later look can tell.
                self._fail_lane(ticket.lane, error)
                ended = False
            if ended:
                self._finish(ticket)

    def withdraw(self, ticket: StreamTicket) -> None:
        """Give up a store that is still giving way."""
        if ticket in self._waiting:
            del self._waiting[ticket]
            ticket.fail(TransferError("cancelled before it began"))
            ticket.state = TicketState.ENDED

    # Inside

    def _start(self, ticket: StreamTicket) -> None:
        self._carrier.start(ticket)
        self._live[ticket] = None

    def _wait_for(self, ticket: StreamTicket, end: Event, deadline_s: float) -> bool:
        """A wait that raises twice will go on to do so."""
        for _ in range(2):
            try:
                left_s = max(0.0, deadline_s - self._runtime.now_s())
                return self._runtime.wait_on_host(end, left_s)
            except Exception as error:
                self._fail_lane(ticket.lane, error)
        return False

    def _fail_lane(self, lane: Lane, error: Exception) -> None:
        """Any work of the lane may be what failed: an error comes with the first look past it."""
        for ticket in self._live:
            if ticket.lane is lane:
                ticket.fail(error)

    def _loads_in_flight(self) -> bool:
        loads = [ticket for ticket in self._live if ticket.lane is not Lane.STORES]
        return any(not ticket.done() for ticket in loads)

    def _start_waiting(self) -> None:
        if not self._waiting:
            return
        loading, now_s = self._loads_in_flight(), self._runtime.now_s()
        for ticket in list(self._waiting):
            if not loading or now_s - ticket.made_s >= self._give_way_s:
                self._start_late(ticket)

    def _start_late(self, ticket: StreamTicket) -> None:
        """Nobody is there to catch it: what launching raises is the ticket's error."""
        del self._waiting[ticket]
        try:
            self._start(ticket)
        except Exception as error:
            ticket.fail(error)
            ticket.state = TicketState.ENDED

    def _started(self, tickets: Sequence[Ticket]) -> list[StreamTicket]:
        """Those of the tickets that are on the device and not known to have ended."""
        live: list[StreamTicket] = []
        for ticket in tickets:
            assert isinstance(ticket, StreamTicket)
            if ticket.state is TicketState.WAITING:
                self._start_late(ticket)
            if ticket.state is TicketState.QUEUED and not ticket.done():
                live.append(ticket)
        return live

    def _is_done(self, event: Event) -> bool:
        try:
            return self._runtime.is_done(event)
        except Exception:
            return True  # whose error it is, its own ticket finds out

    def _end_holds(self) -> None:
        """Time the holds that are over: they end in the order of the compute stream."""
        while self._holds and self._is_done(self._holds[0][1]):
            begun, ended = self._holds.popleft()
            try:
                self._hold_times_s.append(self._runtime.elapsed_s(begun, ended))
            except Exception as error:
                logger.debug("a hold could not be timed: %s", error)
            self._timers.give_back(begun)
            self._timers.give_back(ended)

    def _finish(self, ticket: StreamTicket) -> None:
        del self._live[ticket]
        self._carrier.finish(ticket)

"""The CPU device: worker threads as streams.

Compute is in program order here: what was queued before a call is complete when the call is made,
so a mark is always done, and holding compute is a wait of the host.

A launched piece is a ``CpuTicket`` in one list, ordered by lane and age. Each worker takes the next
range of entries (a few MiB) of the first ticket that wants another thread, so loads overtake stores
between two ranges, and a flushed store overtakes everything. All fields of tickets and of the list
are guarded by one lock, which two conditions share: workers wait for work, callers for a ticket to
end. Bytes are moved outside it.
"""

import logging
import os
import platform
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from ..errors import EngineClosed, TransferError
from ..layout import Layout
from ..strategy import Method, Strategy
from ..types import Direction, GroupId, SlotId
from .base import HostMemory, Lane, Mark, Piece, Ticket
from .copying import GroupCopier, load_compiled
from .llvm_names import answer_no_special_names

logger = logging.getLogger(__name__)

RANGE_BYTES: Final = 2 << 20
"""What a worker moves before it looks up again: about 0.3 ms of copying."""


class CpuMark:
    """Compute has always passed it."""

    def done(self) -> bool:
        return True


@dataclass(slots=True, eq=False)
class CpuTicket:
    """One launched piece. Guarded by the device's lock; ``finished`` says that it is over."""

    piece: Piece
    urgency: tuple[int, int]
    strategy: Strategy
    entries_per_range: int
    width: int
    work: threading.Condition
    next_entry: int = 0
    num_active: int = 0
    begun_s: float = 0.0
    ended_s: float = 0.0
    cancelled: bool = False
    failure: Exception | None = None
    corrupt: set[int] = field(default_factory=set)
    finished: bool = False

    @property
    def num_bytes(self) -> int:
        return self.piece.num_bytes

    def done(self) -> bool:
        return self.finished

    def error(self) -> Exception | None:
        return self.failure

    def seconds(self) -> float:
        return self.ended_s - self.begun_s

    def corrupt_slots(self) -> tuple[SlotId, ...]:
        return tuple(SlotId(slot) for slot in sorted(self.corrupt))

    def cancel(self) -> None:
        with self.work:
            if not self.finished and not self.cancelled:
                self.cancelled = True
                self.failure = self.failure or TransferError("the transfer was cancelled")
                self.work.notify_all()

    def wants_worker(self) -> bool:
        """Whether a worker could take a range, or end a ticket that has none left."""
        left = not self.cancelled and self.next_entry < len(self.piece.blocks)
        return self.num_active < self.width if left else self.num_active == 0


class CpuDevice:
    """Moves pieces with ``num_threads`` threads; see the module docstring."""

    can_pin: Final = False
    numa_node: Final = None

    def __init__(self, num_threads: int | None = None) -> None:
        """``num_threads`` is by default one or two, as the machine has cores."""
        if num_threads is not None and not 1 <= num_threads <= 64:
            raise ValueError(f"num_threads is {num_threads}; allowed: 1 to 64")
        self.num_threads: Final = num_threads or min(2, os.cpu_count() or 1)
        self._compiled = load_compiled()
        if self._compiled is not None:
            answer_no_special_names()
        self._copiers: dict[GroupId, GroupCopier] = {}
        self._moved: tuple[object, ...] = ()  # keeps alive what the copiers know by address
        lock = threading.Lock()
        self._work = threading.Condition(lock)
        self._ended = threading.Condition(lock)
        self._queue: list[CpuTicket] = []
        self._num_launched = 0
        self._stopping = False
        self._hold_times_s: list[float] = []
        self._threads = [
            threading.Thread(target=self._run, name=f"kvferry-copy-{number}", daemon=True)
            for number in range(self.num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def identity(self) -> str:
        compiled = "compiled" if self._compiled else "interpreted"
        return f"{cpu_model()}, {os.cpu_count()} cores, {self.num_threads} threads, {compiled}"

    def attach(self, layout: Layout, memory: HostMemory) -> None:
        if self._copiers:
            raise ValueError("the device is attached already; allowed: once")
        self._moved = (layout, memory)
        self._copiers = {
            group.group: GroupCopier(group, memory, self._compiled) for group in layout.groups
        }

    def strategies(self, direction: Direction) -> Sequence[Strategy]:
        """Loads are waited for and take all threads; stores leave the cores to the model."""
        method = Method.COMPILED if self._compiled else Method.INTERPRETED
        widths = range(1, self.num_threads + 1)
        return [
            Strategy(method, width)
            for width in (reversed(widths) if direction is Direction.LOAD else widths)
        ]

    def mark_compute(self) -> CpuMark:
        return CpuMark()

    def launch(self, piece: Piece, lane: Lane, after: Sequence[Mark], strategy: Strategy) -> Ticket:
        if piece.group not in self._copiers:
            raise ValueError(f"group {piece.group}; attached: {sorted(self._copiers)}")
        count = len(piece.blocks)
        width = min(strategy.width or self.num_threads, self.num_threads)
        range_entries = max(1, RANGE_BYTES * count // max(1, piece.num_bytes))
        with self._work:
            if self._stopping:
                raise EngineClosed("the CPU device is closed")
            self._num_launched += 1
            ticket = CpuTicket(
                piece,
                (lane, self._num_launched),
                strategy,
                min(range_entries, max(1, -(-count // width))),
                width,
                self._work,
            )
            self._queue.append(ticket)
            self._queue.sort(key=lambda queued: queued.urgency)
            self._work.notify_all()
        return ticket

    def hold_compute(self, tickets: Sequence[Ticket], timeout_s: float) -> bool:
        begun = time.perf_counter()
        with self._work:
            for ticket in tickets:
                if isinstance(ticket, CpuTicket):
                    ticket.urgency = (-1, ticket.urgency[1])
            self._queue.sort(key=lambda queued: queued.urgency)
        finished = self.wait(tickets, timeout_s)
        self._hold_times_s.append(time.perf_counter() - begun)
        return finished

    def wait(self, tickets: Sequence[Ticket], timeout_s: float) -> bool:
        with self._ended:
            return self._ended.wait_for(
                lambda: all(ticket.done() for ticket in tickets), max(0.0, timeout_s)
            )

    def take_hold_times_s(self) -> list[float]:
        taken, self._hold_times_s = self._hold_times_s, []
        return taken

    def register(self, address: int, num_bytes: int) -> None:
        raise TransferError("the CPU device pins nothing")

    def unregister(self, address: int) -> None:
        raise TransferError("the CPU device pins nothing")

    def close(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        with self._work:
            self._stopping = True
            queued = list(self._queue)
        for ticket in queued:
            ticket.cancel()
        with self._work:
            self._work.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _move(self, piece: Piece, begin: int, end: int, strategy: Strategy) -> list[int]:
        """Move entries ``[begin, end)``; returns the indices of corrupt ones."""
        return self._copiers[piece.group].move(piece, begin, end, strategy.method)

    def _run(self) -> None:
        """A worker's life: take a range, move it, say so; ends when nothing is left to end."""
        while True:
            with self._work:
                self._work.wait_for(lambda: self._next() is not None or self._ready_to_stop())
                ticket = self._next()
                if ticket is None:
                    return
                begin = ticket.next_entry
                end = min(begin + ticket.entries_per_range, len(ticket.piece.blocks))
                if ticket.cancelled:
                    end = begin
                ticket.next_entry = end
                ticket.num_active += 1
                ticket.begun_s = ticket.begun_s or time.perf_counter()
            failure: Exception | None = None
            corrupt: list[int] = []
            try:
                if end > begin:
                    corrupt = self._move(ticket.piece, begin, end, ticket.strategy)
            except Exception as error:
                failure = error
            self._settle(ticket, corrupt, failure)

    def _settle(self, ticket: CpuTicket, corrupt: list[int], failure: Exception | None) -> None:
        with self._work:
            ticket.num_active -= 1
            ticket.corrupt.update(int(slot) for slot in ticket.piece.slots[np.array(corrupt, int)])
            if failure is not None:
                ticket.failure = ticket.failure or failure
                ticket.cancelled = True
            over = ticket.cancelled or ticket.next_entry >= len(ticket.piece.blocks)
            if over and ticket.num_active == 0:
                ticket.ended_s = time.perf_counter()
                ticket.finished = True
                self._queue.remove(ticket)
                self._ended.notify_all()
            if self._stopping:
                self._work.notify_all()

    def _next(self) -> CpuTicket | None:
        return next((ticket for ticket in self._queue if ticket.wants_worker()), None)

    def _ready_to_stop(self) -> bool:
        return self._stopping and not self._queue


def cpu_model() -> str:
    """The processor's name where the system says it, else its architecture."""
    try:
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.machine()

"""What the transfer engine asks of a device.

A device moves *pieces*: parts of a job in one KV cache group, each small enough (32 MiB unless set
otherwise) that a flush never waits long for one. It knows three lanes and one foreign order of
execution, *compute* (vLLM's stream on CUDA, program order on the CPU). The engine ties the two
together with marks and tickets only:

- a ``Mark`` is a point in compute's order. A piece launched ``after`` a mark touches its blocks
  only when everything queued for compute before the mark is complete (I1, I4).
- a ``Ticket`` is one launched piece. ``hold_compute(tickets)`` makes everything queued for compute
  afterwards wait for them (a flush).

A device owns what a piece needs (descriptors, staging buffers, events) until the piece is done.
All methods are called by one thread, the engine's; ``register`` and ``unregister`` also by the
arena's pinning thread.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ..layout import Layout
from ..strategy import Strategy
from ..types import Direction, GroupId, JobId, SlotId

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


class Lane(enum.IntEnum):
    """Where a piece queues; a smaller number goes first where two lanes want the same thing.

    Pieces of one lane may run at once and end in any order. Stores give way while loads run.
    """

    EXPEDITED = 0
    LOADS = 1
    STORES = 2


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A part of one job in one group. Arrays: ``[num_entries]``, C-contiguous, never written.

    Entry ``i`` moves block ``blocks[i]`` from or to position ``positions[i]`` of slot ``slots[i]``.
    ``seeds`` are the chunks' checksum seeds; where ``checked`` is set a store writes the entry's
    checksums and a load verifies them. ``num_bytes`` counts one direction once.
    """

    job_id: JobId
    direction: Direction
    group: GroupId
    blocks: Ints
    slots: Ints
    positions: Ints
    seeds: Ints
    checked: Flags
    any_checked: bool
    num_bytes: int


class Mark(Protocol):
    """A point in compute's order; made by one device, meaningful to it alone."""

    def done(self) -> bool:
        """True once compute has passed it. Never waits."""
        ...


class Ticket(Protocol):
    """One launched piece."""

    @property
    def num_bytes(self) -> int: ...

    def done(self) -> bool:
        """True once the device touches none of the piece's bytes any more. Never waits."""
        ...

    def error(self) -> Exception | None:
        """What went wrong, once ``done``; None for a good transfer."""
        ...

    def seconds(self) -> float:
        """Once ``done``: how long the device worked on it, as near as it can tell."""
        ...

    def corrupt_slots(self) -> tuple[SlotId, ...]:
        """Once ``done``: the slots of checked entries whose bytes did not match, sorted."""
        ...

    def cancel(self) -> None:
        """Stop as early as possible; ``done`` still says when. No effect on a finished piece."""
        ...


class HostMemory(Protocol):
    """The host side as a device sees it; ``Arena`` is the one implementation.

    ``slots`` is uint8 ``[num_slots * slot_stride_bytes]`` and ``checksums`` int64
    ``[num_slots * checksum_stride_bytes / 8]`` (empty with integrity off). In both, slot ``s``
    starts at ``s * stride``. The checksums of slot ``s`` in a group of ``num_fragments`` fragments
    are ``[blocks_per_chunk, num_fragments]``, C order, at the start of the slot's stride.
    """

    @property
    def slots(self) -> torch.Tensor: ...

    @property
    def checksums(self) -> torch.Tensor: ...

    @property
    def num_slots(self) -> int: ...

    @property
    def slot_stride_bytes(self) -> int: ...

    @property
    def checksum_stride_bytes(self) -> int: ...

    def is_pinned(self, slots: Ints) -> bool:
        """True when all of these slots lie in memory that is pinned now (it never gets less)."""
        ...

    def wait_until_pinned(self, slots: Ints, timeout_s: float) -> bool:
        """Let the host wait for that; False when it has not come true, or never will."""
        ...


class Registrar(Protocol):
    """The part of a device that the arena needs. Called from the arena's pinning thread too."""

    @property
    def can_pin(self) -> bool:
        """Whether registering host memory means anything here."""
        ...

    @property
    def numa_node(self) -> int | None:
        """The NUMA node that host memory should come from; None when it cannot be told."""
        ...

    def register(self, address: int, num_bytes: int) -> None:
        """Pin host memory. Raises ``TransferError``, with no error left behind on the device."""
        ...

    def unregister(self, address: int) -> None:
        """Undo ``register`` of a range that starts here. Raises ``TransferError``."""
        ...


class Device(Registrar, Protocol):
    """Moves pieces between GPU blocks and host slots; see the module docstring."""

    @property
    def identity(self) -> str:
        """Names device, driver and version, for caching what was measured on it."""
        ...

    def attach(self, layout: Layout, memory: HostMemory) -> None:
        """Tell the device what it moves; once, by the engine, before the first launch."""
        ...

    def strategies(self, direction: Direction) -> Sequence[Strategy]:
        """What ``launch`` accepts here, best guess first; ``strategy.py`` measures them."""
        ...

    def mark_compute(self) -> Mark:
        """Everything that is queued for compute by now."""
        ...

    def launch(self, piece: Piece, lane: Lane, after: Sequence[Mark], strategy: Strategy) -> Ticket:
        """Queue a piece and return at once.

        Raises whatever the device raises when it cannot be queued (nothing then stays queued).
        """
        ...

    def hold_compute(self, tickets: Sequence[Ticket], timeout_s: float) -> bool:
        """Let nothing queued for compute from now on run before these are done.

        A stream wait on CUDA (returns True at once), a wait of the host on the CPU. False when a
        host wait ended without them: the engine then gives the jobs up.
        """
        ...

    def wait(self, tickets: Sequence[Ticket], timeout_s: float) -> bool:
        """Let the host wait for these; False when the time was up first."""
        ...

    def take_hold_times_s(self) -> list[float]:
        """How long compute stood still in each ``hold_compute`` ended since last asked."""
        ...

    def close(self, timeout_s: float) -> bool:
        """Stop and free everything; can be repeated. False when something is still running."""
        ...

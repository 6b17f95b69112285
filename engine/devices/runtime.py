"""What ``cuda.py`` asks of a GPU runtime: streams, events, waits, memory, copies, launches.

There are two: ``cuda_runtime.py`` passes everything on to CUDA, ``simulated.py`` orders the same
calls on the simulator, moves real bytes in plain memory and looks for races. What is not in here
the device cannot do, so what holds on the simulator holds for the calls made on a GPU.

Streams and events are opaque: made by one runtime, handed back to it. An event stands for what its
stream held when it was recorded last; a wait takes it as it is at the time of the call, so an event
may be recorded again once nobody will wait for its old meaning any more.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from .byte_ranges import NOTHING, ByteRanges

Ints = NDArray[np.int64]


class Stream(Protocol):
    """A queue on the device."""


class Event(Protocol):
    """A point in a stream."""


class Priority(enum.IntEnum):
    """Whose kernels go first when both could."""

    LOW = 0
    HIGH = 1


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """A batch of plain copies, in any order among themselves.

    ``targets``, ``sources`` and ``sizes`` are ``[num_copies]``: addresses and bytes. ``to_host``
    tells the direction, ``pinned`` whether all of the host side is pinned.
    """

    name: str
    targets: Ints
    sources: Ints
    sizes: Ints
    to_host: bool
    pinned: bool


@dataclass(frozen=True, slots=True, eq=False)
class Accesses:
    """What a kernel touches."""

    reads: ByteRanges = NOTHING
    writes: ByteRanges = NOTHING


@dataclass(frozen=True, slots=True, eq=False)
class KernelLaunch:
    """A kernel with its arguments bound.

    ``run`` launches it on the current stream; ``reference`` does the same to the same memory in
    plain PyTorch; ``accesses`` says which bytes it touches (asked for by the simulator alone).
    """

    name: str
    run: Callable[[], None]
    reference: Callable[[], None]
    accesses: Callable[[], Accesses]


class Runtime(Protocol):
    """See the module docstring. Every call may raise what the device raises."""

    @property
    def identity(self) -> str:
        """Device, driver and version."""
        ...

    @property
    def device(self) -> torch.device:
        """Where tables and staging buffers live."""
        ...

    @property
    def numa_node(self) -> int | None:
        """Of the device; None when it cannot be told."""
        ...

    def now_s(self) -> float: ...

    def compute_stream(self) -> Stream:
        """The stream on which the model's work is queued at this moment."""
        ...

    def create_stream(self, name: str, priority: Priority) -> Stream: ...

    def create_event(self, *, timed: bool = False) -> Event:
        """``timed``: good for ``elapsed_s``, and a little dearer."""
        ...

    def record(self, event: Event, stream: Stream) -> None: ...

    def wait(self, stream: Stream, event: Event) -> None:
        """What is queued on the stream from now on runs after the event; the host goes on."""
        ...

    def is_done(self, event: Event) -> bool:
        """Never waits. Raises the error of work that failed."""
        ...

    def wait_on_host(self, event: Event, timeout_s: float) -> bool:
        """The host waits; False when the event was not done in time. Raises like ``is_done``."""
        ...

    def elapsed_s(self, start: Event, end: Event) -> float:
        """Between two events that are done."""
        ...

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Device memory, uint8."""
        ...

    def allocate_pinned(self, num_bytes: int) -> torch.Tensor:
        """Host memory that kernels may touch, uint8."""
        ...

    def write_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """The host writes pinned memory, now."""
        ...

    def read_host(self, source: torch.Tensor) -> torch.Tensor:
        """The host reads pinned memory, now, into memory of its own."""
        ...

    def register(self, address: int, num_bytes: int) -> None:
        """Pin host memory. A failure leaves no error behind for the next call."""
        ...

    def unregister(self, address: int) -> None: ...

    def copy(self, stream: Stream, copies: Copies) -> None: ...

    def launch(self, stream: Stream, kernel: KernelLaunch) -> None: ...

    def close(self) -> None:
        """Free what this runtime made itself. Can be repeated."""
        ...

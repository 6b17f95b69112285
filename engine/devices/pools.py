"""Bounded stocks of events and pinned buffers.

Making either takes a call into the driver (for pinned memory a slow one), so they are used again.
Whoever takes one gives it back once the device can no longer touch it; what would overfill a pool
is dropped. Nothing here is shared between threads.
"""

from typing import Final

import torch

from .runtime import Event, Runtime

MAX_EVENTS: Final = 512
MAX_POOLED_BYTES: Final = 64 << 20
MIN_BUFFER_BYTES: Final = 4 << 10


class EventPool:
    """Events that nobody will wait for any more. ``num_taken`` are out."""

    def __init__(
        self, runtime: Runtime, *, timed: bool = False, max_events: int = MAX_EVENTS
    ) -> None:
        self.num_taken = 0
        self._runtime = runtime
        self._timed = timed
        self._max_events = max_events
        self._free: list[Event] = []

    def take(self) -> Event:
        event = self._free.pop() if self._free else self._runtime.create_event(timed=self._timed)
        self.num_taken += 1
        return event

    def give_back(self, event: Event) -> None:
        self.num_taken -= 1
        if len(self._free) < self._max_events:
            self._free.append(event)


class BufferPool:
    """Pinned uint8 buffers, in sizes of powers of two. ``num_taken`` are out."""

    def __init__(self, runtime: Runtime, max_bytes: int = MAX_POOLED_BYTES) -> None:
        self.num_taken = 0
        self.pooled_bytes = 0
        self._runtime = runtime
        self._max_bytes = max_bytes
        self._free: dict[int, list[torch.Tensor]] = {}

    def take(self, num_bytes: int) -> torch.Tensor:
        """A buffer of at least this many bytes, with anything in it."""
        size = max(MIN_BUFFER_BYTES, 1 << (num_bytes - 1).bit_length())
        free = self._free.get(size)
        if free:
            buffer = free.pop()
            self.pooled_bytes -= size
        else:
            buffer = self._runtime.allocate_pinned(size)
        self.num_taken += 1
        return buffer

    def give_back(self, buffer: torch.Tensor) -> None:
        self.num_taken -= 1
        size = buffer.numel()
        if self.pooled_bytes + size <= self._max_bytes:
            self._free.setdefault(size, []).append(buffer)
            self.pooled_bytes += size

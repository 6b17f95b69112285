"""How one piece is queued: the three methods, as calls on the two streams of a lane.

Every lane has a stream for kernels and one for plain copies (DMA). What orders them:

- whatever touches pages waits for the marks of the compute stream, on the stream it is queued on;
- packed: the second stream of a slice waits for the first (an event, ``filled``), and the first
  waits, before it fills a staging buffer again, until the second has emptied it (``emptied``). With
  two buffers a slice is packed while the one before it is on the link;
- within a stream, order is the queue's.

The end event of a piece is recorded on the stream that its last operation is on; everything else of
the piece comes before that through the edges above.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ...kernels.slices import Slice
from ..ranges import span
from ..strategy import Method, Strategy
from ..types import Direction, JobId
from .descriptors import Descriptors
from .group import MovedGroup
from .launches import Launches
from .runtime import Copies, Event, KernelLaunch, Runtime, Stream


@dataclass(eq=False, slots=True)
class Staging:
    """One staging buffer in device memory.

    ``used`` once ``emptied`` was recorded. ``in_use`` from its filling until ``emptied`` is
    recorded behind its emptying: still set when a piece failed in between.
    """

    buffer: torch.Tensor
    filled: Event
    emptied: Event
    used: bool = False
    in_use: bool = False


@dataclass(eq=False, slots=True)
class LaneStreams:
    """The streams of one lane, and its two staging buffers (none: nothing is packed here)."""

    kernels: Stream
    copies: Stream
    stagings: tuple[Staging, ...] = ()
    turn: int = 0

    def next_staging(self) -> Staging:
        """The buffers in turn, over all pieces."""
        self.turn += 1
        return self.stagings[self.turn % len(self.stagings)]


@dataclass(eq=False, slots=True)
class Move:
    """One piece being queued. ``touched`` once something was queued that may touch its bytes.

    ``pinned``: kernels can reach the slots and their checksums. Where they are not, checksums are
    left to the host (``host_checks.py``).
    """

    runtime: Runtime
    lane: LaneStreams
    group: MovedGroup
    descriptors: Descriptors
    launches: Launches
    direction: Direction
    after: Sequence[Event]
    begun: Event
    job_id: JobId
    strategy: Strategy
    pinned: bool
    touched: bool = False

    @property
    def name(self) -> str:
        return f"{self.direction} {self.job_id}"

    def queue(self, method: Method) -> Stream:
        """Queue all of it; returns the stream whose next event is the end of the piece."""
        match method:
            case Method.ZERO_COPY:
                return self._zero_copy()
            case Method.COPY_ENGINE:
                return self._copy_engine()
            case Method.PACKED:
                return self._pack() if self.direction is Direction.STORE else self._unpack()
            case _:
                raise ValueError(
                    f"method is {method}; allowed: {Method.ZERO_COPY}, {Method.PACKED}, "
                    f"{Method.COPY_ENGINE}"
                )

    def _zero_copy(self) -> Stream:
        stream = self.lane.kernels
        self._wait_for_compute(stream)
        make = self.launches.store if self.direction is Direction.STORE else self.launches.load
        for part, checked in self._parts(0, self.descriptors.num_entries):
            self._launch(stream, make(part, checked), part)
        return stream

    def _copy_engine(self) -> Stream:
        """The copy engine computes nothing: checksums are kernels of their own beside it."""
        stream = self.lane.copies
        storing = self.direction is Direction.STORE
        self._wait_for_compute(stream)
        copies = self.group.page_copies(
            f"copy {self.name}", self.descriptors.places, to_host=storing, pinned=self.pinned
        )
        self._copy(stream, copies, Slice(0, self.descriptors.num_entries))
        if self.pinned and self.descriptors.num_checked:
            part = Slice(0, self.descriptors.num_checked)
            make = self.launches.write_checksums if storing else self.launches.verify
            self._launch(stream, make(part), part)
        return stream

    def _pack(self) -> Stream:
        """Pages are packed on the one stream, and leave on the other."""
        kernels, copies = self.lane.kernels, self.lane.copies
        self._wait_for_compute(kernels)
        for whole, staging in self._staged_slices():
            self._take(staging, fills=kernels, empties=copies)
            for part, checked in self._parts(whole.first, whole.num_entries):
                buffer = self._staged_from(staging, part.first - whole.first)
                self._launch(kernels, self.launches.pack(part, checked, buffer), part)
            self.runtime.record(staging.filled, kernels)
            self.runtime.wait(copies, staging.filled)
            self._copy(copies, self._slice_copies(whole, staging), whole)
            self._give_back(staging, copies)
        return copies

    def _unpack(self) -> Stream:
        """Slots arrive in staging before compute is done with the pages, which wait for it."""
        kernels, copies = self.lane.kernels, self.lane.copies
        self._wait_for_compute(kernels)
        for whole, staging in self._staged_slices():
            self._take(staging, fills=copies, empties=kernels)
            self._copy(copies, self._slice_copies(whole, staging), whole)
            self.runtime.record(staging.filled, copies)
            self.runtime.wait(kernels, staging.filled)
            for part, checked in self._parts(whole.first, whole.num_entries):
                buffer = self._staged_from(staging, part.first - whole.first)
                self._launch(kernels, self.launches.unpack(part, checked, buffer), part)
            self._give_back(staging, kernels)
        return kernels

    def _wait_for_compute(self, stream: Stream) -> None:
        for event in self.after:
            self.runtime.wait(stream, event)
        self.runtime.record(self.begun, stream)

    def _take(self, staging: Staging, *, fills: Stream, empties: Stream) -> None:
        """Let the stream that fills a buffer wait until it is emptied."""
        if staging.in_use:
            self._give_back(staging, empties)  # a piece failed before it did
        if staging.used:
            self.runtime.wait(fills, staging.emptied)
        staging.in_use = True

    def _give_back(self, staging: Staging, empties: Stream) -> None:
        self.runtime.record(staging.emptied, empties)
        staging.used, staging.in_use = True, False

    def _parts(self, first: int, count: int) -> Iterator[tuple[Slice, bool]]:
        """Cut where the checked entries end."""
        end = first + count
        split = min(max(self.descriptors.num_checked if self.pinned else 0, first), end)
        if split > first:
            yield Slice(first, split - first), True
        if end > split:
            yield Slice(split, end - split), False

    def _staged_slices(self) -> Iterator[tuple[Slice, Staging]]:
        """Slices that fit into a staging buffer, the buffers in turn."""
        per_slice = self.lane.stagings[0].buffer.numel() // self.group.block_bytes
        for first in range(0, self.descriptors.num_entries, per_slice):
            count = min(per_slice, self.descriptors.num_entries - first)
            yield Slice(first, count), self.lane.next_staging()

    def _staged_from(self, staging: Staging, entry: int) -> torch.Tensor:
        return staging.buffer[entry * self.group.block_bytes :]

    def _slice_copies(self, whole: Slice, staging: Staging) -> Copies:
        return self.group.staged_copies(
            f"copy {self.name}",
            staging.buffer,
            self.descriptors.places.part(whole.first, whole.num_entries),
            to_host=self.direction is Direction.STORE,
            pinned=self.pinned,
        )

    def _launch(self, stream: Stream, kernel: KernelLaunch, part: Slice) -> None:
        with self._span("kernel", part, of=lambda: kernel.name.partition(" ")[0]):
            self.runtime.launch(stream, kernel)
        self.touched = True

    def _copy(self, stream: Stream, copies: Copies, part: Slice) -> None:
        """A batch may fail half-way, with its first copies queued."""
        self.touched = self.touched or len(copies.sizes) > 1
        with self._span("dma", part, copies=len(copies.sizes)):
            self.runtime.copy(stream, copies)
        self.touched = True

    def _span(
        self, name: str, part: Slice, **fields: object
    ) -> contextlib.AbstractContextManager[None]:
        return span(
            name,
            job=self.job_id,
            direction=self.direction,
            bytes=part.num_entries * self.group.block_bytes,
            strategy=self.strategy,
            **fields,
        )

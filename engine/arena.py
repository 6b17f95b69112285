"""Owns the host memory: reserve, pre-fault in parallel, pin in bounded pieces, release.

One anonymous private mapping holds the checksums and, behind them, the slots: whatever is moved
needs its checksums, so they are pinned first. Nothing of it has a name, so nothing is left behind
however the process ends; it is kept out of core dumps and out of forked children.

Pinning goes on in a thread of its own, piece by piece from the front (a small one first, so that
there is soon something to measure with); ``is_pinned`` grows and never shrinks. A piece that cannot
be pinned ends the pinning: the rest stays pageable, which is slower and otherwise the same.
``close`` undoes everything once; an arena whose bytes a device may still
touch is ``abandon``ed instead, and its memory goes with the process.
"""

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Final, Self

import numpy as np
import torch

from .capacity import MemoryLimits, check_capacity, read_limits
from .devices.base import Ints, Registrar
from .errors import TransferError
from .layout import SLOT_ALIGNMENT_BYTES
from .mapping import PAGE_BYTES, map_memory, populate, prefer_node, tensor_at, unmap_memory

logger = logging.getLogger(__name__)

MAX_PIN_BYTES: Final = 64 << 30
"""Registering 512 GiB in one call is known to fail on CUDA."""

FIRST_PIN_BYTES: Final = 64 << 20
PREFAULT_BYTES: Final = 256 << 20
PROGRESS_BYTES: Final = 8 << 30


class Arena:
    """``num_slots`` slots and their checksums; see the module docstring. Implements ``HostMemory``.

    Made by ``reserve``. ``slots``, ``checksums``: see ``devices.base.HostMemory``; the tensors must
    not be used after ``close``.
    """

    def __init__(
        self,
        num_slots: int,
        slot_stride_bytes: int,
        checksum_stride_bytes: int,
        device: Registrar,
        max_pin_bytes: int,
    ) -> None:
        self.num_slots: Final = num_slots
        self.slot_stride_bytes: Final = slot_stride_bytes
        self.checksum_stride_bytes: Final = checksum_stride_bytes
        self.num_bytes: Final = num_slots * (slot_stride_bytes + checksum_stride_bytes)
        self._device = device
        self._max_pin_bytes = max_pin_bytes
        checksum_bytes = num_slots * checksum_stride_bytes
        self._slots_offset = _round_up(checksum_bytes, SLOT_ALIGNMENT_BYTES)
        slots_bytes = num_slots * slot_stride_bytes
        self._map_bytes = _round_up(self._slots_offset + slots_bytes, PAGE_BYTES)
        self._base = map_memory(self._map_bytes)
        self.checksums: Final = tensor_at(self._base, checksum_bytes, torch.int64)
        self.slots: Final = tensor_at(self._base + self._slots_offset, slots_bytes, torch.uint8)
        self._pinned: list[tuple[int, int]] = []  # (address, bytes), from the front, no gap
        self._pinned_end = 0
        self._pinned_more = threading.Condition()
        self._pinning = False
        self._stop = threading.Event()
        self._pinner: threading.Thread | None = None
        self._closed = False

    @classmethod
    def reserve(
        cls,
        num_slots: int,
        slot_stride_bytes: int,
        checksum_stride_bytes: int,
        device: Registrar,
        *,
        num_ranks: int = 1,
        limits_at_start: MemoryLimits | None = None,
        prefault_threads: int = 4,
        max_pin_bytes: int = MAX_PIN_BYTES,
    ) -> Self:
        """Map, fault in, and begin to pin.

        ``limits_at_start`` are the limits read before any rank of this host reserved memory: the
        ``num_ranks`` ranks must fit into them together, and this one into what is free now. Raises
        ``CapacityError`` with the numbers when they do not, ValueError for sizes below one or
        strides that are no multiples of 8.
        """
        sizes = (num_slots, slot_stride_bytes, max_pin_bytes, num_ranks, prefault_threads)
        if min(sizes) < 1 or checksum_stride_bytes < 0:
            raise ValueError(
                f"arena of {num_slots} slots of {slot_stride_bytes} + {checksum_stride_bytes} "
                f"bytes, {max_pin_bytes} bytes a piece, {num_ranks} ranks, {prefault_threads} "
                "threads; allowed: at least 1 each, checksums at least 0"
            )
        if slot_stride_bytes % 8 or checksum_stride_bytes % 8:
            raise ValueError(
                f"strides of {slot_stride_bytes} and {checksum_stride_bytes} bytes; allowed: "
                "multiples of 8"
            )
        num_bytes = num_slots * (slot_stride_bytes + checksum_stride_bytes)
        now = read_limits()
        check_capacity(num_bytes, now)
        check_capacity(num_bytes, limits_at_start or now, num_ranks)
        arena = cls(num_slots, slot_stride_bytes, checksum_stride_bytes, device, max_pin_bytes)
        try:
            arena._prefault(prefault_threads)
            if device.can_pin:
                if now.memlock < num_bytes:
                    logger.warning(
                        "memlock limit of %d bytes is below the %d bytes to pin; pinning is tried "
                        "all the same (raise it with ulimit -l if it fails)",
                        now.memlock,
                        num_bytes,
                    )
                arena._start_pinning()
        except BaseException:
            arena.close()
            raise
        return arena

    @property
    def pinned_bytes(self) -> int:
        return min(self._pinned_end, self.num_bytes)

    def is_pinned(self, slots: Ints) -> bool:
        """True when these slots and their checksums are pinned now."""
        end = int(np.max(slots, initial=-1)) + 1
        return self._pinned_end >= self._slots_offset + end * self.slot_stride_bytes

    def wait_pinned(self, timeout_s: float) -> bool:
        """Wait for pinning to end, well or not; False when it still goes on."""
        if self._pinner is not None:
            self._pinner.join(timeout_s)
            return not self._pinner.is_alive()
        return True

    def wait_until_pinned(self, slots: Ints, timeout_s: float) -> bool:
        """Wait for these slots; False when the time was up, or when pinning ended without them."""
        with self._pinned_more:
            self._pinned_more.wait_for(
                lambda: self.is_pinned(slots) or not self._pinning, max(0.0, timeout_s)
            )
        return self.is_pinned(slots)

    def close(self) -> None:
        """Unpin and unmap. Can be repeated. Waits for a piece that is being pinned right now."""
        if self._closed:
            return
        self._stop_pinning()
        self._closed = True
        for address, _ in reversed(self._pinned):
            try:
                self._device.unregister(address)
            except TransferError:
                logger.exception("unpinning host memory at %#x failed", address)
        self._pinned.clear()
        self._pinned_end = 0
        unmap_memory(self._base, self._map_bytes)

    def abandon(self) -> None:
        """Leave the memory mapped and pinned until the process ends: a device still touches it."""
        if not self._closed:
            self._stop_pinning()
            self._closed = True
            logger.error("%d bytes of host memory stay mapped: still in use", self.num_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"Arena(num_slots={self.num_slots}, num_bytes={self.num_bytes}, "
            f"pinned_bytes={self.pinned_bytes}, closed={self._closed})"
        )

    def _prefault(self, num_threads: int) -> None:
        """Touch every page, in parallel, with a progress line for large sizes."""
        begun = time.monotonic()
        if self._device.numa_node is not None:
            prefer_node(self._base, self._map_bytes, self._device.numa_node)
        offsets = range(0, self._map_bytes, PREFAULT_BYTES)
        sizes = [min(PREFAULT_BYTES, self._map_bytes - offset) for offset in offsets]
        done, reported = 0, 0
        with ThreadPoolExecutor(min(num_threads, len(sizes)), "kvferry-prefault") as pool:
            bases = [self._base + offset for offset in offsets]
            for size, _ in zip(sizes, pool.map(populate, bases, sizes), strict=True):
                done += size
                if done - reported >= PROGRESS_BYTES:
                    reported = done
                    logger.info(
                        "host memory: %d of %d GiB ready", done >> 30, self._map_bytes >> 30
                    )
        logger.debug("faulted in %d bytes in %.2f s", done, time.monotonic() - begun)

    def _start_pinning(self) -> None:
        self._pinning = True
        self._pinner = threading.Thread(target=self._pin, name="kvferry-pin", daemon=True)
        self._pinner.start()

    def _stop_pinning(self) -> None:
        self._stop.set()
        if self._pinner is not None and self._pinner is not threading.current_thread():
            self._pinner.join()

    def _pin(self) -> None:
        """The pinning thread; whoever waits for slots is told how far it got, and of its end."""
        try:
            self._pin_pieces()
        finally:
            with self._pinned_more:
                self._pinning = False
                self._pinned_more.notify_all()

    def _pin_pieces(self) -> None:
        """Register piece after piece until all is pinned, one fails, or the arena closes."""
        most = max(PAGE_BYTES, self._max_pin_bytes // PAGE_BYTES * PAGE_BYTES)
        size = min(most, _round_up(self._slots_offset + FIRST_PIN_BYTES, PAGE_BYTES))
        offset = 0
        while offset < self._map_bytes and not self._stop.is_set():
            size = min(size, self._map_bytes - offset)
            try:
                self._device.register(self._base + offset, size)
            except Exception as error:
                logger.warning(
                    "pinning host memory failed at %d of %d bytes (%s); the rest stays pageable: "
                    "transfers are right, but slower",
                    offset,
                    self._map_bytes,
                    error,
                )
                return
            self._pinned.append((self._base + offset, size))
            offset += size
            with self._pinned_more:
                self._pinned_end = offset
                self._pinned_more.notify_all()
            size = most


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit

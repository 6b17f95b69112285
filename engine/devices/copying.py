"""How the CPU device moves the entries of one KV cache group: compiled where numba is there."""

import ctypes
import importlib
import logging
from types import ModuleType
from typing import Final

import numpy as np

from ...kernels.checksum.host import fragment_checksums
from ..layout import GroupLayout
from ..strategy import Method
from ..types import Direction
from .base import Flags, HostMemory, Ints, Piece

logger = logging.getLogger(__name__)


def load_compiled() -> ModuleType | None:
    """The compiled loop, or None (said once in the log) where numba cannot be used."""
    try:
        return importlib.import_module(".compiled", __package__)
    except Exception as error:  # not there, turned off, or it does not compile here
        logger.warning("numba is not usable (%s): the CPU device copies from Python, slower", error)
        return None


class GroupCopier:
    """Moves ranges of a piece's entries for one group; safe from several threads at once."""

    def __init__(
        self, layout: GroupLayout, memory: HostMemory, compiled: ModuleType | None
    ) -> None:
        fragments = layout.fragments
        self._bases: Final = _ints([one.base_address for one in fragments])
        self._strides: Final = _ints([one.block_stride_bytes for one in fragments])
        self._sizes: Final = _ints([one.num_bytes for one in fragments])
        self._block_bytes: Final = layout.block_bytes
        self._memory: Final = memory
        self._compiled: Final = compiled

    def move(self, piece: Piece, begin: int, end: int, method: Method) -> list[int]:
        """Move entries ``[begin, end)``; returns the indices of those that came out corrupt."""
        corrupt = np.zeros(end - begin, dtype=np.bool_)
        part = slice(begin, end)
        if method is Method.COMPILED and self._compiled is not None:
            self._compiled.copy_entries(
                piece.direction is Direction.STORE,
                self._bases,
                self._strides,
                self._sizes,
                self._block_bytes,
                self._memory.slots.data_ptr(),
                self._memory.slot_stride_bytes,
                piece.blocks[part],
                piece.slots[part],
                piece.positions[part],
                piece.seeds[part],
                piece.checked[part],
                self._memory.checksums.data_ptr(),
                self._memory.checksum_stride_bytes,
                corrupt,
            )
        else:
            self._move_interpreted(piece, part, corrupt)
        return [begin + int(index) for index in np.flatnonzero(corrupt)]

    def _move_interpreted(self, piece: Piece, part: slice, corrupt: Flags) -> None:
        """What the compiled loop does, fragment by fragment; each copy lets go of the GIL.

        Checksums are taken from the slots: after a store, and before a load.
        """
        store = piece.direction is Direction.STORE
        blocks, slots, positions = piece.blocks[part], piece.slots[part], piece.positions[part]
        if not store:
            self._check(piece, part, corrupt)
        offsets = np.cumsum(self._sizes) - self._sizes
        sizes = self._sizes.tolist()
        places = slots * self._memory.slot_stride_bytes + positions * self._block_bytes
        places += self._memory.slots.data_ptr()
        for block, place in zip(blocks.tolist(), places.tolist(), strict=True):
            pages = (self._bases + block * self._strides).tolist()
            for page, host, size in zip(pages, (offsets + place).tolist(), sizes, strict=True):
                target, source = (host, page) if store else (page, host)
                ctypes.memmove(target, source, size)
        if store:
            self._check(piece, part, corrupt)

    def _check(self, piece: Piece, part: slice, corrupt: Flags) -> None:
        """Write the checked entries' checksums (a store), or mark those that do not match."""
        checked = piece.checked[part]
        if not checked.any():
            return
        slots, positions = piece.slots[part][checked], piece.positions[part][checked]
        memory = self._memory
        starts = slots * memory.slot_stride_bytes + positions * self._block_bytes
        data = memory.slots.numpy()
        blocks = np.stack([data[at : at + self._block_bytes] for at in starts.tolist()])
        sums = fragment_checksums(
            blocks, self._sizes.tolist(), piece.seeds[part][checked], positions
        )
        rows = memory.checksums.numpy().reshape(memory.num_slots, -1)
        columns = positions[:, None] * self._sizes.size + np.arange(self._sizes.size)
        if piece.direction is Direction.STORE:
            rows[slots[:, None], columns] = sums
        else:
            corrupt[checked] = (rows[slots[:, None], columns] != sums).any(axis=1)


def _ints(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int64)

"""How the CPU device moves the entries of one KV cache group: compiled where numba is there."""

import ctypes
import importlib
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Final

import numpy as np

from ..layout import GroupLayout
from ..strategy import Method
from ..types import Direction
from .base import HostMemory, Ints, Piece

logger = logging.getLogger(__name__)


def load_compiled() -> ModuleType | None:
    """The compiled loop, or None (said once in the log) where numba cannot be used."""
    try:
        return importlib.import_module(".compiled", __package__)
    except ImportError as error:
        logger.info("numba is not usable (%s): the CPU device copies from Python, slower", error)
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
        part = slice(begin, end)
        entries = (piece.blocks[part], piece.slots[part], piece.positions[part])
        store = piece.direction is Direction.STORE
        if method is Method.COMPILED and self._compiled is not None:
            self._call(self._compiled.copy_entries, store, *entries)
        else:
            self._call(_copy_entries, store, *entries)
        return []

    def _call(
        self, function: Callable[..., None], store: bool, blocks: Ints, slots: Ints, positions: Ints
    ) -> None:
        function(
            store,
            self._bases,
            self._strides,
            self._sizes,
            self._block_bytes,
            self._memory.slots.data_ptr(),
            self._memory.slot_stride_bytes,
            blocks,
            slots,
            positions,
        )


def _copy_entries(
    store: bool, bases: Ints, strides: Ints, sizes: Ints, block_bytes: int,
    slots_address: int, slot_stride: int, blocks: Ints, slots: Ints, positions: Ints,
) -> None:  # fmt: skip
    """What ``compiled.copy_entries`` does, fragment by fragment; a call frees the GIL each time."""
    offsets = np.cumsum(sizes) - sizes
    for block, slot, position in zip(
        blocks.tolist(), slots.tolist(), positions.tolist(), strict=True
    ):
        host = slots_address + slot * slot_stride + position * block_bytes
        pages = bases + block * strides
        for page, offset, size in zip(
            pages.tolist(), offsets.tolist(), sizes.tolist(), strict=True
        ):
            if store:
                ctypes.memmove(host + offset, page, size)
            else:
                ctypes.memmove(page, host + offset, size)


def _ints(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int64)

"""Checksums of slots that no kernel can reach: computed on the host while the arena is not pinned.

They cover the time from the end of a store to the beginning of a load, not the way over the link.
The values are those of the kernels: a kernel can verify later what the host wrote.
"""

import numpy as np

from ...kernels.checksum.host import fragment_checksums
from .base import HostMemory, Ints, Piece
from .group import MovedGroup


class HostChecks:
    """Writes and verifies the checked entries of a piece, from what lies in host memory now."""

    def __init__(self, memory: HostMemory) -> None:
        self._bytes = memory.slots.numpy()
        self._slot_stride_bytes = memory.slot_stride_bytes

    def write(self, piece: Piece, group: MovedGroup) -> None:
        """After a store."""
        rows, columns = self._where(piece, group)
        self._stored(group)[rows, columns] = self._computed(piece, group)

    def find_corrupt(self, piece: Piece, group: MovedGroup) -> tuple[int, ...]:
        """Before a load: the slots whose bytes do not have their checksums, sorted."""
        rows, columns = self._where(piece, group)
        wrong = self._stored(group)[rows, columns] != self._computed(piece, group)
        slots = piece.slots[piece.checked][wrong.any(axis=1)]
        return tuple(np.unique(slots).tolist())

    def _where(self, piece: Piece, group: MovedGroup) -> tuple[Ints, Ints]:
        """Row and columns of each checked entry in the group's checksums."""
        slots, positions = piece.slots[piece.checked], piece.positions[piece.checked]
        fragments = np.arange(group.num_fragments, dtype=np.int64)
        return slots[:, None], positions[:, None] * group.num_fragments + fragments

    def _stored(self, group: MovedGroup) -> Ints:
        assert group.checksums is not None
        stored: Ints = group.checksums.values.numpy()
        return stored

    def _computed(self, piece: Piece, group: MovedGroup) -> Ints:
        """int64 ``[num_checked, num_fragments]``."""
        slots, positions = piece.slots[piece.checked], piece.positions[piece.checked]
        starts = slots * self._slot_stride_bytes + positions * group.block_bytes
        blocks = np.stack([self._bytes[at : at + group.block_bytes] for at in starts.tolist()])
        seeds = piece.seeds[piece.checked]
        return fragment_checksums(blocks, group.table.fragment_bytes, seeds, positions)

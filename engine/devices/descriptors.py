"""What the kernels of one piece read and write besides the bytes they move: records and flags."""

from dataclasses import dataclass

import numpy as np
import torch

from ...kernels.entries import Entries
from .base import Piece
from .group import Places
from .pools import BufferPool
from .runtime import Runtime

RECORD_BYTES = 32  # one record of ``Entries``
FLAG_BYTES = 4


@dataclass(frozen=True, slots=True, eq=False)
class Descriptors:
    """The descriptors of one piece, in one pinned buffer of a pool.

    Entries to be checked come first, so that each launch either computes checksums for all of its
    entries or for none. ``flags`` is int32 ``[num_entries]``: not 0 where a checksum did not match.
    """

    buffer: torch.Tensor
    entries: Entries
    flags: torch.Tensor
    places: Places
    num_checked: int

    @property
    def num_entries(self) -> int:
        return self.entries.num_entries


def describe(piece: Piece, pool: BufferPool, runtime: Runtime) -> Descriptors:
    """Write a piece's descriptors; the buffer is the caller's to give back."""
    num_entries = len(piece.blocks)
    order = np.argsort(~piece.checked, kind="stable")
    places = Places.of(piece, order)
    columns = (places.blocks, places.slots, places.positions, piece.seeds[order])
    records = torch.from_numpy(np.stack(columns, axis=1))
    split = num_entries * RECORD_BYTES
    end = split + num_entries * FLAG_BYTES
    buffer = pool.take(end)
    entries = Entries(buffer[:split].view(torch.int64).view(num_entries, 4))
    flags = buffer[split:end].view(torch.int32)
    try:
        runtime.write_host(entries.records, records)
        runtime.write_host(flags, torch.zeros(num_entries, dtype=torch.int32))
    except Exception:
        pool.give_back(buffer)
        raise
    return Descriptors(buffer, entries, flags, places, int(piece.checked.sum()))

"""Pages to a contiguous staging buffer and back, in the order of the entries.

Entries that follow each other in a slot lie back to back in the buffer, so that a run of slots is
one DMA. The buffer is in the pages' memory; one call fills it from byte 0. An engine that packs in
slices checks once, and calls the launcher with each slice and its buffer.
"""

import torch

from ..checks import (
    check_blocks,
    check_checksums,
    check_current,
    check_flags,
    check_places,
    check_reachable,
    check_staging,
)
from ..config import PACK, CopyConfig
from ..entries import Entries
from ..slices import Slice
from ..table import ChecksumSlots, FragmentTable
from . import launch


def pack(
    table: FragmentTable,
    staging: torch.Tensor,
    entries: Entries,
    *,
    config: CopyConfig = PACK,
    checksums: ChecksumSlots | None = None,
) -> None:
    """Copy the entries' blocks to ``staging``, uint8, 1-D, on the pages' device and current stream.

    Slot ids and positions are used, and checked, only with ``checksums``, which are written. Raises
    ``ValueError``, before anything is launched, for ids out of range, a place named twice, a
    misaligned base, a buffer too small, a wrong dtype or device.
    """
    check_pack(table, entries, checksums)
    check_staging(staging, table, entries.num_entries)
    if entries.num_entries:
        part = Slice(0, entries.num_entries)
        launch.pack(table, staging, entries, part, config=config, checksums=checksums)


def unpack(
    table: FragmentTable,
    staging: torch.Tensor,
    entries: Entries,
    *,
    config: CopyConfig = PACK,
    checksums: ChecksumSlots | None = None,
    flags: torch.Tensor | None = None,
) -> None:
    """Copy ``staging`` to the entries' blocks, on the current stream; the reverse of ``pack``.

    With ``checksums``, ``flags`` (int32 ``[num_entries]``, cleared by the caller) is set to 1 for
    every entry whose bytes do not have the checksums stored for them. Raises ``ValueError`` like
    ``pack``.
    """
    check_unpack(table, entries, checksums, flags)
    check_staging(staging, table, entries.num_entries)
    if entries.num_entries:
        part = Slice(0, entries.num_entries)
        launch.unpack(
            table, staging, entries, part, config=config, checksums=checksums, flags=flags
        )


def check_pack(
    table: FragmentTable, entries: Entries, checksums: ChecksumSlots | None = None
) -> None:
    """Raise ``ValueError`` for entries that must not be packed."""
    check_current(table.device)
    check_reachable("entries", entries.records, table.device)
    if checksums is not None:
        check_checksums(checksums, table)
    if entries.num_entries:
        check_blocks(entries, table.num_blocks, are_destinations=False)
        if checksums is not None:
            check_places(
                entries, checksums.num_slots, checksums.blocks_per_chunk, are_destinations=True
            )


def check_unpack(
    table: FragmentTable,
    entries: Entries,
    checksums: ChecksumSlots | None = None,
    flags: torch.Tensor | None = None,
) -> None:
    """Raise ``ValueError`` for entries that must not be unpacked."""
    check_current(table.device)
    check_reachable("entries", entries.records, table.device)
    check_flags(flags, checksums, entries, table.device)
    if checksums is not None:
        check_checksums(checksums, table)
    if entries.num_entries:
        check_blocks(entries, table.num_blocks, are_destinations=True)
        if checksums is not None:
            check_places(
                entries, checksums.num_slots, checksums.blocks_per_chunk, are_destinations=False
            )

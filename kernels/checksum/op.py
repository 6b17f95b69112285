"""Checksums of pages where they lie: for the copy engine, which computes nothing on its way."""

import torch

from ..checks import (
    check_blocks,
    check_checksums,
    check_current,
    check_flags,
    check_places,
    check_reachable,
)
from ..config import PACK, CopyConfig
from ..entries import Entries
from ..slices import SLICE_BYTES, slices
from ..table import ChecksumSlots, FragmentTable
from . import launch


def write(
    table: FragmentTable,
    entries: Entries,
    checksums: ChecksumSlots,
    *,
    config: CopyConfig = PACK,
    slice_bytes: int = SLICE_BYTES,
) -> None:
    """Write the checksum of every fragment of the entries' blocks, on the current stream.

    Raises ``ValueError``, before anything is launched, for ids out of range, a place named twice,
    rows too short, a wrong dtype or device.
    """
    _check(table, entries, checksums, are_destinations=True)
    parts = slices(entries.num_entries, table.block_bytes, slice_bytes)
    launch.checksum(table, entries, *parts, config=config, checksums=checksums, flags=None)


def verify(
    table: FragmentTable,
    entries: Entries,
    checksums: ChecksumSlots,
    flags: torch.Tensor,
    *,
    config: CopyConfig = PACK,
    slice_bytes: int = SLICE_BYTES,
) -> None:
    """Set the flag of every entry whose block does not have the checksums stored for its place.

    ``flags`` is int32 ``[num_entries]``, cleared by the caller. Raises ``ValueError`` like
    ``write``.
    """
    check_flags(flags, checksums, entries, table.device)
    _check(table, entries, checksums, are_destinations=False)
    parts = slices(entries.num_entries, table.block_bytes, slice_bytes)
    launch.checksum(table, entries, *parts, config=config, checksums=checksums, flags=flags)


def _check(
    table: FragmentTable, entries: Entries, checksums: ChecksumSlots, *, are_destinations: bool
) -> None:
    check_current(table.device)
    check_reachable("entries", entries.records, table.device)
    check_checksums(checksums, table)
    if entries.num_entries:
        check_blocks(entries, table.num_blocks, are_destinations=False)
        check_places(
            entries,
            checksums.num_slots,
            checksums.blocks_per_chunk,
            are_destinations=are_destinations,
        )

"""Zero-copy transfers: a kernel moves pages straight to slots in host memory, and back.

``store`` and ``load`` check everything and launch all slices. An engine that puts its own work
between slices calls ``check_store`` or ``check_load`` once, and the launcher for every slice.
"""

import torch

from ..checks import (
    check_aligned,
    check_blocks,
    check_checksums,
    check_current,
    check_flags,
    check_places,
    check_reachable,
    check_slots,
)
from ..config import PLAIN, CopyConfig
from ..entries import Entries
from ..slices import SLICE_BYTES, slices
from ..table import ChecksumSlots, FragmentTable, HostSlots
from . import launch


def store(
    table: FragmentTable,
    slots: HostSlots,
    entries: Entries,
    *,
    config: CopyConfig = PLAIN,
    checksums: ChecksumSlots | None = None,
    slice_bytes: int = SLICE_BYTES,
) -> None:
    """Copy the entries' blocks to their places in the slots, on the current stream.

    With ``checksums``, the checksum of every fragment moved is written there. Raises
    ``ValueError``, before anything is launched, for ids out of range, a place named twice, a
    misaligned base, a wrong dtype or device.
    """
    check_store(table, slots, entries, checksums)
    parts = slices(entries.num_entries, table.block_bytes, slice_bytes)
    launch.store(table, slots, entries, *parts, config=config, checksums=checksums)


def load(
    table: FragmentTable,
    slots: HostSlots,
    entries: Entries,
    *,
    config: CopyConfig = PLAIN,
    checksums: ChecksumSlots | None = None,
    flags: torch.Tensor | None = None,
    slice_bytes: int = SLICE_BYTES,
) -> None:
    """Copy the entries' places in the slots to their blocks, on the current stream.

    With ``checksums``, ``flags`` (int32 ``[num_entries]``, cleared by the caller) is set to 1 for
    every entry whose bytes do not have the checksums stored for them. Raises ``ValueError`` like
    ``store``; here a block must not be named twice.
    """
    check_load(table, slots, entries, checksums, flags)
    parts = slices(entries.num_entries, table.block_bytes, slice_bytes)
    launch.load(table, slots, entries, *parts, config=config, checksums=checksums, flags=flags)


def check_store(
    table: FragmentTable,
    slots: HostSlots,
    entries: Entries,
    checksums: ChecksumSlots | None = None,
) -> None:
    """Raise ``ValueError`` for a store that must not be launched."""
    _check_memory(table, slots, entries, checksums)
    if entries.num_entries:
        check_blocks(entries, table.num_blocks, are_destinations=False)
        check_places(entries, slots.num_slots, slots.blocks_per_chunk, are_destinations=True)


def check_load(
    table: FragmentTable,
    slots: HostSlots,
    entries: Entries,
    checksums: ChecksumSlots | None = None,
    flags: torch.Tensor | None = None,
) -> None:
    """Raise ``ValueError`` for a load that must not be launched."""
    _check_memory(table, slots, entries, checksums)
    check_flags(flags, checksums, entries, table.device)
    if entries.num_entries:
        check_blocks(entries, table.num_blocks, are_destinations=True)
        check_places(entries, slots.num_slots, slots.blocks_per_chunk, are_destinations=False)


def _check_memory(
    table: FragmentTable, slots: HostSlots, entries: Entries, checksums: ChecksumSlots | None
) -> None:
    check_slots(slots, table)
    check_aligned("slot memory", slots.memory.data_ptr(), table)
    check_aligned("slot stride", slots.slot_stride_bytes, table)
    check_current(table.device)
    check_reachable("entries", entries.records, table.device)
    if checksums is not None:
        check_checksums(checksums, table, slots)

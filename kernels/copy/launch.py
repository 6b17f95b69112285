"""Launchers of ``copy``: valid input assumed, nothing allocated, one kernel for one slice."""

import torch

from ..config import CopyConfig
from ..entries import Entries
from ..launching import plan
from ..pages import NO_CHECKSUMS, VERIFY_CHECKSUMS, WRITE_CHECKSUMS
from ..slices import Slice
from ..table import ChecksumSlots, FragmentTable, HostSlots
from .kernel import load_pages_kernel, store_pages_kernel


def store(
    table: FragmentTable,
    slots: HostSlots,
    entries: Entries,
    part: Slice,
    *,
    config: CopyConfig,
    checksums: ChecksumSlots | None,
) -> None:
    """Pages to slots for one slice, on the current stream; with ``checksums``, these are written."""
    shape, steps, grid = plan(table, part, config)
    store_pages_kernel[grid](
        table_ptr=table.records,
        memory_ptr=slots.memory,
        entries_ptr=entries.records,
        checksums_ptr=None if checksums is None else checksums.values,
        flags_ptr=None,
        slot_stride_bytes=slots.slot_stride_bytes,
        block_bytes=table.block_bytes,
        checksum_stride=0 if checksums is None else checksums.values.shape[1],
        num_fragments=table.num_fragments,
        num_steps=steps,
        first_entry=part.first,
        num_entries=part.num_entries,
        ACCESS_BYTES=shape.access_bytes,
        ROWS=shape.rows,
        ROW_BYTES=shape.row_bytes,
        CHECKSUMS=(NO_CHECKSUMS if checksums is None else WRITE_CHECKSUMS).value,
        NUM_STAGES=shape.num_stages,
        num_warps=shape.num_warps,
    )


def load(
    table: FragmentTable,
    slots: HostSlots,
    entries: Entries,
    part: Slice,
    *,
    config: CopyConfig,
    checksums: ChecksumSlots | None,
    flags: torch.Tensor | None,
) -> None:
    """Slots to pages for one slice, on the current stream.

    With ``checksums``, the flag of an entry whose bytes do not match becomes 1; others stay as they
    were, so the caller clears ``flags`` first.
    """
    shape, steps, grid = plan(table, part, config)
    load_pages_kernel[grid](
        table_ptr=table.records,
        memory_ptr=slots.memory,
        entries_ptr=entries.records,
        checksums_ptr=None if checksums is None else checksums.values,
        flags_ptr=flags,
        slot_stride_bytes=slots.slot_stride_bytes,
        block_bytes=table.block_bytes,
        checksum_stride=0 if checksums is None else checksums.values.shape[1],
        num_fragments=table.num_fragments,
        num_steps=steps,
        first_entry=part.first,
        num_entries=part.num_entries,
        ACCESS_BYTES=shape.access_bytes,
        ROWS=shape.rows,
        ROW_BYTES=shape.row_bytes,
        CHECKSUMS=(NO_CHECKSUMS if checksums is None else VERIFY_CHECKSUMS).value,
        NUM_STAGES=shape.num_stages,
        num_warps=shape.num_warps,
    )

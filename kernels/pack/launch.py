"""Launchers of ``pack``: valid input assumed, nothing allocated, one kernel for one slice."""

import torch

from ..config import CopyConfig
from ..entries import Entries
from ..launching import plan
from ..pages import NO_CHECKSUMS, VERIFY_CHECKSUMS, WRITE_CHECKSUMS
from ..slices import Slice
from ..table import ChecksumSlots, FragmentTable
from .kernel import pack_pages_kernel, unpack_pages_kernel


def pack(
    table: FragmentTable,
    staging: torch.Tensor,
    entries: Entries,
    part: Slice,
    *,
    config: CopyConfig,
    checksums: ChecksumSlots | None,
) -> None:
    """Pages of one slice to ``staging``, its first entry at byte 0, on the current stream."""
    shape, steps, grid = plan(table, part, config)
    pack_pages_kernel[grid](
        table_ptr=table.records,
        memory_ptr=staging,
        entries_ptr=entries.records,
        checksums_ptr=None if checksums is None else checksums.values,
        flags_ptr=None,
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


def unpack(
    table: FragmentTable,
    staging: torch.Tensor,
    entries: Entries,
    part: Slice,
    *,
    config: CopyConfig,
    checksums: ChecksumSlots | None,
    flags: torch.Tensor | None,
) -> None:
    """``staging`` to the pages of one slice, its first entry at byte 0, on the current stream.

    With ``checksums``, the flag of an entry whose bytes do not match becomes 1; others stay as they
    were, so the caller clears ``flags`` first.
    """
    shape, steps, grid = plan(table, part, config)
    unpack_pages_kernel[grid](
        table_ptr=table.records,
        memory_ptr=staging,
        entries_ptr=entries.records,
        checksums_ptr=None if checksums is None else checksums.values,
        flags_ptr=flags,
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

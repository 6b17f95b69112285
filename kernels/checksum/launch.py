"""Launchers of ``checksum``: valid input assumed, nothing allocated, one kernel for one slice."""

import torch

from ..config import CopyConfig
from ..entries import Entries
from ..launching import plan
from ..pages import VERIFY_CHECKSUMS, WRITE_CHECKSUMS
from ..slices import Slice
from ..table import ChecksumSlots, FragmentTable
from .kernel import checksum_pages_kernel


def checksum(
    table: FragmentTable,
    entries: Entries,
    part: Slice,
    *,
    config: CopyConfig,
    checksums: ChecksumSlots,
    flags: torch.Tensor | None,
) -> None:
    """Write the checksums of one slice's pages, or with ``flags`` verify them, on the current stream."""
    shape, steps, grid = plan(table, part, config)
    checksum_pages_kernel[grid](
        table_ptr=table.records,
        entries_ptr=entries.records,
        checksums_ptr=checksums.values,
        flags_ptr=flags,
        checksum_stride=checksums.values.shape[1],
        num_fragments=table.num_fragments,
        num_steps=steps,
        first_entry=part.first,
        num_entries=part.num_entries,
        ACCESS_BYTES=shape.access_bytes,
        ROWS=shape.rows,
        ROW_BYTES=shape.row_bytes,
        CHECKSUMS=(WRITE_CHECKSUMS if flags is None else VERIFY_CHECKSUMS).value,
        NUM_STAGES=shape.num_stages,
        num_warps=shape.num_warps,
    )

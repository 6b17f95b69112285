# ruff: noqa: N803
# mypy: ignore-errors
"""The kernel of ``checksum``: it reads pages and moves nothing."""

import triton
import triton.language as tl

from ..pages import COUNTS, POINTERS, move_pages


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=POINTERS)
def checksum_pages_kernel(
    table_ptr,
    entries_ptr,
    checksums_ptr,
    flags_ptr,
    checksum_stride: tl.int64,
    num_fragments: tl.int32,
    num_steps: tl.int32,
    first_entry: tl.int32,
    num_entries: tl.int32,
    ACCESS_BYTES: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    CHECKSUMS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Write or verify the checksums of pages. Arguments as in ``move_pages``."""
    move_pages(
        table_ptr=table_ptr,
        memory_ptr=None,
        entries_ptr=entries_ptr,
        checksums_ptr=checksums_ptr,
        flags_ptr=flags_ptr,
        slot_stride_bytes=0,
        block_bytes=0,
        checksum_stride=checksum_stride,
        num_fragments=num_fragments,
        num_steps=num_steps,
        first_entry=first_entry,
        num_entries=num_entries,
        ACCESS_BYTES=ACCESS_BYTES,
        ROWS=ROWS,
        ROW_BYTES=ROW_BYTES,
        FROM_PAGES=True,
        WRITE=False,
        ENTRY_ORDER=True,
        CHECKSUMS=CHECKSUMS,
        NUM_STAGES=NUM_STAGES,
    )

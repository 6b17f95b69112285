# ruff: noqa: N803
# mypy: ignore-errors
"""The kernels of ``copy``, two of them, so that a trace tells the direction."""

import triton
import triton.language as tl

from ..pages import COUNTS, POINTERS, move_pages


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=POINTERS)
def store_pages_kernel(
    table_ptr,
    memory_ptr,
    entries_ptr,
    checksums_ptr,
    flags_ptr,
    slot_stride_bytes: tl.int64,
    block_bytes: tl.int64,
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
    """Pages to host slots. Arguments as in ``move_pages``."""
    move_pages(
        table_ptr=table_ptr,
        memory_ptr=memory_ptr,
        entries_ptr=entries_ptr,
        checksums_ptr=checksums_ptr,
        flags_ptr=flags_ptr,
        slot_stride_bytes=slot_stride_bytes,
        block_bytes=block_bytes,
        checksum_stride=checksum_stride,
        num_fragments=num_fragments,
        num_steps=num_steps,
        first_entry=first_entry,
        num_entries=num_entries,
        ACCESS_BYTES=ACCESS_BYTES,
        ROWS=ROWS,
        ROW_BYTES=ROW_BYTES,
        FROM_PAGES=True,
        WRITE=True,
        ENTRY_ORDER=False,
        CHECKSUMS=CHECKSUMS,
        NUM_STAGES=NUM_STAGES,
    )


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=POINTERS)
def load_pages_kernel(
    table_ptr,
    memory_ptr,
    entries_ptr,
    checksums_ptr,
    flags_ptr,
    slot_stride_bytes: tl.int64,
    block_bytes: tl.int64,
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
    """Host slots to pages. Arguments as in ``move_pages``."""
    move_pages(
        table_ptr=table_ptr,
        memory_ptr=memory_ptr,
        entries_ptr=entries_ptr,
        checksums_ptr=checksums_ptr,
        flags_ptr=flags_ptr,
        slot_stride_bytes=slot_stride_bytes,
        block_bytes=block_bytes,
        checksum_stride=checksum_stride,
        num_fragments=num_fragments,
        num_steps=num_steps,
        first_entry=first_entry,
        num_entries=num_entries,
        ACCESS_BYTES=ACCESS_BYTES,
        ROWS=ROWS,
        ROW_BYTES=ROW_BYTES,
        FROM_PAGES=False,
        WRITE=True,
        ENTRY_ORDER=False,
        CHECKSUMS=CHECKSUMS,
        NUM_STAGES=NUM_STAGES,
    )

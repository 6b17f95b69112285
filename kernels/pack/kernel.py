# ruff: noqa: N803
# mypy: ignore-errors
"""The kernels of ``pack``, two of them, so that a trace tells the direction."""

import triton
import triton.language as tl

from ..pages import COUNTS, POINTERS, move_pages


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=POINTERS)
def pack_pages_kernel(
    table_ptr,
    memory_ptr,
    entries_ptr,
    checksums_ptr,
    flags_ptr,
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
    """Pages to a staging buffer, in the order of the entries. Arguments as in ``move_pages``."""
    move_pages(
        table_ptr=table_ptr,
        memory_ptr=memory_ptr,
        entries_ptr=entries_ptr,
        checksums_ptr=checksums_ptr,
        flags_ptr=flags_ptr,
        slot_stride_bytes=0,
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
        ENTRY_ORDER=True,
        CHECKSUMS=CHECKSUMS,
        NUM_STAGES=NUM_STAGES,
    )


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=POINTERS)
def unpack_pages_kernel(
    table_ptr,
    memory_ptr,
    entries_ptr,
    checksums_ptr,
    flags_ptr,
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
    """A staging buffer to pages, in the order of the entries. Arguments as in ``move_pages``."""
    move_pages(
        table_ptr=table_ptr,
        memory_ptr=memory_ptr,
        entries_ptr=entries_ptr,
        checksums_ptr=checksums_ptr,
        flags_ptr=flags_ptr,
        slot_stride_bytes=0,
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
        ENTRY_ORDER=True,
        CHECKSUMS=CHECKSUMS,
        NUM_STAGES=NUM_STAGES,
    )

# ruff: noqa: N803
# mypy: ignore-errors
"""The one loop behind every kernel: walk (entry, fragments) pairs, and move or read their bytes.

Work is dealt out in items: one entry with ``ROWS`` consecutive fragments. A program takes every
``num_programs``-th item, and moves it in ``num_steps`` tiles of ``[ROWS, ROW_BYTES]`` bytes. Items
and steps are one flat loop, so that a pipelined loop does not run dry between fragments. An item is
never split over programs: a fragment's checksum is summed up in registers, without atomics.

Constexprs are written in capitals. Device code is a language of its own, which mypy cannot check.
"""

import triton
import triton.language as tl

from .mixing import STEP, as_words, mix, place_key

COUNTS = (
    "slot_stride_bytes",
    "block_bytes",
    "checksum_stride",
    "num_fragments",
    "num_steps",
    "first_entry",
    "num_entries",
)
"""Never specialised on, and of a fixed width: a transfer of another size compiles nothing new."""

POINTERS = ("table_ptr", "memory_ptr", "entries_ptr", "checksums_ptr", "flags_ptr")
"""Not specialised on alignment either: the op checks it, and the kernel states it."""

# What a kernel does with checksums.
NO_CHECKSUMS = tl.constexpr(0)
WRITE_CHECKSUMS = tl.constexpr(1)
VERIFY_CHECKSUMS = tl.constexpr(2)


@triton.jit
def move_pages(
    table_ptr,
    memory_ptr,
    entries_ptr,
    checksums_ptr,
    flags_ptr,
    slot_stride_bytes,
    block_bytes,
    checksum_stride,
    num_fragments,
    num_steps,
    first_entry,
    num_entries,
    ACCESS_BYTES: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    FROM_PAGES: tl.constexpr,
    WRITE: tl.constexpr,
    ENTRY_ORDER: tl.constexpr,
    CHECKSUMS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Move the fragments of entries ``first_entry ... + num_entries`` between pages and memory.

    ``table_ptr`` int64 ``[4, num_fragments]``; ``memory_ptr`` uint8, the slots or a staging buffer;
    ``entries_ptr`` int64 ``[n, 4]``; ``checksums_ptr`` int64 ``[num_slots, checksum_stride]`` or
    None; ``flags_ptr`` int32 ``[n]`` or None. ``FROM_PAGES`` reads pages, and with ``WRITE`` writes
    memory; otherwise the reverse. ``ENTRY_ORDER`` puts blocks back to back in memory in the order
    of the entries; otherwise the entry's slot and position say where.
    """
    if ACCESS_BYTES == 16:
        # Two 8-byte elements make one access; the mask below is kept even for that reason.
        element: tl.constexpr = tl.uint64
        element_bytes: tl.constexpr = 8
    elif ACCESS_BYTES == 4:
        element: tl.constexpr = tl.uint32
        element_bytes: tl.constexpr = 4
    else:
        element: tl.constexpr = tl.uint8
        element_bytes: tl.constexpr = 1
    words: tl.constexpr = ROW_BYTES // 8
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, ROW_BYTES // element_bytes)
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    num_groups = (num_fragments + ROWS - 1) // ROWS
    num_items = (num_groups * num_entries - program + num_programs - 1) // num_programs
    sums = tl.zeros([ROWS], tl.uint64)

    for index in tl.range(0, num_items * num_steps, num_stages=NUM_STAGES):
        item = program + (index // num_steps) * num_programs
        step = index % num_steps
        entry = (first_entry + item // num_groups).to(tl.int64)
        fragments = (item % num_groups) * ROWS + rows
        known = fragments < num_fragments
        block = tl.load(entries_ptr + entry * 4)
        slot = tl.load(entries_ptr + entry * 4 + 1)
        position = tl.load(entries_ptr + entry * 4 + 2)
        base = tl.load(table_ptr + fragments, mask=known, other=0)
        stride = tl.load(table_ptr + num_fragments + fragments, mask=known, other=0)
        num_bytes = tl.load(table_ptr + num_fragments * 2 + fragments, mask=known, other=0)
        offset = tl.load(table_ptr + num_fragments * 3 + fragments, mask=known, other=0)

        start = step.to(tl.int64) * ROW_BYTES
        # Whole accesses only: this is how the compiler sees that the mask never splits one.
        left = (num_bytes - start) // ACCESS_BYTES * (ACCESS_BYTES // element_bytes)
        mask = columns[None, :] < left[:, None]
        page = (base + block * stride + start).to(tl.pointer_type(element))
        page = tl.multiple_of(page, ACCESS_BYTES)
        page = page[:, None] + columns[None, :]
        if WRITE or not FROM_PAGES:
            if ENTRY_ORDER:
                place = (entry - first_entry) * block_bytes
            else:
                place = slot * slot_stride_bytes + position * block_bytes
            host = (memory_ptr + (place + offset + start)).to(tl.pointer_type(element))
            host = tl.multiple_of(host, ACCESS_BYTES)
            host = host[:, None] + columns[None, :]
        tile = tl.load(page if FROM_PAGES else host, mask=mask, other=0)
        if WRITE:
            tl.store(host if FROM_PAGES else page, tile, mask=mask)

        if CHECKSUMS != NO_CHECKSUMS:
            seed = tl.load(entries_ptr + entry * 4 + 3)
            if ACCESS_BYTES < 16:
                tile = as_words(tile, ACCESS_BYTES, ROWS, ROW_BYTES)
            word = step * words + tl.arange(0, words)
            counter = word.to(tl.uint64) * STEP
            key = place_key(seed, position, fragments, num_bytes)
            mixed = mix(tile ^ (key[:, None] + counter[None, :]))
            within = (word * 8)[None, :] < num_bytes[:, None]
            mixed = tl.where(within, mixed, 0)
            sums = tl.where(step == 0, 0, sums) + tl.sum(mixed, axis=1)
            # Not ``known & (step == ...)``: the interpreter cannot spread a condition over rows.
            done = fragments < tl.where(step == num_steps - 1, num_fragments, 0)
            where = checksums_ptr + slot * checksum_stride + position * num_fragments + fragments
            if CHECKSUMS == WRITE_CHECKSUMS:
                tl.store(where, sums.to(tl.int64), mask=done)
            else:
                stored = tl.load(where, mask=done, other=0).to(tl.uint64)
                wrong = tl.sum(((sums != stored) & done).to(tl.int32), axis=0)
                tl.store(flags_ptr + entry, 1, mask=wrong > 0)

"""A job order -> pieces: arrays of entries, checked against the layout, cut into slices."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from .devices.base import Flags, Ints, Piece
from .layout import GroupLayout, Layout
from .messages import JobOrder, Segment
from .types import NO_BLOCK, Direction

Integrity = Literal["full", "sample", "off"]

SAMPLE = 16
"""With ``sample``, one chunk in this many is checked, chosen by its seed: always the same ones."""


def pieces_of(
    order: JobOrder, layout: Layout, num_slots: int, slice_bytes: int, integrity: Integrity
) -> list[Piece]:
    """The pieces of a job, each of at most ``slice_bytes`` (but at least one block).

    Raises ValueError for a group, block or slot that does not exist, and for a destination that
    is named twice.
    """
    pieces: list[Piece] = []
    for segment in order.segments:
        group = layout.group(segment.group)
        pieces += _segment_pieces(order, segment, group, num_slots, slice_bytes, integrity)
    if len(order.segments) > 1:
        _check_across_segments(order)
    return pieces


def bytes_of(order: JobOrder, layout: Layout) -> int:
    """The bytes that a job moves, counted once. Raises ValueError for an unknown group."""
    return sum(
        layout.group(part.group).block_bytes * (len(part.blocks) - part.blocks.count(NO_BLOCK))
        for part in order.segments
    )


def _segment_pieces(
    order: JobOrder,
    segment: Segment,
    group: GroupLayout,
    num_slots: int,
    slice_bytes: int,
    integrity: Integrity,
) -> list[Piece]:
    num_chunks, length = len(segment.slots), group.blocks_per_chunk
    if len(segment.blocks) != num_chunks * length:
        raise ValueError(
            f"job {order.job_id}: {len(segment.blocks)} blocks for {num_chunks} chunks of group "
            f"{group.group}; allowed: {length} a chunk"
        )
    blocks = np.array(segment.blocks, dtype=np.int64)
    there = blocks != NO_BLOCK
    blocks = blocks[there]
    slots = np.repeat(np.array(segment.slots, dtype=np.int64), length)[there]
    seeds = np.repeat(np.array(segment.seeds, dtype=np.int64), length)[there]
    positions = np.tile(np.arange(length, dtype=np.int64), num_chunks)[there]
    _check_ids(order, "block", blocks, group.num_blocks)
    _check_ids(order, "slot", slots, num_slots)
    _check_destinations(order, segment, blocks)
    checked = checked_entries(seeds, integrity)
    entries = max(1, slice_bytes // group.block_bytes)
    if entries > length:
        entries -= entries % length
    return [
        Piece(
            order.job_id,
            order.direction,
            group.group,
            blocks[part],
            slots[part],
            positions[part],
            seeds[part],
            checked[part],
            bool(checked[part].any()),
            len(blocks[part]) * group.block_bytes,
        )
        for part in (slice(at, at + entries) for at in range(0, len(blocks), entries))
    ]


def checked_entries(seeds: Ints, integrity: Integrity) -> Flags:
    """Which entries carry checksums; the same for a chunk's store and each of its loads."""
    if integrity == "sample":
        return np.equal(seeds % SAMPLE, 0)
    return np.full(len(seeds), integrity == "full")


def _check_ids(order: JobOrder, kind: str, ids: Ints, count: int) -> None:
    if ids.size and (ids.min() < 0 or ids.max() >= count):
        raise ValueError(
            f"job {order.job_id}: {kind} ids from {ids.min()} to {ids.max()}; "
            f"allowed: 0 to {count - 1}"
        )


def _check_destinations(order: JobOrder, segment: Segment, blocks: Ints) -> None:
    if order.direction is Direction.STORE:
        twice = len(set(segment.slots)) != len(segment.slots)
    else:
        twice = len(np.unique(blocks)) != len(blocks)
    if twice:
        what = "slot" if order.direction is Direction.STORE else "block"
        raise ValueError(
            f"job {order.job_id}: a {what} of group {segment.group} is written twice; "
            "allowed: each destination once"
        )


def _check_across_segments(order: JobOrder) -> None:
    """Slots are one for all groups; blocks are a group's own, and a group is seldom named twice."""
    store = order.direction is Direction.STORE
    if not store and len({part.group for part in order.segments}) == len(order.segments):
        return
    seen: set[tuple[int, int]] = set()
    for part in order.segments:
        group = 0 if store else part.group
        ids: Sequence[int] = part.slots if store else part.blocks
        written = {(group, one) for one in ids if one != NO_BLOCK}
        if twice := seen & written:
            place = min(twice)[1]
            what = f"slot {place}" if store else f"block {place} of group {group}"
            raise ValueError(
                f"job {order.job_id}: {what} is written twice; allowed: each destination once"
            )
        seen |= written

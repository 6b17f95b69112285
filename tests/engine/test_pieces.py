"""Orders become arrays of entries: partial chunks, slices, and which of them are checked."""

import numpy as np
import pytest
import torch
from kvferry.engine.layout import Layout, group_layout
from kvferry.engine.messages import JobOrder, Segment
from kvferry.engine.pieces import SAMPLE, checked_entries, pieces_of
from kvferry.engine.types import NO_BLOCK, BlockId, Direction, GroupId, JobId, SlotId

BLOCK_BYTES = 24


def layout(blocks_per_chunk: int = 2) -> Layout:
    caches = [torch.zeros(32, BLOCK_BYTES, dtype=torch.uint8) for _ in range(2)]
    return Layout(
        tuple(
            group_layout(GroupId(number), blocks_per_chunk, [(cache, BLOCK_BYTES)])
            for number, cache in enumerate(caches)
        )
    )


def segment(group: int, slots: list[int], blocks: list[int]) -> Segment:
    return Segment(
        GroupId(group),
        tuple(SlotId(slot) for slot in slots),
        tuple(BlockId(block) for block in blocks),
        tuple(100 + slot for slot in slots),
    )


def order(*segments: Segment, direction: Direction = Direction.STORE) -> JobOrder:
    return JobOrder(JobId(7), direction, segments)


def test_partial_chunks_keep_each_entry_with_its_place() -> None:
    pieces = pieces_of(
        order(segment(0, [4, 2, 9], [NO_BLOCK, 1, 3, NO_BLOCK, 5, 6])), layout(), 16, 1 << 20, "off"
    )
    assert len(pieces) == 1
    entries = zip(
        pieces[0].blocks, pieces[0].slots, pieces[0].positions, pieces[0].seeds, strict=True
    )
    assert [tuple(map(int, entry)) for entry in entries] == [
        (1, 4, 1, 104),
        (3, 2, 0, 102),
        (5, 9, 0, 109),
        (6, 9, 1, 109),
    ]
    assert pieces[0].num_bytes == 4 * BLOCK_BYTES
    assert not pieces[0].any_checked


def test_slices_hold_whole_chunks_where_they_can() -> None:
    job = order(segment(0, list(range(8)), list(range(16))))
    sizes = [
        [len(piece.blocks) for piece in pieces_of(job, layout(), 16, limit, "off")]
        for limit in (5 * BLOCK_BYTES, 2 * BLOCK_BYTES, 1)
    ]
    assert sizes == [[4] * 4, [2] * 8, [1] * 16]


def test_every_group_has_pieces_of_its_own() -> None:
    job = order(segment(0, [0], [1, 2]), segment(1, [1], [3, 4]))
    pieces = pieces_of(job, layout(), 16, 1 << 20, "full")
    assert [piece.group for piece in pieces] == [0, 1]
    assert all(piece.checked.all() and piece.any_checked for piece in pieces)


def test_a_sample_is_one_chunk_in_sixteen_and_always_the_same() -> None:
    seed = 4
    print("seed", seed)
    seeds = np.random.default_rng(seed).integers(-(1 << 63), 1 << 63, 100_000, dtype=np.int64)
    checked = checked_entries(seeds, "sample")
    assert abs(checked.mean() - 1 / SAMPLE) < 0.005
    assert np.array_equal(checked, checked_entries(seeds, "sample"))


def test_orders_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"3 blocks for 3 chunks of group 0; allowed: 2 a chunk"):
        pieces_of(order(segment(0, [0, 1, 2], [0, 1, 2])), layout(), 16, 1 << 20, "off")
    with pytest.raises(ValueError, match="no group 5"):
        pieces_of(order(segment(5, [0], [0, 1])), layout(), 16, 1 << 20, "off")


@pytest.mark.parametrize(
    ("direction", "parts", "message"),
    [
        (Direction.STORE, [(0, 1, 1), (1, 1, 3)], "slot 1 is written twice"),
        (Direction.STORE, [(0, 1, 1), (0, 1, 3)], "slot 1 is written twice"),
        (Direction.LOAD, [(0, 1, 5), (0, 2, 5)], "block 5 of group 0 is written twice"),
    ],
)
def test_what_two_segments_write_is_refused(
    direction: Direction, parts: list[tuple[int, int, int]], message: str
) -> None:
    segments = [segment(group, [slot], [block, block + 1]) for group, slot, block in parts]
    with pytest.raises(ValueError, match=message):
        pieces_of(order(*segments, direction=direction), layout(), 16, 1 << 20, "off")


def test_groups_may_load_into_blocks_of_the_same_id() -> None:
    job = order(segment(0, [0], [1, 2]), segment(1, [1], [1, 2]), direction=Direction.LOAD)
    assert len(pieces_of(job, layout(), 16, 1 << 20, "off")) == 2

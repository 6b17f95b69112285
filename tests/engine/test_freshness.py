"""Blocks are fresh when all that is in them was computed since the reset."""

from kvferry.engine.freshness import FreshBlocks
from kvferry.engine.geometry import GroupGeometry
from kvferry.engine.rules import GroupKind, GroupRule
from kvferry.engine.types import NO_BLOCK, BlockId, GroupId

GROUPS = [
    GroupGeometry(GroupRule(GroupId(0), GroupKind.FULL, chunk_tokens=8), 4, 4),
    GroupGeometry(GroupRule(GroupId(1), GroupKind.WINDOW, 4, window_tokens=8), 4, 4),
]


def ids(*blocks: int) -> list[BlockId]:
    return [BlockId(block) for block in blocks]


def test_nothing_is_old_or_kept_before_the_first_reset() -> None:
    fresh = FreshBlocks()
    fresh.given(ids(1, 2), fresh=False)
    assert not fresh.watching
    assert not fresh.is_old(BlockId(1))
    assert not fresh.begins_old(GROUPS, [ids(1, 2), ids(3, 4)], 8)


def test_after_a_reset_all_is_old_until_it_is_given_anew() -> None:
    fresh = FreshBlocks()
    fresh.reset()
    assert fresh.watching
    tables = [ids(1, 2, 9), ids(3, 4, 9)]
    assert fresh.begins_old(GROUPS, tables, 8)
    assert not fresh.begins_old(GROUPS, tables, 0)
    fresh.given(ids(1, 2, 3), fresh=True)
    assert not fresh.is_old(BlockId(3))
    assert fresh.is_old(BlockId(4))
    assert fresh.begins_old(GROUPS, tables, 8)  # the second group's second block
    fresh.given(ids(4), fresh=True)
    assert not fresh.begins_old(GROUPS, tables, 8)
    fresh.given(ids(2), fresh=False)
    assert fresh.begins_old(GROUPS, tables, 8)
    fresh.given(ids(2), fresh=True)
    fresh.reset()
    assert fresh.begins_old(GROUPS, tables, 8)


def test_blocks_outside_a_window_are_not_asked_for() -> None:
    fresh = FreshBlocks()
    fresh.reset()
    fresh.given(ids(1, 2, 4), fresh=True)
    assert not fresh.begins_old(GROUPS, [ids(1, 2), [NO_BLOCK, BlockId(4)]], 8)


def test_part_of_a_block_is_a_copy_of_nobody_knows_what() -> None:
    fresh = FreshBlocks()
    fresh.reset()
    fresh.given(ids(1, 2, 3, 4), fresh=True)
    assert fresh.begins_old(GROUPS, [ids(1, 2), ids(3, 4)], 6)

"""The planner's and the orders' fast paths give what the plain definitions give."""

import random

import pytest
from kvferry.engine.geometry import GroupGeometry
from kvferry.engine.planner import prefix_keys, sources
from kvferry.engine.requests import NO_LIMITS, TrackedRequest
from kvferry.engine.rules import GroupKind, GroupRule
from kvferry.engine.types import NO_BLOCK, BlockId, GroupId, Key, seed_of, seeds_of


def geometry(kind: GroupKind, blocks_per_chunk: int) -> GroupGeometry:
    window = 32 if kind is GroupKind.WINDOW else None
    rule = GroupRule(GroupId(0), kind, 16 * blocks_per_chunk, window_tokens=window)
    return GroupGeometry(rule, block_tokens=16, hash_tokens=16)


def plainly(
    geometry: GroupGeometry, keys: list[Key], absent: list[int], table: list[BlockId], first: int
) -> dict[Key, list[BlockId]]:
    """Full attention: the absent chunks, all of whose blocks are there."""
    size = geometry.blocks_per_chunk
    found = {}
    for i in absent:
        blocks = table[(first + i) * size : (first + i + 1) * size]
        if len(blocks) == size and NO_BLOCK not in blocks:
            found[keys[i]] = blocks
    return found


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("with_gaps", [False, True])
def test_sources_of_full_attention_are_the_absent_whole_chunks(seed: int, with_gaps: bool) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    group = geometry(GroupKind.FULL, rng.choice([1, 2, 3]))
    first, num_keys = rng.randrange(4), rng.randrange(1, 12)
    keys = [Key(rng.randbytes(32)) for _ in range(num_keys)]
    absent = sorted(rng.sample(range(num_keys), rng.randrange(num_keys + 1)))
    most = (first + num_keys + 1) * group.blocks_per_chunk
    table = [BlockId(rng.randrange(1, 99)) for _ in range(rng.randrange(most))]
    if with_gaps:
        table = [block if rng.random() < 0.8 else NO_BLOCK for block in table]

    found = sources(group, keys, absent, table, first, group.chunk_tokens)

    wanted = plainly(group, keys, absent, table, first)
    assert list(found) == list(wanted)
    assert {key: list(blocks) for key, blocks in found.items()} == wanted


def test_sources_of_a_window_leave_out_what_no_hit_can_use() -> None:
    group = geometry(GroupKind.WINDOW, 1)
    keys = [Key(bytes([i]) * 32) for i in range(8)]
    table = [BlockId(i + 1) for i in range(8)]

    found = sources(group, keys, list(range(8)), table, 0, boundary_tokens=64)

    assert list(found) == [keys[i] for i in (2, 3, 6, 7)]


@pytest.mark.parametrize("group", [0, 3, 255])
@pytest.mark.parametrize("sizes", [[], [32] * 9, [8], [64, 64], [20, 20], [0], [32, 16, 4]])
def test_seeds_of_keys_are_each_keys_seed(group: int, sizes: list[int]) -> None:
    rng = random.Random(1)
    keys = [Key(rng.randbytes(size)) for size in sizes]
    assert seeds_of(GroupId(group), keys) == tuple(seed_of(GroupId(group), key) for key in keys)


def test_the_keys_of_a_prefix_are_those_of_its_tokens_in_each_group() -> None:
    groups = [geometry(GroupKind.FULL, 2), geometry(GroupKind.WINDOW, 1)]
    hashes = [bytes([i]) * 32 for i in range(5)]
    request = TrackedRequest(hashes, 80, 0, NO_LIMITS, [0, 0])
    assert prefix_keys(groups, request, 64) == set(hashes[:4])  # two chunks, and four
    assert prefix_keys(groups, request, 32) == set(hashes[:2])
    assert prefix_keys(groups[:1], request, 1000) == {hashes[1], hashes[3]}

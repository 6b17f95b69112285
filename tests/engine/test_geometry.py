"""How a request's chunks are cut, and how the group rules see them in the ledger."""

import random

import pytest
from kvferry.engine.geometry import GroupGeometry, LedgerView
from kvferry.engine.ledger import Ledger
from kvferry.engine.rules import GroupKind, GroupRule, GroupView, Hit, longest_hit
from kvferry.engine.types import GroupId, Key

G1 = GroupId(1)
GEOMETRY = GroupGeometry(GroupRule(G1, GroupKind.FULL, 16), block_tokens=16, hash_tokens=16)


def run(there: list[bool]) -> int:
    return [*there, False].index(False)


@pytest.mark.parametrize("seed", range(40))
def test_runs_from_both_ends(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    keys = [Key(bytes([name]) * 32) for name in range(24)]
    ledger = Ledger(64, num_groups=2)
    kinds = rng.choices("rrrrw-", k=len(keys))
    for key, kind in zip(keys, kinds, strict=True):
        lease = ledger.reserve(G1, [key]) if kind != "-" else None
        if lease is not None and kind == "r":
            ledger.commit(lease)
    for key, kind in zip(keys, kinds, strict=True):
        if kind == "r" and rng.random() < 0.3:
            ledger.pin(G1, [key])  # reading is as good as ready
    start = rng.choice([0, 0, 16 * rng.randint(0, 24)])
    view: GroupView = LedgerView(ledger, GEOMETRY, keys, start)
    assert view.num_chunks == 24
    for _ in range(60):
        first, last = sorted((rng.randint(start // 16, 24), rng.randint(start // 16, 24)))
        for pending, good in ((False, "r"), (True, "rw")):
            there = [kind in good for kind in kinds[first:last]]
            assert view.leading(first, last, pending=pending) == run(there)
            assert view.trailing(first, last, pending=pending) == run(there[::-1])


def test_a_hit_grows_as_stores_complete() -> None:
    keys = [Key(bytes([name]) * 32) for name in range(6)]
    ledger = Ledger(8, num_groups=2)
    rules = [GEOMETRY.rule]
    views = [LedgerView(ledger, GEOMETRY, keys, 0)]
    first, second = ledger.reserve(G1, keys[:2]), ledger.reserve(G1, keys[2:5])
    assert first is not None
    assert second is not None
    assert longest_hit(rules, views, 0, 200) == Hit(0, 80)
    assert longest_hit(rules, views, 0, 200, ask_pending=False) == Hit(0, 0)
    ledger.commit(first)
    assert longest_hit(rules, views, 0, 200) == Hit(32, 80)
    ledger.abort(second)
    assert longest_hit(rules, views, 0, 200) == Hit(32, 32)


def test_keys_are_the_hashes_at_the_ends_of_chunks() -> None:
    geometry = GroupGeometry(GroupRule(G1, GroupKind.FULL, 64), block_tokens=32, hash_tokens=16)
    hashes = [bytes([name]) for name in range(11)]
    assert geometry.blocks_per_chunk == 2
    assert geometry.num_hashed_chunks(hashes) == 2
    assert geometry.keys(hashes, 0, 2) == [hashes[3], hashes[7]]
    assert geometry.keys(hashes, 1, 2) == [hashes[7]]


@pytest.mark.parametrize(("block_tokens", "hash_tokens"), [(0, 16), (16, 0), (24, 16), (48, 16)])
def test_sizes_that_do_not_divide_are_refused(block_tokens: int, hash_tokens: int) -> None:
    with pytest.raises(ValueError, match=r"at least 1|allowed: a multiple of"):
        GroupGeometry(GroupRule(G1, GroupKind.FULL, 64), block_tokens, hash_tokens)

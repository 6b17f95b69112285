"""The rules' view of the ledger against plain lists."""

import random

import pytest
from kvferry.engine.chunk_view import ChunkView
from kvferry.engine.ledger import Ledger
from kvferry.engine.rules import GroupKind, GroupRule, GroupView, Hit, longest_hit
from kvferry.engine.types import GroupId, Key

G1 = GroupId(1)


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
    view: GroupView = ChunkView(ledger, G1, keys)
    assert view.num_chunks == 24
    for _ in range(60):
        first, last = sorted((rng.randint(0, 24), rng.randint(0, 24)))
        for pending, good in ((False, "r"), (True, "rw")):
            there = [kind in good for kind in kinds[first:last]]
            assert view.leading(first, last, pending=pending) == run(there)
            assert view.trailing(first, last, pending=pending) == run(there[::-1])


def test_a_hit_grows_as_stores_complete() -> None:
    keys = [Key(bytes([name]) * 32) for name in range(6)]
    ledger = Ledger(8, num_groups=2)
    rules = [GroupRule(G1, GroupKind.FULL, 16)]
    views = [ChunkView(ledger, G1, keys)]
    first, second = ledger.reserve(G1, keys[:2]), ledger.reserve(G1, keys[2:5])
    assert first is not None
    assert second is not None
    assert longest_hit(rules, views, 0, 200) == Hit(0, 80)
    ledger.commit(first)
    assert longest_hit(rules, views, 0, 200) == Hit(32, 80)
    ledger.abort(second)
    assert longest_hit(rules, views, 0, 200) == Hit(32, 32)

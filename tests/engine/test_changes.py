"""The ledger's journal: who follows it knows what can be found."""

import random

import pytest
from kvferry.engine.changes import Change, Journal
from kvferry.engine.leases import ReadLease, WriteLease
from kvferry.engine.ledger import Ledger
from kvferry.engine.types import GroupId, Key

GROUPS = (GroupId(0), GroupId(1))


def test_changes_are_taken_once_and_in_order() -> None:
    journal = Journal()
    a, b, c = (Key(name) for name in (b"a", b"b", b"c"))
    journal.found(GroupId(0), [a, b])
    journal.lost([(GroupId(0), a), (GroupId(1), c), (GroupId(0), b)])
    journal.found(GroupId(1), [])
    assert journal.take() == [
        Change(GroupId(0), (a, b), readable=True),
        Change(GroupId(0), (a, b), readable=False),
        Change(GroupId(1), (c,), readable=False),
    ]
    assert journal.take() == []


@pytest.mark.parametrize("seed", range(5))
def test_who_follows_the_journal_knows_what_is_readable(seed: int) -> None:
    """2,000 random stores, aborts, reads, evictions, invalidations and resets of 16 slots."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    ledger = Ledger(16, num_groups=2)
    ledger.journal = Journal()
    writes: list[WriteLease] = []
    reads: list[ReadLease] = []
    followed: set[tuple[GroupId, Key]] = set()
    for _ in range(2000):
        group = rng.choice(GROUPS)
        keys = [Key(bytes([one])) for one in rng.sample(range(40), rng.randrange(1, 6))]
        match rng.randrange(8):
            case 0 | 1:
                absent = [keys[i] for i in ledger.absent(group, keys)]
                lease = ledger.reserve(group, absent) if absent else None
                writes += [lease] if lease is not None else []
            case 2 | 3 if writes:
                ledger.commit(writes.pop(rng.randrange(len(writes))))
            case 4 if writes:
                ledger.abort(writes.pop())
            case 5:
                there = [key for key in keys if ledger.readable(group, [key])]
                reads += [ledger.pin(group, there)] if there else []
            case 6 if reads:
                lease_read = reads.pop(rng.randrange(len(reads)))
                if rng.random() < 0.3:
                    ledger.invalidate(lease_read.group, lease_read.slots)
                ledger.release(lease_read)
            case 7 if rng.random() < 0.1:
                ledger.invalidate_all()
        follow(followed, ledger.journal.take())
        assert followed == {
            (group, key)
            for group in GROUPS
            for key in map(Key, (bytes([one]) for one in range(40)))
            if ledger.readable(group, [key])
        }
    assert ledger.num_evicted > 0


def follow(followed: set[tuple[GroupId, Key]], changes: list[Change]) -> None:
    for change in changes:
        chunks = {(change.group, key) for key in change.keys}
        assert len(chunks) == len(change.keys)
        if change.readable:
            assert not chunks & followed
            followed |= chunks
        else:
            assert chunks <= followed
            followed -= chunks

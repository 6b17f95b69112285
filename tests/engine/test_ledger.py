"""The ledger's operations one by one."""

import pytest
from kvferry.engine.errors import InvalidTransition
from kvferry.engine.ledger import Ledger, ReadLease, WriteLease
from kvferry.engine.state import SlotState
from kvferry.engine.types import GroupId, Key, SlotId

G0, G1 = GroupId(0), GroupId(1)


def keys(*names: int) -> list[Key]:
    return [Key(name.to_bytes(32, "big")) for name in names]


def stored(ledger: Ledger, *names: int, group: GroupId = G0) -> WriteLease:
    lease = ledger.reserve(group, keys(*names))
    assert lease is not None
    ledger.commit(lease)
    ledger.check()
    return lease


def states(ledger: Ledger, *names: int, group: GroupId = G0) -> list[SlotState | None]:
    return [ledger.state_of(group, key) for key in keys(*names)]


def test_nothing_is_readable_before_its_commit() -> None:
    ledger = Ledger(4)
    lease = ledger.reserve(G0, keys(1, 2))
    assert lease is not None
    assert states(ledger, 1, 2, 3) == [SlotState.WRITING, SlotState.WRITING, None]
    assert ledger.readable(G0, keys(1, 2)) == 0
    assert ledger.absent(G0, keys(1, 2, 3)) == [2]
    ledger.commit(lease)
    assert states(ledger, 1, 2) == [SlotState.READY] * 2
    assert ledger.readable(G0, keys(1, 2, 3)) == 2
    assert ledger.absent(G0, keys(3, 1, 4, 2)) == [0, 2]
    ledger.check()


def test_readable_counts_from_start_up_to_the_first_gap() -> None:
    ledger = Ledger(8)
    stored(ledger, 1, 2, 4, 5)
    prompt = keys(1, 2, 3, 4, 5, 6)
    assert [ledger.readable(G0, prompt, start) for start in range(8)] == [2, 1, 0, 2, 1, 0, 0, 0]
    assert ledger.readable_at(G0, prompt) == [True, True, False, True, True, False]
    assert ledger.readable(G0, []) == 0


def test_groups_share_slots_but_not_keys() -> None:
    ledger = Ledger(4, num_groups=2)
    stored(ledger, 1, 2)
    assert ledger.readable(G1, keys(1, 2)) == 0
    stored(ledger, 1, group=G1)
    assert ledger.readable(G1, keys(1, 2)) == 1
    assert ledger.counts()[SlotState.READY] == 3


def test_a_store_takes_as_many_leading_keys_as_fit() -> None:
    ledger = Ledger(4)
    stored(ledger, 1, 2)
    reading = ledger.pin(G0, keys(1))
    lease = ledger.reserve(G0, keys(3, 4, 5, 6, 7))
    assert lease is not None
    assert lease.keys == tuple(keys(3, 4, 5))
    assert ledger.take_evicted() == [(G0, keys(2)[0])]
    assert ledger.take_evicted() == []
    assert ledger.num_evicted == 1
    assert ledger.reserve(G0, keys(8)) is None
    ledger.check()
    ledger.release(reading)
    ledger.commit(lease)
    ledger.check()


def test_nothing_of_no_keys() -> None:
    ledger = Ledger(2)
    assert ledger.reserve(G0, []) is None
    with pytest.raises(ValueError, match="pin of 0 keys"):
        ledger.pin(G0, [])


def test_protected_keys_of_every_group_stay() -> None:
    ledger = Ledger(4, num_groups=2)
    stored(ledger, 1, 2)
    stored(ledger, 1, group=G1)
    stored(ledger, 9)
    lease = ledger.reserve(G0, keys(5, 6, 7), protect=keys(1, 8))
    assert lease is not None
    assert lease.keys == tuple(keys(5, 6))
    assert states(ledger, 1, 2, 9) == [SlotState.READY, None, None]
    assert states(ledger, 1, group=G1) == [SlotState.READY]
    ledger.check()


def test_a_touched_prefix_outlives_and_tails_leave_first() -> None:
    ledger = Ledger(6)
    stored(ledger, 1, 2, 3)
    stored(ledger, 4, 5, 6)
    ledger.touch(G0, keys(1, 2, 3, 7))
    order = []
    for name in range(10, 16):
        lease = ledger.reserve(G0, keys(name))
        assert lease is not None
        order += [int.from_bytes(key, "big") for _, key in ledger.take_evicted()]
    assert order == [6, 5, 4, 3, 2, 1]


def test_touching_a_key_twice_in_one_call_does_not_break_the_order() -> None:
    ledger = Ledger(3)
    stored(ledger, 1, 2, 3)
    ledger.touch(G0, keys(2, 2, 3, 2))
    ledger.check()
    stored(ledger, 4)
    assert ledger.take_evicted() == [(G0, keys(1)[0])]


def test_pin_is_all_or_nothing() -> None:
    ledger = Ledger(4)
    stored(ledger, 1, 2)
    writing = ledger.reserve(G0, keys(3))
    assert writing is not None
    for wrong in (keys(1, 9), keys(1, 3), keys(1, 1)):
        with pytest.raises(ValueError, match="allowed: at least one key, all readable, none twice"):
            ledger.pin(G0, wrong)
        ledger.check()
    assert states(ledger, 1, 2, 3) == [SlotState.READY, SlotState.READY, SlotState.WRITING]


def test_reserve_of_known_keys_is_refused() -> None:
    ledger = Ledger(4)
    stored(ledger, 1)
    assert ledger.reserve(G0, keys(2)) is not None
    for wrong in (keys(3, 1), keys(3, 2), keys(3, 3)):
        with pytest.raises(ValueError, match="allowed: absent keys, none twice"):
            ledger.reserve(G0, wrong)
    assert ledger.counts()[SlotState.FREE] == 2
    ledger.check()


def test_last_reader_makes_ready() -> None:
    ledger = Ledger(2)
    stored(ledger, 1, 2)
    first, second = ledger.pin(G0, keys(1, 2)), ledger.pin(G0, keys(1))
    ledger.check()
    ledger.release(first)
    assert states(ledger, 1, 2) == [SlotState.READING, SlotState.READY]
    ledger.release(second)
    assert states(ledger, 1, 2) == [SlotState.READY, SlotState.READY]
    assert ledger.num_leases == 0
    ledger.check()


def test_what_was_read_last_leaves_last_and_its_tail_first() -> None:
    ledger = Ledger(5)
    stored(ledger, 1, 2, 3)
    lease = ledger.pin(G0, keys(1, 2, 3))
    stored(ledger, 4, 5)
    ledger.release(lease)
    stored(ledger, 6, 7, 8, 9)
    evicted = [int.from_bytes(key, "big") for _, key in ledger.take_evicted()]
    assert evicted == [5, 4, 3, 2]


def test_reset_hides_everything_and_frees_what_nobody_holds() -> None:
    ledger = Ledger(6)
    stored(ledger, 1, 2, 3)
    reading = [ledger.pin(G0, keys(1)), ledger.pin(G0, keys(1, 2))]
    writing = ledger.reserve(G0, keys(4, 5))
    assert writing is not None
    assert ledger.invalidate_all() == 5
    ledger.check()
    assert ledger.take_evicted() == []
    assert ledger.absent(G0, keys(1, 2, 3, 4, 5)) == [0, 1, 2, 3, 4]
    assert ledger.counts()[SlotState.DOOMED] == 4
    again = ledger.reserve(G0, keys(1, 4))
    assert again is not None
    assert not set(again.slots) & {*writing.slots, *reading[1].slots}
    ledger.commit(writing)
    ledger.release(reading[0])
    ledger.check()
    assert ledger.counts()[SlotState.DOOMED] == 2
    ledger.release(reading[1])
    ledger.commit(again)
    ledger.check()
    assert ledger.readable(G0, keys(1, 4)) == 2
    assert ledger.counts()[SlotState.FREE] == 4


def test_invalidated_slots_are_not_offered_again() -> None:
    ledger = Ledger(4)
    lease = stored(ledger, 1, 2, 3)
    reading = ledger.pin(G0, keys(2, 3))
    assert ledger.invalidate(G0, lease.slots[:2]) == 2
    assert ledger.take_evicted() == [(G0, keys(1)[0]), (G0, keys(2)[0])]
    assert states(ledger, 1, 2, 3) == [None, None, SlotState.READING]
    assert ledger.invalidate(G0, lease.slots[1:2]) == 0
    ledger.check()
    ledger.release(reading)
    ledger.check()
    assert ledger.counts() == {
        SlotState.FREE: 3,
        SlotState.WRITING: 0,
        SlotState.READY: 1,
        SlotState.READING: 0,
        SlotState.DOOMED: 0,
    }
    with pytest.raises(InvalidTransition, match="FREE slot cannot 'invalidate'"):
        ledger.invalidate(G0, lease.slots[:1])
    ledger.check()


def test_invalidate_takes_only_slots_of_its_group() -> None:
    ledger = Ledger(4, num_groups=2)
    lease = stored(ledger, 1)
    with pytest.raises(ValueError, match="not of group 1"):
        ledger.invalidate(G1, lease.slots)
    ledger.check()


def test_abort_frees_and_forgets() -> None:
    ledger = Ledger(2)
    lease = ledger.reserve(G0, keys(1, 2))
    assert lease is not None
    ledger.abort(lease)
    ledger.check()
    assert ledger.counts()[SlotState.FREE] == 2
    assert ledger.absent(G0, keys(1, 2)) == [0, 1]


def test_a_lease_closes_once_and_only_where_it_was_opened() -> None:
    ledger, other = Ledger(4), Ledger(4)
    written = stored(ledger, 1, 2)
    read = ledger.pin(G0, keys(1))
    ledger.release(read)
    before = repr(ledger)
    for close in (
        lambda: ledger.commit(written),
        lambda: ledger.abort(written),
        lambda: ledger.release(read),
        lambda: other.release(read),
        lambda: ledger.release(ReadLease(G0, tuple(keys(1)), (SlotId(0),))),
    ):
        with pytest.raises(InvalidTransition, match="is not open"):
            close()
        ledger.check()
    assert repr(ledger) == before


def test_repr_shows_live_state() -> None:
    ledger = Ledger(3)
    stored(ledger, 1)
    assert repr(ledger) == (
        "Ledger(free=2 writing=0 ready=1 reading=0 doomed=0 leases=0 evicted=0)"
    )


@pytest.mark.parametrize(("slots", "groups"), [(0, 1), (-1, 1), (2**31, 1), (1, 0), (1, 257)])
def test_sizes_out_of_range_are_refused(slots: int, groups: int) -> None:
    with pytest.raises(ValueError, match="allowed: 1 to"):
        Ledger(slots, groups)


def test_check_sees_what_is_wrong() -> None:
    for spoil, what in (
        (lambda ledger: ledger._states.__setitem__(0, SlotState.FREE), "counted"),
        (lambda ledger: ledger._readers.__setitem__(0, 7), "readers"),
        (lambda ledger: ledger._readable[0].clear(), "slot 0 is READY"),
        (lambda ledger: ledger._policy.drop([0]), "the policy"),
        (lambda ledger: ledger._free.append(0), "offered as free"),
        (lambda ledger: ledger._leases.clear(), "writers and readers"),
    ):
        ledger = Ledger(3)
        stored(ledger, 1)
        assert ledger.reserve(G0, keys(2)) is not None
        spoil(ledger)
        with pytest.raises(InvalidTransition, match=what):
            ledger.check()

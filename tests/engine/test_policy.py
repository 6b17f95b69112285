"""The eviction policies: what they may choose, in which order, by which name, in what memory."""

import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvferry.engine.ghosts import Ghosts
from kvferry.engine.ledger import Lease, Ledger, ReadLease
from kvferry.engine.policy import LRU, POLICIES, EvictionPolicy, make_policy
from kvferry.engine.policy_two_speed import MAX_SPEED_LOG2, TwoSpeed
from kvferry.engine.slot_lists import SlotLists
from kvferry.engine.types import GroupId, Key, SlotId

G0 = GroupId(0)


def chunks(*names: int) -> list[Key]:
    return [Key(name.to_bytes(32, "big")) for name in names]


def use(ledger: Ledger, keys: list[Key]) -> int:
    """One request: read what is there, then store what is not; returns the chunks hit."""
    hit = ledger.readable(G0, keys)
    ledger.touch(G0, keys)
    lease = ledger.reserve(G0, [keys[i] for i in ledger.absent(G0, keys)], protect=keys)
    if lease is not None:
        ledger.commit(lease)
    ledger.take_evicted()
    return hit


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(6))
def test_a_policy_can_choose_exactly_the_ready_slots(name: str, seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    ledger = Ledger(rng.randint(1, 12), num_groups=2, policy=make_policy(name, 12))
    leases: list[Lease] = []
    for _ in range(400):
        group = GroupId(rng.randrange(2))
        keys = chunks(*rng.sample(range(20), rng.randint(1, 6)))
        action = rng.choice(["store", "store", "pin", "close", "close", "touch", "doom", "reset"])
        if action == "store":
            absent = [keys[i] for i in ledger.absent(group, keys)]
            lease: Lease | None = ledger.reserve(group, absent, protect=keys[:2])
            leases += [lease] if lease is not None else []
        elif action == "pin":
            readable = keys[: ledger.readable(group, keys)]
            leases += [ledger.pin(group, readable)] if readable else []
        elif action == "touch":
            ledger.touch(group, keys)
        elif action == "reset" and rng.random() < 0.1:
            ledger.invalidate_all()
        elif leases:
            lease = leases[rng.randrange(len(leases))]
            if action == "doom":
                ledger.invalidate(lease.group, lease.slots[:1])
            else:
                leases.remove(lease)
                if isinstance(lease, ReadLease):
                    ledger.release(lease)
                else:
                    rng.choice([ledger.commit, ledger.commit, ledger.abort])(lease)
        ledger.check()


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_memory_of_a_slot_is_at_most_300_bytes_beside_its_key(name: str) -> None:
    num_slots = 30_000
    keys = chunks(*range(2 * num_slots))
    tracemalloc.start()
    try:
        ledger = Ledger(num_slots, policy=make_policy(name, num_slots))
        for begin in range(0, len(keys), 500):
            use(ledger, keys[begin : begin + 500])
        used_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    print(f"{name}: {used_bytes / num_slots:.0f} bytes a slot")
    assert used_bytes / num_slots <= 300
    assert ledger.num_evicted == num_slots


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_tails_leave_before_heads(name: str) -> None:
    ledger = Ledger(20, policy=make_policy(name, 20))
    prompt = chunks(*range(10))
    use(ledger, prompt)
    use(ledger, prompt)
    for number in range(100, 160):
        use(ledger, chunks(number))
        left = ledger.readable_at(G0, prompt)
        assert left == sorted(left, reverse=True)


@pytest.mark.parametrize("name", ["arc", "lru"])
def test_arc_keeps_what_was_used_again_and_lru_does_not(name: str) -> None:
    ledger = Ledger(100, policy=make_policy(name, 100))
    chat = chunks(*range(50))
    assert [use(ledger, chat) for _ in range(2)] == [0, 50]
    for begin in range(1000, 2000, 10):
        use(ledger, chunks(*range(begin, begin + 10)))
    assert use(ledger, chat) == (50 if name == "arc" else 0)


def test_two_speed_learns_to_keep_a_chat_through_scans() -> None:
    """A chat of half the cache comes back after every scan of more than the cache."""
    hits: dict[str, list[int]] = {}
    for policy in ("two-speed", "lru"):
        ledger = Ledger(100, policy=make_policy(policy, 100))
        chat = chunks(*range(50))
        hits[policy] = []
        for cycle in range(40):
            hits[policy].append(use(ledger, chat))
            for begin in range(1000 + 120 * cycle, 1120 + 120 * cycle, 10):
                use(ledger, chunks(*range(begin, begin + 10)))
    print(hits)
    assert sum(hits["lru"]) == 0
    assert sum(hits["two-speed"][-10:]) >= 400


def test_two_speed_at_speed_one_is_lru() -> None:
    rng = random.Random(7)
    two_speed, lru = TwoSpeed(30), LRU(30)
    two_speed._speed_log2 = 0.0
    ledgers = [Ledger(30, policy=two_speed), Ledger(30, policy=lru)]
    prompts = [chunks(*range(100 * user, 100 * user + rng.randint(3, 9))) for user in range(8)]
    for _ in range(500):
        keys = rng.choice(prompts)
        two_speed._speed_log2 = 0.0
        hits = {use(ledger, keys) for ledger in ledgers}
        assert len(hits) == 1
        for prompt in prompts:
            assert ledgers[0].readable(G0, prompt) == ledgers[1].readable(G0, prompt)


def test_two_speed_learns_in_both_directions() -> None:
    # A hot set that comes back a little too late beside one-off prompts: those should age fast.
    scanned = TwoSpeed(64)
    ledger = Ledger(64, policy=scanned)
    for number in range(600):
        use(ledger, chunks(*range(10_000 + 16 * number, 10_016 + 16 * number)))
        user = 100 * (number % 3)
        use(ledger, chunks(*range(user, user + 8)))
    assert scanned.speed > 2**2
    # Everything is used exactly twice, a little apart: a speed that loses it must come down.
    paired = TwoSpeed(64)
    paired._speed_log2 = MAX_SPEED_LOG2
    ledger = Ledger(64, policy=paired)
    hits: list[int] = []
    for number in range(2000):
        use(ledger, chunks(4 * number, 4 * number + 1, 4 * number + 2, 4 * number + 3))
        before = 4 * max(0, number - 6)
        hits.append(use(ledger, chunks(before, before + 1, before + 2, before + 3)))
    assert 0 in hits[7:40]
    assert hits[-500:] == [4] * 500


def test_policies_by_name_and_by_path() -> None:
    assert isinstance(make_policy("lru", 4), LRU)
    assert isinstance(make_policy("two-speed", 4), TwoSpeed)
    assert isinstance(make_policy("kvferry.engine.policy:LRU", 4), LRU)
    for name in POLICIES:
        assert isinstance(make_policy(name, 4), EvictionPolicy)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("fifo", "not known; allowed: arc, lru, two-speed, or an import path"),
        ("kvferry.engine.policy", "not known"),
        ("no.such.module:Policy", "cannot be imported"),
        ("kvferry.engine.policy:Nothing", "cannot be imported"),
        ("kvferry.engine.policy:POLICIES", "allowed: "),
        ("kvferry.engine.ghosts:Ghosts", "allowed: an object with all methods"),
    ],
)
def test_names_that_lead_nowhere_are_refused(name: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        make_policy(name, 4)


class ListsModel:
    """Recency lists as Python lists, the most recent slot first."""

    def __init__(self) -> None:
        self.lists: list[list[int]] = [[], []]

    def remove(self, slots: list[int]) -> None:
        self.lists = [[s for s in each if s not in slots] for each in self.lists]

    def push(self, which: int, slots: list[int]) -> None:
        self.lists[which] = slots + self.lists[which]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["push", "move", "remove", "oldest"]),
            st.integers(0, 1),
            st.lists(st.integers(0, 11), max_size=12, unique=True),
        ),
        max_size=30,
    )
)
def test_slot_lists_against_plain_lists(steps: list[tuple[str, int, list[int]]]) -> None:
    lists, model = SlotLists(12, 2), ListsModel()
    for action, which, numbers in steps:
        slots = [SlotId(number) for number in numbers]
        linked = [s for s in slots if any(s in each for each in model.lists)]
        assert list(lists.linked(slots)) == linked
        if action == "push":
            new = [slot for slot in slots if slot not in linked]
            lists.push(which, new)
            model.push(which, list(map(int, new)))
        elif action == "oldest":
            expected = [s for s in reversed(model.lists[which]) if s not in slots][:4]
            assert lists.oldest(which, 4, slots) == expected
        else:
            model.remove(list(map(int, linked)))
            if action == "move":
                lists.move(which, linked)
                model.push(which, list(map(int, linked)))
            else:
                lists.remove(linked)
        for number, each in enumerate(model.lists):
            assert list(lists.walk(number)) == each
            assert lists.oldest(number, 12, ()) == each[::-1]
            assert lists.size(number) == len(each)
            assert all(lists.which(SlotId(slot)) == number for slot in each)
        assert len(lists) == sum(map(len, model.lists))


def test_ghosts_remember_the_latest_and_forget_the_oldest() -> None:
    ghosts = Ghosts(1000)
    rng = random.Random(3)
    idents = [rng.getrandbits(64) - 2**63 for _ in range(20_000)]
    for time, ident in enumerate(idents, start=1):
        ghosts.put(ident, time)
    # Few of the last thousand are forgotten (two places each, of 2,048), and all old ones are.
    lately = [ghosts.take(ident) for ident in idents[-1000:]]
    assert sum(time is None for time in lately) < 150
    assert all(time in (None, 19_001 + i) for i, time in enumerate(lately))
    assert not any(ghosts.take(ident) for ident in idents[:4_000])
    ghosts.put(idents[0], 30_000)
    ghosts.put(idents[0], 30_001)
    assert ghosts.take(idents[0]) == 30_001
    assert ghosts.take(idents[0]) is None

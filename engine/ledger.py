"""Who has which slot: the key index, the states, the leases and the free slots of host memory.

The ledger is the only caller of slot transitions (see ``state``). What always holds, and ``check``
proves:

- every slot is in one state, and the counts by state add up to the capacity;
- a key leads to a slot of its own group exactly while that slot is WRITING, READY or READING; only
  the keys of READY and READING slots are readable, so nothing is found before it is committed;
- the eviction policy can choose exactly the READY slots;
- a slot is WRITING exactly while one open write lease holds it, READING exactly while open read
  leases hold it, and DOOMED only while some open lease does.

Costs are those of the keys or slots given, never of the number of slots; the key index is a pair of
dicts, whose growth is amortised as always. One thread.
"""

from array import array
from collections.abc import Collection, Iterable, Sequence
from itertools import chain, compress
from operator import indexOf, not_
from typing import Final, TypeVar, cast

from .changes import Journal
from .errors import InvalidTransition
from .leases import Lease, ReadLease, WriteLease
from .ledger_check import check
from .policy import LRU, EvictionPolicy
from .state import SlotEvent, SlotState, after
from .types import GroupId, Key, SlotId

__all__ = ["Lease", "Ledger", "ReadLease", "WriteLease"]

NO_KEY: Final = Key(b"")
"""Stands for the key of a slot that has none."""

_AnyLease = TypeVar("_AnyLease", WriteLease, ReadLease)


def _idents(group: GroupId, keys: Sequence[Key]) -> Iterable[int]:
    """What the policy knows chunks by: equal for the same key of the same group."""
    return map(hash, keys) if group == 0 else (hash(key) + group for key in keys)


def _chunks(groups: bytes, keys: Sequence[Key]) -> "zip[tuple[GroupId, Key]]":
    return zip(cast("Iterable[GroupId]", groups), keys, strict=True)


class Ledger:
    """``num_slots`` slots shared by ``num_groups`` KV cache groups. LRU unless told otherwise.

    Who publishes what can be found sets a ``journal``, and takes it in every step.
    """

    __slots__ = (
        "_counts",
        "_evicted",
        "_free",
        "_group_of",
        "_key_of",
        "_leases",
        "_policy",
        "_readable",
        "_readers",
        "_states",
        "_writing",
        "journal",
        "num_evicted",
        "num_groups",
        "num_slots",
    )

    def __init__(
        self, num_slots: int, num_groups: int = 1, policy: EvictionPolicy | None = None
    ) -> None:
        if not 0 < num_slots < 2**31 - 2**16:
            raise ValueError(f"num_slots is {num_slots}; allowed: 1 to 2**31 - 2**16 - 1")
        if not 0 < num_groups <= 256:
            raise ValueError(f"num_groups is {num_groups}; allowed: 1 to 256")
        self.num_slots = num_slots
        self.num_groups = num_groups
        self.num_evicted = 0
        self.journal: Journal | None = None
        self._policy: EvictionPolicy = LRU(num_slots) if policy is None else policy
        self._readable: list[dict[Key, SlotId]] = [{} for _ in range(num_groups)]
        self._writing: list[dict[Key, SlotId]] = [{} for _ in range(num_groups)]
        self._states = bytearray(num_slots)
        self._group_of = bytearray(num_slots)
        self._readers = array("I", bytes(4 * num_slots))
        self._key_of: list[Key] = []  # as long as slots were ever used: the rest is fresh
        self._free: list[SlotId] = []  # used before and FREE again; the last one is taken first
        self._leases: set[Lease] = set()
        self._counts = [num_slots, 0, 0, 0, 0]
        self._evicted: list[tuple[bytes, Sequence[Key]]] = []  # groups, and as many keys

    # Looking: none of these changes anything.

    def state_of(self, group: GroupId, key: Key) -> SlotState | None:
        """The state of the slot that ``key`` leads to; None when it leads to none."""
        slot = self._readable[group].get(key)
        if slot is None:
            return SlotState.WRITING if key in self._writing[group] else None
        return SlotState(self._states[slot])

    def readable(self, group: GroupId, keys: Sequence[Key], start: int = 0) -> int:
        """How many of ``keys``, from ``start`` on and without a gap, can be read now."""
        rest = keys if start == 0 else keys[start:]
        try:
            return indexOf(map(self._readable[group].__contains__, rest), False)
        except ValueError:
            return len(rest)

    def writing(self, group: GroupId, key: Key) -> bool:
        """Whether a store of ``key`` is under way."""
        return key in self._writing[group]

    def readable_at(self, group: GroupId, keys: Sequence[Key]) -> list[bool]:
        """For each of ``keys`` whether it can be read now; ``[len(keys)]``."""
        return list(map(self._readable[group].__contains__, keys))

    def absent(self, group: GroupId, keys: Sequence[Key]) -> list[int]:
        """The indices of those ``keys`` that are neither readable nor being written."""
        readable, writing = self._readable[group], self._writing[group]
        if readable.keys().isdisjoint(keys):
            indices = list(range(len(keys)))
        else:
            indices = list(compress(range(len(keys)), map(not_, map(readable.__contains__, keys))))
        return [i for i in indices if keys[i] not in writing] if writing else indices

    def counts(self) -> dict[SlotState, int]:
        """How many slots are in each state."""
        return dict(zip(SlotState, self._counts, strict=True))

    @property
    def num_free(self) -> int:
        """How many slots are FREE."""
        return self._counts[SlotState.FREE]

    @property
    def num_writing(self) -> int:
        """How many slots are WRITING."""
        return self._counts[SlotState.WRITING]

    @property
    def num_leases(self) -> int:
        """How many leases are open."""
        return len(self._leases)

    # Using.

    def touch(self, group: GroupId, keys: Sequence[Key]) -> None:
        """Tell the policy that a request used those of ``keys`` that are readable."""
        found = map(self._readable[group].get, keys)
        slots = list(dict.fromkeys(slot for slot in found if slot is not None))
        if slots:
            self._policy.touch(slots)

    def pin(self, group: GroupId, keys: Sequence[Key]) -> ReadLease:
        """Hold ``keys`` for reading. All must be readable and differ, else ``ValueError``."""
        found = list(map(self._readable[group].get, keys))
        if not keys or None in found or len(set(found)) != len(found):
            raise ValueError(
                f"pin of {len(keys)} keys of group {group}, {found.count(None)} of them not "
                "readable; allowed: at least one key, all readable, none twice"
            )
        slots = cast("list[SlotId]", found)
        ready = self._in_state(slots, SlotState.READY)
        self._change(slots, SlotEvent.PIN)
        for slot in slots:
            self._readers[slot] += 1
        self._policy.hold(ready)
        return self._opened(ReadLease(group, tuple(keys), tuple(slots)))

    def release(self, lease: ReadLease) -> None:
        """Close a read lease: a slot without readers is READY again, or FREE if it was doomed."""
        self._close(lease)
        readers, states = self._readers, self._states
        ready: list[SlotId] = []
        let_go: list[SlotId] = []
        still: list[SlotId] = []
        for slot in lease.slots:
            readers[slot] -= 1
            if readers[slot]:
                still.append(slot)
            elif states[slot] == SlotState.DOOMED:
                let_go.append(slot)
            else:
                ready.append(slot)
        self._change(still, SlotEvent.RELEASE)
        self._change(ready, SlotEvent.LAST_RELEASE)
        self._policy.unhold(ready)
        self._change(let_go, SlotEvent.LET_GO)
        self._free.extend(reversed(let_go))

    # Storing.

    def reserve(
        self, group: GroupId, keys: Sequence[Key], protect: Collection[Key] = ()
    ) -> WriteLease | None:
        """Take slots for as many leading ``keys`` as fit; None when none fits.

        READY slots are evicted where free ones run out, in the policy's order, but none that a key
        of ``protect`` (in any group) leads to. All keys must be absent, and differ, else
        ``ValueError``.
        """
        known = self._readable[group].keys(), self._writing[group].keys()
        if not all(index.isdisjoint(keys) for index in known) or len(set(keys)) != len(keys):
            raise ValueError(
                f"reserve of {len(keys)} keys of group {group}, {len(self.absent(group, keys))} of "
                "them absent; allowed: absent keys, none twice"
            )
        missing = len(keys) - self._counts[SlotState.FREE]
        if missing > 0:
            self._evict(missing, protect)
        slots = self._take_free(min(len(keys), self._counts[SlotState.FREE]))
        if not slots:
            return None
        taken = tuple(keys) if len(slots) == len(keys) else tuple(keys[: len(slots)])
        self._change(slots, SlotEvent.RESERVE)
        self._writing[group].update(zip(taken, slots, strict=True))
        key_of, group_of = self._key_of, self._group_of
        for key, slot in zip(taken, slots, strict=True):
            key_of[slot] = key
        if self.num_groups > 1:
            for slot in slots:
                group_of[slot] = group
        return self._opened(WriteLease(group, taken, tuple(slots)))

    def commit(self, lease: WriteLease) -> None:
        """Close a write lease whose store is good: its keys are readable, except doomed ones."""
        self._close(lease)
        whole = not self._counts[SlotState.DOOMED]
        written = lease.slots if whole else self._in_state(lease.slots, SlotState.WRITING)
        keys = lease.keys if whole else [self._key_of[slot] for slot in written]
        self._change(written, SlotEvent.COMMIT)
        slots = map(self._writing[lease.group].pop, keys)
        self._readable[lease.group].update(zip(keys, slots, strict=True))
        self._policy.admit(written, _idents(lease.group, keys))
        if self.journal is not None:
            self.journal.found(lease.group, keys)
        if not whole:
            self._let_go(lease.slots)

    def abort(self, lease: WriteLease) -> None:
        """Close a write lease whose store is not good or not wanted: its slots are FREE."""
        self._close(lease)
        written = self._in_state(lease.slots, SlotState.WRITING)
        self._change(written, SlotEvent.ABORT)
        self._forget_keys(written)
        self._let_go(lease.slots)

    # Losing.

    def invalidate(self, group: GroupId, slots: Iterable[SlotId]) -> int:
        """Make sure that ``slots``, of ``group``, are not found any more; returns how many were.

        They are FREE at once where nobody holds them, else doomed. Keys that were readable are
        reported by ``take_evicted``. A FREE slot raises ``InvalidTransition``.
        """
        wanted = [s for s in dict.fromkeys(slots) if self._states[s] != SlotState.DOOMED]
        strange = [slot for slot in wanted if self._group_of[slot] != group]
        if strange:
            raise ValueError(f"slots {strange} are not of group {group}; allowed: its own slots")
        written = set(self._in_state(wanted, SlotState.WRITING))
        readable = [slot for slot in wanted if slot not in written]
        keys = [self._key_of[slot] for slot in readable]
        self._lose(wanted)
        self._gone(readable, keys)
        return len(wanted)

    def invalidate_all(self) -> int:
        """Make sure that no key of now is found any more; returns how many were. A cache reset."""
        if self.journal is not None:
            groups = map(GroupId, range(self.num_groups))
            self.journal.lost((group, key) for group in groups for key in self._readable[group])
        indices = [*self._readable, *self._writing]
        slots = [slot for index in indices for slot in index.values()]
        self._lose(slots)
        return len(slots)

    def take_evicted(self) -> list[tuple[GroupId, Key]]:
        """The once readable keys that are gone since the last call, without those of a reset.

        They pile up until taken: whoever owns the ledger takes them in every step.
        """
        taken, self._evicted = self._evicted, []
        return [chunk for groups, keys in taken for chunk in _chunks(groups, keys)]

    def forget_evicted(self) -> None:
        """Take them, for those who do not want to know."""
        self._evicted.clear()

    def check(self) -> None:
        """Prove the module's invariants; raises ``InvalidTransition`` with what does not hold."""
        check(self)

    def __repr__(self) -> str:
        states = " ".join(f"{state.name.lower()}={n}" for state, n in self.counts().items())
        return f"Ledger({states} leases={self.num_leases} evicted={self.num_evicted})"

    # The parts of the above.

    def _change(self, slots: Sequence[SlotId], event: SlotEvent) -> None:
        """Let ``event`` happen to all ``slots``, or raise ``InvalidTransition`` and change none."""
        states, counts = self._states, self._counts
        befores = bytes(map(states.__getitem__, slots))
        following = {before: int(after(SlotState(before), event)) for before in set(befores)}
        if len(following) == 1:
            (now,) = following.values()
            for slot in slots:
                states[slot] = now
        else:
            for slot, before in zip(slots, befores, strict=True):
                states[slot] = following[before]
        for before, now in following.items():
            number = befores.count(before)
            counts[before] -= number
            counts[now] += number

    def _in_state(self, slots: Sequence[SlotId], state: SlotState) -> Sequence[SlotId]:
        befores = bytes(map(self._states.__getitem__, slots))
        if befores.count(state) == len(slots):
            return slots
        return [slot for slot, before in zip(slots, befores, strict=True) if before == state]

    def _evict(self, count: int, protect: Collection[Key]) -> None:
        found = chain.from_iterable(map(index.get, protect) for index in self._readable)
        spared = cast("set[SlotId]", set(found) - {None})
        victims = self._policy.evict(count, spared)
        self._change(victims, SlotEvent.EVICT)
        keys = list(map(self._key_of.__getitem__, victims))
        indices = map(self._readable.__getitem__, map(self._group_of.__getitem__, victims))
        for index, key in zip(indices, keys, strict=True):
            del index[key]
        for slot in victims:
            self._key_of[slot] = NO_KEY
        self._free.extend(victims)
        self._gone(victims, keys)
        self.num_evicted += len(victims)

    def _gone(self, slots: Sequence[SlotId], keys: Sequence[Key]) -> None:
        """``keys`` could be read in ``slots``, which are of the same groups still."""
        groups = bytes(map(self._group_of.__getitem__, slots))
        self._evicted.append((groups, keys))
        if self.journal is not None:
            self.journal.lost(_chunks(groups, keys))

    def _take_free(self, count: int) -> list[SlotId]:
        used = min(count, len(self._free))
        slots = self._free[len(self._free) - used :][::-1]
        del self._free[len(self._free) - used :]
        begin = len(self._key_of)
        slots.extend(map(SlotId, range(begin, begin + count - used)))
        self._key_of.extend([NO_KEY] * (count - used))
        return slots

    def _lose(self, slots: Sequence[SlotId]) -> None:
        ready = self._in_state(slots, SlotState.READY)
        written = set(self._in_state(slots, SlotState.WRITING))
        self._change(slots, SlotEvent.INVALIDATE)
        self._forget_keys(slots)
        self._policy.drop([slot for slot in slots if slot not in written])
        self._free.extend(reversed(ready))

    def _forget_keys(self, slots: Iterable[SlotId]) -> None:
        for slot in slots:
            key, group = self._key_of[slot], self._group_of[slot]
            if self._readable[group].pop(key, None) is None:
                del self._writing[group][key]
            self._key_of[slot] = NO_KEY

    def _let_go(self, slots: Sequence[SlotId]) -> None:
        doomed = self._in_state(slots, SlotState.DOOMED)
        self._change(doomed, SlotEvent.LET_GO)
        self._free.extend(reversed(doomed))

    def _opened(self, lease: _AnyLease) -> _AnyLease:
        self._leases.add(lease)
        return lease

    def _close(self, lease: Lease) -> None:
        if lease not in self._leases:
            raise InvalidTransition(
                f"the lease on {len(lease.slots)} slots of group {lease.group} is not open; "
                "allowed: to close a lease of this ledger once"
            )
        self._leases.remove(lease)

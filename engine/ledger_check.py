"""The proof that a ledger is consistent; slow, for tests and idle times."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .errors import InvalidTransition
from .leases import ReadLease, WriteLease
from .state import SlotState
from .types import GroupId, Key, SlotId

if TYPE_CHECKING:
    from .ledger import Ledger


def check(ledger: "Ledger") -> None:
    """Raise ``InvalidTransition`` with everything that does not hold in ``ledger``."""
    faults = [
        *_counts(ledger),
        *_index(ledger),
        *_policy(ledger),
        *_leases(ledger),
        *_free(ledger),
    ]
    if faults:
        raise InvalidTransition(f"{ledger!r} is inconsistent: {'; '.join(faults)}")


def _counts(ledger: "Ledger") -> Iterator[str]:
    real = Counter(ledger._states)
    for state, counted in ledger.counts().items():
        if real[state] != counted:
            yield f"{real[state]} slots are {state.name}, counted {counted}"
    if sum(ledger.counts().values()) != ledger.num_slots:
        yield f"the counts do not add up to {ledger.num_slots}"


def _index(ledger: "Ledger") -> Iterator[str]:
    keyed: dict[SlotId, tuple[GroupId, Key]] = {}
    for indices, allowed in (
        (ledger._readable, (SlotState.READY, SlotState.READING)),
        (ledger._writing, (SlotState.WRITING,)),
    ):
        for group, index in enumerate(indices):
            for key, slot in index.items():
                state = SlotState(ledger._states[slot])
                if state not in allowed:
                    yield f"a key of group {group} leads to slot {slot}, which is {state.name}"
                if slot in keyed:
                    yield f"two keys lead to slot {slot}"
                keyed[slot] = (GroupId(group), key)
    for number, value in enumerate(ledger._states):
        slot, state = SlotId(number), SlotState(value)
        known = ledger._key_of[slot] if slot < len(ledger._key_of) else b""
        indexed = state in (SlotState.WRITING, SlotState.READY, SlotState.READING)
        if indexed != (slot in keyed):
            yield f"slot {slot} is {state.name}, key {known!r}"
        elif indexed and keyed[slot] != (ledger._group_of[slot], known):
            yield f"slot {slot} is found by another key than it has"
        elif not indexed and known:
            yield f"slot {slot} is {state.name} and has a key"


def _policy(ledger: "Ledger") -> Iterator[str]:
    choosable = list(ledger._policy.evictable())
    ready = [slot for slot, state in enumerate(ledger._states) if state == SlotState.READY]
    if sorted(choosable) != ready:
        yield f"the policy can choose {sorted(choosable)}, READY are {ready}"
    if len(ledger._policy) != len(ready):
        yield f"the policy counts {len(ledger._policy)} slots, READY are {len(ready)}"


def _leases(ledger: "Ledger") -> Iterator[str]:
    writers: Counter[SlotId] = Counter()
    readers: Counter[SlotId] = Counter()
    for lease in ledger._leases:
        (writers if isinstance(lease, WriteLease) else readers).update(lease.slots)
        if isinstance(lease, ReadLease) and len(set(lease.slots)) != len(lease.slots):
            yield "a lease holds a slot twice"
    for number, state in enumerate(ledger._states):
        slot = SlotId(number)
        held = (writers[slot], readers[slot])
        if ledger._readers[slot] != readers[slot]:
            yield f"slot {slot} has {readers[slot]} readers, counted {ledger._readers[slot]}"
        allowed = {
            SlotState.FREE: held == (0, 0),
            SlotState.READY: held == (0, 0),
            SlotState.WRITING: held == (1, 0),
            SlotState.READING: held[0] == 0 and held[1] > 0,
            SlotState.DOOMED: held == (1, 0) or (held[0] == 0 and held[1] > 0),
        }
        if not allowed[SlotState(state)]:
            yield f"slot {slot} is {SlotState(state).name} with {held} writers and readers"


def _free(ledger: "Ledger") -> Iterator[str]:
    fresh = range(len(ledger._key_of), ledger.num_slots)
    free = sorted([*ledger._free, *map(SlotId, fresh)])
    real = [slot for slot, state in enumerate(ledger._states) if state == SlotState.FREE]
    if free != real:
        yield f"slots {free} are offered as free, FREE are {real}"

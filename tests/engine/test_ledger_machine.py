"""The ledger against a naive model, with leases open over evictions, resets and dooms."""

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kvferry.engine.errors import InvalidTransition
from kvferry.engine.ledger import Lease, Ledger, ReadLease, WriteLease
from kvferry.engine.state import SlotState
from kvferry.engine.types import GroupId, Key

NUM_GROUPS = 2
GROUPS = st.integers(0, NUM_GROUPS - 1).map(GroupId)
KEYS = st.integers(0, 9).map(lambda name: Key(b"chunk%d" % name))
SOME_KEYS = st.lists(KEYS, min_size=1, max_size=6, unique=True)


@dataclass(eq=False)
class Chunk:
    """What the model knows of one slot's content."""

    group: GroupId
    key: Key
    state: SlotState
    readers: int = 0


class LedgerMachine(RuleBasedStateMachine):
    """The model: chunks in a list, an index by (group, key), and the READY ones, oldest first."""

    @initialize(num_slots=st.integers(1, 8))
    def begin(self, num_slots: int) -> None:
        self.ledger = Ledger(num_slots, NUM_GROUPS)
        self.found: dict[tuple[GroupId, Key], Chunk] = {}
        self.ready: list[Chunk] = []
        self.open: list[tuple[Lease, list[Chunk]]] = []
        self.closed: list[Lease] = []
        self.gone: list[tuple[GroupId, Key]] = []

    def num_free(self) -> int:
        held = {chunk for _, chunks in self.open for chunk in chunks}
        return self.ledger.num_slots - len(held | set(self.ready))

    def put_ready(self, chunks: list[Chunk]) -> None:
        for chunk in reversed(chunks):
            chunk.state = SlotState.READY
            self.ready.append(chunk)

    def forget(self, chunk: Chunk) -> None:
        del self.found[chunk.group, chunk.key]
        if chunk in self.ready:
            self.ready.remove(chunk)
        chunk.state = SlotState.DOOMED

    def readable(self, group: GroupId, key: Key) -> Chunk | None:
        chunk = self.found.get((group, key))
        return None if chunk is None or chunk.state is SlotState.WRITING else chunk

    @rule(group=GROUPS, keys=SOME_KEYS, protect=st.lists(KEYS, max_size=3))
    def reserve(self, group: GroupId, keys: list[Key], protect: list[Key]) -> None:
        absent = [key for key in keys if (group, key) not in self.found]
        assert [keys[i] for i in self.ledger.absent(group, keys)] == absent
        if absent != keys:
            with pytest.raises(ValueError, match="allowed: absent keys"):
                self.ledger.reserve(group, keys)
        lease = self.ledger.reserve(group, absent, protect)
        for chunk in list(self.ready):
            if self.num_free() < len(absent) and chunk.key not in protect:
                self.forget(chunk)
                self.gone.append((chunk.group, chunk.key))
        fit = absent[: self.num_free()]
        assert (lease is None) == (not fit)
        if lease is not None:
            assert lease.keys == tuple(fit)
            chunks = [Chunk(group, key, SlotState.WRITING) for key in fit]
            self.found.update({(group, chunk.key): chunk for chunk in chunks})
            self.open.append((lease, chunks))

    @rule(group=GROUPS, keys=SOME_KEYS)
    def pin(self, group: GroupId, keys: list[Key]) -> None:
        found = [self.readable(group, key) for key in keys]
        leading = [chunk for chunk in found[: [*found, None].index(None)] if chunk is not None]
        assert self.ledger.readable(group, keys) == len(leading)
        if len(leading) < len(keys):
            with pytest.raises(ValueError, match="not readable"):
                self.ledger.pin(group, keys)
        if leading:
            lease = self.ledger.pin(group, keys[: len(leading)])
            for chunk in leading:
                chunk.readers += 1
                if chunk.state is SlotState.READY:
                    self.ready.remove(chunk)
                    chunk.state = SlotState.READING
            self.open.append((lease, leading))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), good=st.booleans())
    def close(self, data: st.DataObject, good: bool) -> None:
        lease, chunks = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        self.closed.append(lease)
        if isinstance(lease, ReadLease):
            self.ledger.release(lease)
            for chunk in chunks:
                chunk.readers -= 1
            unread = [c for c in chunks if not c.readers and c.state is SlotState.READING]
            self.put_ready(unread)
        elif good:
            self.ledger.commit(lease)
            self.put_ready([c for c in chunks if c.state is SlotState.WRITING])
        else:
            self.ledger.abort(lease)
            for chunk in chunks:
                if chunk.state is SlotState.WRITING:
                    self.forget(chunk)

    @precondition(lambda self: self.closed)
    @rule(data=st.data())
    def close_again(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.closed))
        closers = (
            (self.ledger.commit, self.ledger.abort)
            if isinstance(lease, WriteLease)
            else (self.ledger.release,)
        )
        for closer in closers:
            with pytest.raises(InvalidTransition):
                closer(lease)  # type: ignore[operator]

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def invalidate(self, data: st.DataObject) -> None:
        lease, chunks = data.draw(st.sampled_from(self.open))
        some = data.draw(st.sets(st.sampled_from(range(len(chunks)))))
        expected = [chunks[i] for i in sorted(some) if chunks[i].state is not SlotState.DOOMED]
        number = self.ledger.invalidate(lease.group, [lease.slots[i] for i in sorted(some)])
        assert number == len(expected)
        for chunk in expected:
            if chunk.state is not SlotState.WRITING:
                self.gone.append((chunk.group, chunk.key))
            self.forget(chunk)

    @rule()
    def reset(self) -> None:
        assert self.ledger.invalidate_all() == len(self.found)
        for chunk in list(self.found.values()):
            self.forget(chunk)

    @rule(group=GROUPS, keys=SOME_KEYS)
    def touch(self, group: GroupId, keys: list[Key]) -> None:
        self.ledger.touch(group, keys)
        used = [self.readable(group, key) for key in keys]
        moved = [chunk for chunk in used if chunk in self.ready]
        self.ready = [chunk for chunk in self.ready if chunk not in moved]
        self.put_ready([chunk for chunk in moved if chunk is not None])

    @rule()
    def take(self) -> None:
        assert self.ledger.take_evicted() == self.gone
        self.gone = []

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "ledger"):
            return
        self.ledger.check()
        for group in map(GroupId, range(NUM_GROUPS)):
            for name in range(10):
                key = Key(b"chunk%d" % name)
                chunk = self.found.get((group, key))
                assert self.ledger.state_of(group, key) == (chunk and chunk.state)
        assert self.ledger.counts()[SlotState.FREE] == self.num_free()
        assert self.ledger.num_leases == len(self.open)
        for lease, chunks in self.open:
            for slot, chunk in zip(lease.slots, chunks, strict=True):
                assert self.ledger._states[slot] == chunk.state


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, print_blob=True, derandomize=True
)

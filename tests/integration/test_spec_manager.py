"""The spec's manager against vLLM's own: one seeded schedule of calls through both.

Chunk ids are each manager's own business: the test holds that what is loaded for a key is what was
stored for it. Everything else must be equal: lookups, what is stored, what is evicted and in which
order, refusals, events, gauges.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
from kvferry.engine.policy import LRU, POLICIES
from kvferry.integration.vllm.spec import KVFerryOffloadingManager
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    make_offload_key,
)
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

NO_REQUEST = ReqContext(req_id="none")


def key(number: int, group: int = 0) -> OffloadKey:
    return make_offload_key(b"hash %d" % number, group)


def keys(*numbers: int) -> list[OffloadKey]:
    return [key(number) for number in numbers]


def told(events: Iterable[OffloadingEvent]) -> list[tuple[bool, list[OffloadKey]]]:
    """The events, without those that vLLM only uses inside (0.33)."""
    taken = [event for event in events if not getattr(event, "metadata_only", False)]
    assert all(event.medium is Medium.CPU for event in taken)
    return [(event.removed, list(event.keys)) for event in taken]


@dataclass(eq=False)
class Asker:
    """A request as each manager sees it, and the chunks of its prompt over all groups."""

    contexts: tuple[ReqContext, ReqContext]
    chain: list[OffloadKey]


class Pair:
    """Both managers, the requests under way, and the transfers that have not ended."""

    def __init__(self, seed: int, *, positions: bool, **settings: Any) -> None:
        self.random = random.Random(seed)
        self.positions = positions
        self.theirs = CPUOffloadingManager(enable_events=True, **settings)
        self.ours = KVFerryOffloadingManager(enable_events=True, **settings)
        self.askers: list[Asker] = []
        self.stores: list[tuple[Asker, list[OffloadKey]]] = []
        self.loads: list[tuple[Asker, list[OffloadKey]]] = []
        self.places: dict[OffloadKey, int] = {}
        self.num_evicted = self.num_refused = self.num_hits = self.num_pending = 0

    def ask(self, name: str, asker: Asker, *given: Any, **more: Any) -> tuple[Any, Any]:
        theirs = getattr(self.theirs, name)(*given, asker.contexts[0], **more)
        ours = getattr(self.ours, name)(*given, asker.contexts[1], **more)
        return theirs, ours

    def same(self, name: str, asker: Asker, *given: Any, **more: Any) -> Any:
        theirs, ours = self.ask(name, asker, *given, **more)
        assert ours == theirs
        return ours

    def begin(self) -> None:
        """A request with a prefix of one of four families, in one KV cache group or two."""
        family, length = self.random.randrange(4), self.random.randint(1, 12)
        places = [(i, group) for group in range(self.random.choice([1, 2])) for i in range(length)]
        chain = [key(family * 100 + i, group) for i, group in places]
        contexts = ReqContext("theirs"), ReqContext("ours")
        if self.positions:
            for context in contexts:
                for (i, _), one in zip(places, chain, strict=True):
                    context.set_offload_key_position(one, 16 * (i + 1))
        asker = Asker(contexts, chain)
        self.ask("on_new_request", asker)
        self.askers.append(asker)

    def act(self) -> None:
        asker = self.random.choice(self.askers)
        part = asker.chain[: self.random.randint(1, len(asker.chain))]
        action = self.random.choice(["look", "load", "store", "store", "end", "end", "more"])
        if action == "look":
            self.look(asker, part)
        elif action == "load":
            self.load(asker, self.look(asker, part))
        elif action == "store":
            self.store(asker, part)
        elif action == "end":
            self.end(self.random.choice([self.stores, self.loads]))
        elif self.random.random() < 0.5:
            self.ask("touch", asker, part)
        elif len(self.askers) > 3:
            self.askers.remove(asker)
            self.ask("on_request_finished", asker)
            self.ask("on_request_finished", asker)  # the second time changes nothing

    def look(self, asker: Asker, part: list[OffloadKey]) -> list[OffloadKey]:
        found = {one: self.same("lookup", asker, one) for one in part}
        self.num_pending += list(found.values()).count(LookupResult.HIT_PENDING)
        return [one for one, result in found.items() if result is LookupResult.HIT]

    def load(self, asker: Asker, there: list[OffloadKey]) -> None:
        if there:
            self.num_hits += len(there)
            _, ours = self.ask("prepare_load", asker, there)
            assert list(ours.block_ids) == [self.places[one] for one in there]
            self.loads.append((asker, there))

    def store(self, asker: Asker, part: list[OffloadKey]) -> None:
        theirs, ours = self.ask("prepare_store", asker, part)
        if theirs is None:
            assert ours is None
            self.num_refused += 1
            return
        assert ours.keys_to_store == theirs.keys_to_store
        assert ours.evicted_keys == theirs.evicted_keys
        self.num_evicted += len(ours.evicted_keys)
        self.places.update(zip(ours.keys_to_store, ours.store_spec.block_ids, strict=True))
        if ours.keys_to_store:
            self.stores.append((asker, ours.keys_to_store))

    def end(self, pending: list[tuple[Asker, list[OffloadKey]]]) -> None:
        """A transfer ends: sometimes badly, or cut in two, as vLLM's connector never does."""
        if not pending:
            return
        asker, moved = pending.pop(self.random.randrange(len(pending)))
        cut = self.random.randint(1, len(moved)) if self.random.random() < 0.3 else len(moved)
        for part in (moved[:cut], moved[cut:]):
            if pending is self.loads:
                self.ask("complete_load", asker, part)
            else:
                self.ask("complete_store", asker, part, success=self.random.random() < 0.85)

    def reset(self) -> None:
        self.theirs.reset_cache()
        self.ours.reset_cache()
        self.stores.clear()
        self.loads.clear()

    def compare(self) -> None:
        assert told(self.ours.take_events()) == told(self.theirs.take_events())
        theirs, ours = self.theirs.get_stats(), self.ours.get_stats()
        assert theirs is not None
        assert ours.reduce() == pytest.approx(theirs.reduce())
        self.ours._ledger.check()


@pytest.mark.parametrize("positions", [False, True], ids=["unplaced", "placed"])
@pytest.mark.parametrize("threshold", [0, 2])
@pytest.mark.parametrize("seed", range(4))
def test_the_same_calls_give_the_same_answers(seed: int, threshold: int, positions: bool) -> None:
    print(f"seed {seed}")
    pair = Pair(
        seed, positions=positions, num_chunks=24, store_threshold=threshold, max_tracker_size=30
    )
    for _ in range(4):
        pair.begin()
    for _ in range(1500):
        if pair.random.random() < 0.1:
            pair.begin()
        if pair.random.random() < 0.003:
            pair.reset()
        pair.act()
        pair.compare()
    assert pair.num_evicted > 100
    assert pair.num_refused > 3
    assert pair.num_hits > 100
    assert pair.num_pending > 100


def test_a_stored_chunk_is_found_pending_then_hit() -> None:
    manager = KVFerryOffloadingManager(4, enable_events=True)
    output = manager.prepare_store(keys(1, 2), NO_REQUEST)
    assert output is not None
    assert output.keys_to_store == keys(1, 2)
    assert list(output.store_spec.block_ids) == [0, 1]
    assert manager.lookup(key(1), NO_REQUEST) is LookupResult.HIT_PENDING
    assert manager.lookup(key(3), NO_REQUEST) is LookupResult.MISS
    assert list(manager.take_events()) == []
    manager.complete_store(keys(1, 2), NO_REQUEST)
    assert manager.lookup(key(1), NO_REQUEST) is LookupResult.HIT
    assert told(manager.take_events()) == [(False, keys(1, 2))]
    assert told(manager.take_events()) == []


def test_offered_chunks_are_not_evicted_for_each_other() -> None:
    manager = KVFerryOffloadingManager(4)
    manager.prepare_store(keys(1, 2), NO_REQUEST)
    manager.complete_store(keys(1, 2), NO_REQUEST)
    manager.touch(keys(1), NO_REQUEST)  # 2 is the oldest now
    output = manager.prepare_store(keys(2, 3, 4, 5), NO_REQUEST)
    assert output is not None
    assert output.keys_to_store == keys(3, 4, 5)
    assert output.evicted_keys == keys(1)
    assert manager.prepare_store(keys(2, 6), NO_REQUEST) is None  # only 2 could go


def test_a_chunk_that_two_requests_load_is_held_until_both_are_done() -> None:
    manager = KVFerryOffloadingManager(2)
    manager.prepare_store(keys(1, 2), NO_REQUEST)
    manager.complete_store(keys(1, 2), NO_REQUEST)
    manager.prepare_load(keys(1, 2), NO_REQUEST)
    manager.prepare_load(keys(2), NO_REQUEST)
    manager.complete_load(keys(1, 2), NO_REQUEST)
    assert manager.prepare_store(keys(3, 4), NO_REQUEST) is None
    manager.complete_load(keys(2), NO_REQUEST)
    output = manager.prepare_store(keys(3, 4), NO_REQUEST)
    assert output is not None
    assert output.evicted_keys == keys(1, 2)


def test_a_load_that_nobody_began_cannot_end() -> None:
    manager = KVFerryOffloadingManager(2)
    manager.prepare_store(keys(1, 2), NO_REQUEST)
    manager.complete_store(keys(1, 2), NO_REQUEST)
    manager.prepare_load(keys(1), NO_REQUEST)
    with pytest.raises(ValueError, match="1 of which nobody loads"):
        manager.complete_load(keys(1, 2), NO_REQUEST)
    manager.complete_load(keys(1), NO_REQUEST)  # the refusal has let go of nothing
    manager._ledger.check()
    assert manager._ledger.num_leases == 0


def test_no_chunks_means_that_nothing_is_stored() -> None:
    manager = KVFerryOffloadingManager(0)
    assert manager.prepare_store(keys(1), NO_REQUEST) is None
    assert manager.lookup(key(1), NO_REQUEST) is LookupResult.MISS
    manager.get_stats()
    theirs = CPUOffloadingManager(0).get_stats()
    assert theirs is not None
    assert manager.get_stats().reduce() == theirs.reduce()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"num_chunks": -1}, "num_chunks is -1; allowed: 0 or more"),
        ({"num_chunks": 4, "cache_policy": "nope"}, "'nope' is not known"),
        (
            {"num_chunks": 4, "cache_policy": "Nope", "cache_policy_module_path": "collections"},
            "'collections:Nope' cannot be imported",
        ),
    ],
)
def test_what_is_not_allowed_is_refused_at_once(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        KVFerryOffloadingManager(**arguments)


def test_a_policy_comes_by_import_path() -> None:
    manager = KVFerryOffloadingManager(2, "LRU", "kvferry.engine.policy")
    assert isinstance(manager._policy, LRU)
    manager.prepare_store(keys(1, 2), NO_REQUEST)
    manager.complete_store(keys(1, 2), NO_REQUEST)
    manager.touch(keys(1), NO_REQUEST)
    output = manager.prepare_store(keys(3), NO_REQUEST)
    assert output is not None
    assert output.evicted_keys == keys(2)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_by_name_survives_a_schedule(policy: str) -> None:
    """Against vLLM's LRU only what no policy may change: what is found and held, never lost."""
    print("seed 5")
    pair = Pair(5, positions=True, num_chunks=64)
    pair.ours = KVFerryOffloadingManager(64, policy, enable_events=True)
    for _ in range(4):
        pair.begin()
    for _ in range(600):  # 4 families of 12 chunks in 2 groups do not fit in 64: it evicts
        asker = pair.random.choice(pair.askers)
        context = asker.contexts[1]
        output = pair.ours.prepare_store(asker.chain, context)
        if output is not None:
            pair.ours.complete_store(output.keys_to_store, context)
        there = [k for k in asker.chain if pair.ours.lookup(k, context) is LookupResult.HIT]
        assert there == asker.chain or output is None
        pair.ours.prepare_load(there, context)
        pair.ours.complete_load(there, context)
        pair.ours.on_request_finished(context)
        pair.askers.remove(asker)
        pair.begin()
        pair.ours._ledger.check()
    assert any(event.removed for event in pair.ours.take_events())
    assert pair.ours._ledger.num_leases == 0

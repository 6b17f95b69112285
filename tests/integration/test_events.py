"""KV events on vLLM's real scheduler: a listener knows at any time what the host cache holds."""

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kvferry.engine.geometry import GroupGeometry
from kvferry.engine.planner import Part
from kvferry.engine.rules import GroupKind, GroupRule
from kvferry.engine.types import NO_BLOCK, BlockId, Direction, GroupId
from kvferry.integration.vllm.config import OffloadingOptions, SimpleOptions
from kvferry.integration.vllm.events import describe
from real_scheduler import Engine, tokens
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_GPU, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.request import RequestStatus

ALL = {"offload_prompt_only": False, "self_describing_kv_events": True, "min_load_tokens": 0}
CONNECTORS: dict[str, dict[str, Any]] = {
    "simple": {"connector": "KVFerrySimpleConnector", "extra_config": {"min_load_tokens": 0}},
    "general": {"connector": "KVFerryOffloadingConnector", "extra_config": ALL},
    "general-2-blocks": {
        "connector": "KVFerryOffloadingConnector",
        "extra_config": {**ALL, "blocks_per_chunk": 2},
    },
    "general-keys-only": {
        "connector": "KVFerryOffloadingConnector",
        "extra_config": {**ALL, "self_describing_kv_events": False, "blocks_per_chunk": 2},
    },
}

MakeEngine = Callable[..., Engine]


class Listener:
    """Takes the place of the publisher: follows the events, and holds them to be consistent.

    Two chunks that differ in their last blocks both name the first ones, so it counts.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.events: list[Any] = []
        self.on_host: Counter[tuple[int, Any]] = Counter()
        engine.scheduler.kv_event_publisher = self

    def publish(self, batch: Any) -> None:
        self.take(batch.events)

    def take(self, events: Iterable[Any]) -> None:
        for event in events:
            self.events.append(event)
            if getattr(event, "medium", None) != MEDIUM_CPU:
                continue
            chunk = Counter((event.group_idx, one) for one in event.block_hashes)
            if isinstance(event, BlockStored):
                key = (event.group_idx, event.block_hashes[-1])
                assert key not in self.on_host, "announced twice"
                self.on_host += chunk
            else:
                assert isinstance(event, BlockRemoved)
                assert chunk <= self.on_host, "taken back without having been announced"
                self.on_host -= chunk

    def stored(self, medium: str) -> list[BlockStored]:
        return [e for e in self.events if isinstance(e, BlockStored) and e.medium == medium]

    def check(self) -> None:
        """What was told is what the ledger holds, block by block."""
        self.take(self.engine.connector.take_events())
        core, events = self.engine.manager.core, self.engine.manager.events
        keys = {(0, maybe_convert_block_hash(key)) for key in core.ledger._readable[0]}
        per_chunk = core.groups[0].blocks_per_chunk if events._describe else 1
        assert keys <= self.on_host.keys()
        assert self.on_host.total() == per_chunk * len(keys)


@pytest.fixture(params=CONNECTORS)
def make_engine(request: pytest.FixtureRequest, model_config_dir: Path) -> MakeEngine:
    return partial(Engine, model_config_dir, kv_events=True, **CONNECTORS[request.param])


def test_an_event_says_of_a_block_what_vllm_says_of_it(make_engine: MakeEngine) -> None:
    """Hash, parent, tokens, size and extra keys are those of the GPU's own event."""
    engine = make_engine()
    listener = Listener(engine)
    engine.add("a", tokens(0, 25), max_tokens=8)
    request = engine.request("b", tokens(1, 17))
    request.cache_salt = "salt"
    request.block_hashes.clear()
    request.update_block_hashes()
    engine.scheduler.add_request(request)
    engine.run()
    engine.run()
    listener.check()
    on_gpu, on_host = by_block(listener.stored(MEDIUM_GPU)), by_block(listener.stored(MEDIUM_CPU))
    assert len(on_host) >= 6
    if not engine.manager.events._describe:
        assert set(on_host.values()) == {(None, (), 0, None)}
        return
    assert on_host == {one: on_gpu[one] for one in on_host}
    assert any(extra == ("salt",) for *_, extra in on_host.values())
    kinds = {(e.kv_cache_spec_kind, e.locality) for e in listener.stored(MEDIUM_CPU)}
    assert kinds == {("full_attention", "LOCAL")}


def by_block(events: list[BlockStored]) -> dict[Any, tuple[Any, ...]]:
    """Block hash -> parent, tokens, block size, extra keys."""
    found: dict[Any, tuple[Any, ...]] = {}
    for event in events:
        parent = event.parent_block_hash
        for i, one in enumerate(event.block_hashes):
            part = event.token_ids[i * event.block_size : (i + 1) * event.block_size]
            extra = event.extra_keys[i] if event.extra_keys else None
            found[one] = (parent, tuple(part), event.block_size, extra)
            parent = one
    return found


def test_a_chunk_is_announced_when_its_store_is_good_and_not_before(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine()
    listener = Listener(engine)
    engine.add("good", tokens(0, 9), max_tokens=8)
    engine.add("bad", tokens(1, 9), max_tokens=8)
    engine.step()
    engine.step()
    good, bad = engine.ranks.of(Direction.STORE)
    assert not listener.on_host
    engine.ranks.complete(good.job_id)
    engine.ranks.complete(bad.job_id, error="no")
    engine.step()
    assert listener.on_host
    listener.check()
    assert all(key in listener.on_host for key in keys_of(engine, tokens(0, 9)))
    assert not any(key in listener.on_host for key in keys_of(engine, tokens(1, 9)))
    assert not engine.manager.events._planned.keys() & {good.job_id, bad.job_id}


def keys_of(engine: Engine, prompt: list[int]) -> list[tuple[int, Any]]:
    (group,) = engine.manager.core.groups
    hashes = engine.request("peek", prompt).block_hashes
    keys = group.keys(hashes, 0, group.num_hashed_chunks(hashes))
    return [(0, maybe_convert_block_hash(key)) for key in keys]


def test_what_is_lost_is_taken_back(make_engine: MakeEngine) -> None:
    """Evicted, then by a failed load, then by a reset."""
    engine = make_engine(num_slots=4)
    listener = Listener(engine)
    engine.add("a", tokens(0, 9))
    engine.run()
    engine.run()
    listener.check()
    first = set(listener.on_host)
    engine.add("b", tokens(1, 33))
    engine.run()
    engine.run()
    listener.check()
    assert first - listener.on_host.keys()  # evicted
    engine.reset_gpu_cache()
    engine.add("c", tokens(1, 33))
    engine.step()
    (load,) = engine.ranks.of(Direction.LOAD)
    engine.ranks.complete(load.job_id, error="no")
    engine.step()
    listener.check()
    assert not listener.on_host  # all of it was loaded
    engine.run()
    engine.run()
    listener.check()
    assert listener.on_host
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.add("d", tokens(2, 3))
    engine.run()
    listener.check()
    assert not listener.on_host


@pytest.mark.parametrize("seed", range(4))
def test_a_listener_knows_what_the_host_holds(make_engine: MakeEngine, seed: int) -> None:
    """300 random steps: shared prefixes, evictions, failures, aborts, preemptions and resets."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    engine = make_engine(num_slots=12, num_blocks=40, async_scheduling=bool(seed % 2))
    listener = Listener(engine)
    families = [tokens(family, 60) for family in range(4)]
    for step in range(300):
        if rng.random() < 0.4:
            prompt = [*rng.choice(families)[: rng.randrange(1, 60)], rng.randrange(8, 60)]
            engine.add(f"r{step}", prompt, max_tokens=rng.randrange(1, 8))
        engine.step()
        for job_id in list(engine.ranks.open):
            if rng.random() < 0.5:
                engine.ranks.complete(job_id, error="no" if rng.random() < 0.1 else None)
        if rng.random() < 0.1 and engine.scheduler.requests:
            victim = rng.choice(list(engine.scheduler.requests))
            engine.scheduler.finish_requests(victim, RequestStatus.FINISHED_ABORTED)
        if rng.random() < 0.1:
            with contextlib.suppress(RuntimeError):  # vLLM refuses while a load is in flight
                engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        if rng.random() < 0.05:
            engine.connector.reset_cache()
        listener.check()
    engine.run()
    engine.step()
    listener.check()
    assert engine.manager.core.ledger.num_evicted > 0
    assert engine.snapshot()["failed_stores"] > 0
    events = engine.manager.events
    assert not events._requests
    assert not events._planned
    assert len(events._hashes) in (0, listener.on_host.total() / 2)  # one a chunk that is there


def test_nothing_is_kept_where_nobody_listens(model_config_dir: Path) -> None:
    engine = Engine(model_config_dir, num_slots=4, **CONNECTORS["general-2-blocks"])
    for i in range(20):
        engine.add(f"r{i}", tokens(i, 20))
        engine.run()
    assert engine.manager.core.ledger.num_evicted > 0
    assert engine.manager.events is None
    assert engine.manager.core.ledger.journal is None
    assert list(engine.connector.take_events()) == []


def test_of_a_chunk_that_a_window_has_partly_left_the_rest_is_described(
    model_config_dir: Path,
) -> None:
    engine = Engine(model_config_dir)
    request = engine.request("a", tokens(0, 24))
    rule = GroupRule(GroupId(0), GroupKind.WINDOW, chunk_tokens=12, window_tokens=4)
    geometry = GroupGeometry(rule, block_tokens=4, hash_tokens=4)
    keys = tuple(geometry.keys(request.block_hashes, 1, 2))
    blocks = (NO_BLOCK, BlockId(7), BlockId(8))
    (found,) = describe(request, Part(geometry, keys, blocks))
    assert found.hashes == tuple(request.block_hashes[4:6])
    assert found.parent == request.block_hashes[3]
    assert found.token_ids == tuple(request.all_token_ids[16:24])
    assert found.block_size == 4


def test_the_option_is_a_flag() -> None:
    assert not OffloadingOptions.parse({}).describes_events
    assert OffloadingOptions.parse({"self_describing_kv_events": True}).describes_events
    assert SimpleOptions.parse({}).describes_events
    with pytest.raises(ValueError, match="self_describing_kv_events='yes'; allowed: true or false"):
        OffloadingOptions.parse({"self_describing_kv_events": "yes"})

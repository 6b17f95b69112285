"""Lazy stores on vLLM's real scheduler: only what is about to be evicted, and in time."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kvferry.engine.types import Direction
from real_scheduler import Engine, tokens
from vllm.distributed.kv_events import MEDIUM_CPU
from vllm.v1.request import RequestStatus

LAZY = {"lazy_offload": True, "min_load_tokens": 0}
STEP_TOKENS = 16
"""At most 16 blocks a step (16 requests that begin one): 32 blocks of the queue are read ahead."""

WAITING = RequestStatus.WAITING_FOR_REMOTE_KVS
MakeEngine = Callable[..., Engine]


@pytest.fixture(params=["sync", "async"])
def make_engine(request: pytest.FixtureRequest, model_config_dir: Path) -> MakeEngine:
    return partial(
        Engine,
        model_config_dir,
        extra_config=LAZY,
        max_batched_tokens=STEP_TOKENS,
        async_scheduling=request.param == "async",
    )


def free_blocks(engine: Engine) -> list[Any]:
    return list(engine.scheduler.kv_cache_manager.block_pool.free_block_queue.get_all_free_blocks())


def test_nothing_is_stored_while_eviction_is_far(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=100)
    engine.add("a", tokens(0, 41))
    engine.run()
    assert engine.snapshot()["ready"] == 0
    assert not engine.connector.has_pending_push_work()
    engine.check_idle()


def test_what_is_evicted_is_served_from_the_host(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=21, num_slots=64)
    prompt = tokens(0, 41)
    engine.add("a", prompt)
    engine.run()
    for i in range(1, 4):
        engine.add(f"other-{i}", tokens(i, 49))
        engine.run()
    assert not any(block.block_hash for block in free_blocks(engine) if was_of(engine, block, "a"))
    answer = engine.connector.get_num_new_matched_tokens(engine.request("again", prompt), 0)
    assert answer == (40, True)
    engine.manager.core.forget("again")
    engine.check_idle()


def was_of(engine: Engine, block: Any, name: str) -> bool:
    """Whether the block holds one of the first request's chunks."""
    hashes = set(engine.request(name, tokens(0, 41)).block_hashes)
    return block.block_hash is not None and block.block_hash[:-4] in hashes


def test_a_store_belongs_to_no_request_and_comes_before_the_forward(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(num_blocks=21)
    seen = []
    for i in range(4):
        engine.add(f"r{i}", tokens(i, 41))
        while engine.scheduler.has_requests():
            orders = engine.step().kv_connector_metadata.orders
            seen += orders.prior_stores
            assert not orders.stores
            engine.ranks.complete_all()
    assert seen
    assert {order.request_id for order in seen} == {None}
    assert engine.snapshot()["stored_chunks"] > 20


@pytest.mark.parametrize(("num_prompt", "num_answer"), [(37, 6), (14, 1), (3, 40)])
def test_stores_are_planned_before_the_allocator_takes_their_blocks(
    make_engine: MakeEngine, num_prompt: int, num_answer: int
) -> None:
    """With the target that we keep nothing is given away that is not on the host by then, and the
    allocator meets no store that was planned in the same step."""
    engine = make_engine(num_blocks=81, num_slots=400)
    pool = engine.scheduler.kv_cache_manager.block_pool
    lost, known = [], set()
    evict = pool._maybe_evict_cached_block

    def evicted(block: Any) -> bool:
        if block.block_hash is not None and block.block_hash[:-4] not in known:
            lost.append(block.block_id)
        return bool(evict(block))

    pool._maybe_evict_cached_block = evicted
    for i in range(2000 // (num_prompt + num_answer)):
        engine.add(f"r{i}", tokens(i, num_prompt), max_tokens=num_answer)
        if i % 3 and num_prompt != 14:  # three together, the short ones each alone
            continue
        while engine.scheduler.has_requests():
            engine.step()
            engine.ranks.complete_all()
            ledger = engine.manager.core.ledger
            known = {*ledger._readable[0], *ledger._writing[0]}
    assert pool.metrics_collector is None
    assert engine.snapshot()["stored_chunks"] > 150
    assert lost == []
    assert engine.ranks.flushed == []


def test_vllms_queue_is_read_and_nothing_else(make_engine: MakeEngine) -> None:
    """Same blocks in the same order, no reference, no hash changed, before and after planning."""
    engine = make_engine(num_blocks=25)
    pool = engine.scheduler.kv_cache_manager.block_pool
    plan = engine.manager.lazy.plan
    num_planned = 0

    def state() -> list[Any]:
        order = [block.block_id for block in free_blocks(engine)]
        return [order, [(b.ref_cnt, b.block_hash, b.block_hash_num_tokens) for b in pool.blocks]]

    def watched() -> Any:
        nonlocal num_planned
        before = state()
        store = plan()
        assert state() == before
        num_planned += store is not None
        return store

    engine.manager.lazy.plan = watched
    for i in range(6):
        engine.add(f"r{i}", tokens(i, 41), max_tokens=4)
        engine.run()
    assert num_planned > 3


def test_a_partial_block_is_not_stored(make_engine: MakeEngine) -> None:
    """A block that is registered under a hash of part of its tokens is no full block."""
    engine = make_engine(num_blocks=100)
    engine.add("a", tokens(0, 41))
    engine.run()
    cached = [block for block in free_blocks(engine) if block.block_hash is not None]
    assert len(cached) == 10
    for block, num_tokens in zip(cached, (2, None, 37), strict=False):
        block._block_hash_num_tokens = num_tokens
    (part,), num_read = engine.manager.lazy._read(1000)
    assert num_read == 99
    assert list(part.blocks) == [block.block_id for block in cached[3:]]


def test_the_cost_of_a_step_does_not_grow_with_the_pool(make_engine: MakeEngine) -> None:
    """Blocks read, over all steps, stay within a small multiple of the blocks given out."""
    engine = make_engine(num_blocks=2000, num_slots=4000)
    queue = engine.scheduler.kv_cache_manager.block_pool.free_block_queue
    walk = queue.iter_blocks_after
    num_read = longest = 0

    def counted(cursor: Any) -> Any:
        nonlocal num_read, longest
        for here, block in enumerate(walk(cursor), start=1):
            num_read += 1
            longest = max(longest, here)
            yield block

    queue.iter_blocks_after = counted
    num_blocks = 0
    for i in range(60):
        engine.add(f"r{i}", tokens(i, 200), max_tokens=8)
        engine.run()
        num_blocks += 52
    assert engine.snapshot()["stored_chunks"] > 500
    assert longest <= 33
    assert num_read <= 4 * num_blocks


def test_copies_of_one_chunk_are_stored_once(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=100)
    for name in ("a", "b"):  # "b" hits the first block, and must compute the last itself
        engine.add(name, tokens(0, 9)[:8])
    engine.run()
    cached = [block for block in free_blocks(engine) if block.block_hash is not None]
    (part,), _ = engine.manager.lazy._read(1000)
    assert (len(cached), len(part.keys)) == (3, 2)


def test_a_full_host_is_asked_again_and_makes_room(make_engine: MakeEngine) -> None:
    """With fewer slots than blocks about to go, the first to go are stored first."""
    engine = make_engine(num_blocks=21, num_slots=3)
    for i in range(6):
        engine.add(f"r{i}", tokens(i, 41))
        engine.run()
    engine.check_idle()
    assert engine.snapshot()["ready"] == 3
    assert engine.snapshot()["stored_chunks"] > 20  # looking only when half is gone finds 16


def test_its_event_carries_what_is_known(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=21, kv_events=True)
    for i in range(4):
        engine.add(f"r{i}", tokens(i, 41))
        engine.run()
    assert engine.snapshot()["stored_chunks"] > 0
    noted = engine.manager.events._planned
    assert len(noted) <= engine.snapshot()["jobs"]
    events = [e for e in engine.connector.take_events() if getattr(e, "medium", "") == MEDIUM_CPU]
    events = events or watch_events(engine)
    assert {(e.block_size, tuple(e.token_ids), e.parent_block_hash) for e in events} == {
        (4, (), None)
    }
    assert {(len(e.block_hashes), e.group_idx, e.kv_cache_spec_kind) for e in events} == {
        (1, 0, "full_attention")
    }


def watch_events(engine: Engine) -> list[Any]:
    """The events of a few more requests, taken from the scheduler's publisher."""
    seen: list[Any] = []

    class Publisher:
        def publish(self, batch: Any) -> None:
            seen.extend(batch.events)

    engine.scheduler.kv_event_publisher = Publisher()
    for i in range(10, 14):
        engine.add(f"r{i}", tokens(i, 41))
        engine.run()
    stored = [e for e in seen if type(e).__name__ == "BlockStored" and e.medium == MEDIUM_CPU]
    assert stored
    return stored


def test_a_bypassing_request_is_stored_like_any_other(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=21, num_slots=64)
    engine.add("bypass", tokens(0, 41), prompt_logprobs=1)
    engine.run()
    for i in range(1, 4):
        engine.add(f"r{i}", tokens(i, 41))
        engine.run()
    reads = engine.request("reads", tokens(0, 41))
    assert engine.connector.get_num_new_matched_tokens(reads, 0) == (40, True)


# Reset


def test_what_is_from_before_a_reset_is_not_stored(make_engine: MakeEngine) -> None:
    """I6 where vLLM keeps its own cache because a request runs: neither that request's blocks, nor
    what it goes on to compute, nor what others compute behind a hit in it, may be found later."""
    engine = make_engine(num_blocks=41, num_slots=200)
    old = tokens(0, 29)
    engine.add("runs", old, max_tokens=20)
    for _ in range(4):
        engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_connector=True) is False
    follower = [*old[:24], *tokens(1, 9)]
    engine.add("follows", follower)
    engine.run()
    for i in range(2, 8):
        engine.add(f"clean-{i}", tokens(i, 41))
        engine.run()
    held = set(engine.manager.core.ledger._readable[0])
    runs = engine.request("peek", [*old, *[engine.sampled_token] * 19])
    assert not held & set(runs.block_hashes)
    assert not held & set(engine.request("peek", follower).block_hashes)
    assert held & set(engine.request("peek", tokens(2, 41)).block_hashes)
    # Computed anew, the same tokens are stored again.
    engine.reset_gpu_cache()
    engine.add("anew", old)
    engine.run()
    for i in range(8, 12):
        engine.add(f"clean-{i}", tokens(i, 41))
        engine.run()
    assert set(engine.request("peek", old).block_hashes[:7]) <= set(
        engine.manager.core.ledger._readable[0]
    )
    engine.check_idle()


@pytest.mark.parametrize("seed", range(4))
def test_random_schedules(make_engine: MakeEngine, seed: int) -> None:
    """300 steps: every block that is stored holds, when the order goes out, what it is stored as;
    whoever is given a block whose store is under way finds that store flushed."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    engine = make_engine(num_slots=60, num_blocks=40)
    pool = engine.scheduler.kv_cache_manager.block_pool
    families = [tokens(family, 60) for family in range(4)]
    for step in range(300):
        if rng.random() < 0.4:
            prompt = [*rng.choice(families)[: rng.randrange(1, 60)], rng.randrange(8, 60)]
            engine.add(f"r{step}", prompt, max_tokens=rng.randrange(1, 8))
        running = {job: set(order.segments[0].blocks) for job, order in engine.ranks.open.items()}
        output = engine.step()
        orders = output.kv_connector_metadata.orders
        for order in orders.prior_stores:
            running[order.job_id] = set(order.segments[0].blocks)
            for block in order.segments[0].blocks:
                assert pool.blocks[block].block_hash_num_tokens % 4 == 0
        fresh = {b for new in output.scheduled_new_reqs for b in new.block_ids[0]}
        fresh |= {b for new in output.scheduled_cached_reqs.new_block_ids if new for b in new[0]}
        hit = {job for job, blocks in running.items() if blocks & fresh}
        stores = {o.job_id for o in engine.ranks.of(Direction.STORE)} & hit
        assert not stores - set(orders.flush) - loads_of_hits(output, running)
        for job_id in list(engine.ranks.open):
            if rng.random() < 0.5:
                engine.ranks.complete(job_id, error="no" if rng.random() < 0.1 else None)
        if rng.random() < 0.1 and engine.scheduler.requests:
            victim = rng.choice(list(engine.scheduler.requests))
            engine.scheduler.finish_requests(victim, RequestStatus.FINISHED_ABORTED)
        loading = any(one.status is WAITING for one in engine.scheduler.requests.values())
        loading |= bool(engine.ranks.of(Direction.LOAD) or engine.ranks._finished)
        if rng.random() < 0.05 and not loading:  # else vLLM refuses
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        if rng.random() < 0.03:
            engine.connector.reset_cache()
    engine.run()
    engine.check_idle()
    assert engine.snapshot()["stored_chunks"] > 50
    assert engine.snapshot()["loaded_chunks"] > 20


def loads_of_hits(output: Any, running: dict[Any, set[int]]) -> set[Any]:
    """Stores whose blocks a new request only reads: it hit them in vLLM's own cache."""
    local = set()
    for new in output.scheduled_new_reqs:
        local |= set(new.block_ids[0][: new.num_computed_tokens // 4])
    return {job for job, blocks in running.items() if blocks & local}

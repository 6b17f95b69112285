"""Models with several KV cache groups on vLLM's real scheduler: windows, draft groups, chunk sizes.

Every step is held to the invariants by ``SymbolicEngine``: what a token looks back at must be there
in each group, and what the host says it has must be what its key says.
"""

import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kv_groups import BLOCK_TOKENS, full, grouped_config, local, mla, window
from kvferry.engine.types import Direction, JobId
from kvferry.integration.vllm.metadata import RankCapacity
from real_scheduler import tokens
from symbolic_ranks import SymbolicEngine
from tiny_models import build_model, shared_prefix_prompts, tiny_engine
from vllm.v1.kv_cache_interface import KVCacheSpec

MakeEngine = Callable[..., SymbolicEngine]


@pytest.fixture
def make_engine(model_config_dir: Path) -> MakeEngine:
    return partial(make, model_config_dir)


def make(
    model: Path,
    specs: list[KVCacheSpec],
    *,
    draft: set[int] | None = None,
    num_blocks: int = 120,
    num_slots: int = 200,
    retention: int | None = None,
    extra: dict[str, Any] | None = None,
    **kwargs: Any,
) -> SymbolicEngine:
    return SymbolicEngine(
        model,
        connector="KVFerryOffloadingConnector",
        num_blocks=num_blocks,
        num_slots=num_slots,
        kv_cache_config=grouped_config(num_blocks, specs, draft, retention),
        extra_config={"min_load_tokens": 0, "offload_prompt_only": False, **(extra or {})},
        **kwargs,
    )


def end_all(engine: SymbolicEngine) -> None:
    for job_id in list(engine.ranks.open):
        for rank in sorted(engine.ranks.unanswered[job_id]):
            engine.ranks.report(job_id, rank)


def run(engine: SymbolicEngine) -> None:
    """Until nothing is left, completing every job; holds the contents after every step."""
    for _ in range(300):
        if not engine.scheduler.has_requests() and not engine.ranks.open:
            break
        engine.step()
        engine.check_content()
        end_all(engine)
    assert not engine.scheduler.has_requests()
    engine.step()
    engine.check_idle()


def crowd(
    engine: SymbolicEngine,
    seed: int,
    *,
    num_requests: int,
    ended_share: float,
    reset_share: float = 0.0,
) -> None:
    """Prompts in pieces, answers that cross blocks, pools that evict on both sides.

    Jobs end after ``ended_share`` of the steps; vLLM's cache is reset behind ``reset_share`` of the
    requests.
    """
    print(f"seed {seed}")
    draw = random.Random(seed)
    families = [tokens(i, 40) for i in range(2)]
    for i in range(num_requests):
        prompt = [*families[draw.randrange(2)][: draw.randint(1, 40)], 8 + i % 7]
        engine.add(f"r{i}", prompt, max_tokens=draw.randint(1, 6))
        for _ in range(draw.randint(1, 5)):
            engine.step()
            engine.check_content()
            if draw.random() < ended_share:
                end_all(engine)
        if reset_share and draw.random() < reset_share:
            engine.scheduler.reset_prefix_cache()
    run(engine)


def readable(engine: SymbolicEngine, group: int, prompt: list[int]) -> list[int]:
    """The chunks of a prompt that one group could serve now."""
    core = engine.manager.core
    geometry = core.groups[group]
    hashes = engine.request("peek", prompt).block_hashes
    keys = geometry.keys(hashes, 0, geometry.num_hashed_chunks(hashes))
    return [i for i, there in enumerate(core.ledger.readable_at(geometry.group, keys)) if there]


def hit(engine: SymbolicEngine, prompt: list[int], **kwargs: Any) -> int | None:
    """What the connector would answer to a new request, asked without a trace."""
    request = engine.request("peek", prompt)
    request.kv_transfer_params = kwargs.get("kv_transfer_params")
    answer = engine.connector.get_num_new_matched_tokens(request, 0)
    engine.connector.request_finished_all_groups(request, tuple([] for _ in engine.groups))
    return answer[0]


MODELS: dict[str, list[KVCacheSpec]] = {
    "full and window": [full(), window(8)],
    "two windows": [full(), window(8), window(12)],
    "windows only": [window(12)],
    "local": [full(), local(16)],
    "mla": [mla()],
    "mla and window": [mla(), window(8)],
}


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_loaded_is_what_belongs_there(
    make_engine: MakeEngine, name: str, blocks_per_chunk: int, is_async: bool
) -> None:
    """Prompts in pieces, windows that slide over chunks, a pool that evicts, few GPU blocks."""
    seed = 3
    engine = make_engine(
        MODELS[name],
        num_blocks=60,
        num_slots=20,
        max_batched_tokens=13,
        async_scheduling=is_async,
        extra={"blocks_per_chunk": blocks_per_chunk},
    )
    crowd(engine, seed, num_requests=40, ended_share=0.6, reset_share=0.2)
    counts = engine.snapshot()
    assert counts["loaded_chunks"] > 5, f"seed {seed}: {counts}"
    assert counts["evicted_chunks"] > 5, f"seed {seed}: {counts}"


def test_s8_a_block_that_left_the_window_while_the_pool_was_full_is_not_stored(
    make_engine: MakeEngine,
) -> None:
    """A window of 2 blocks; no slot for one step; the block is freed and given to somebody."""
    engine = make_engine([window(2 * BLOCK_TOKENS)], num_slots=2, max_batched_tokens=8)
    engine.add("holds", tokens(1, 8))
    engine.step()  # both slots are being written
    assert engine.snapshot()["writing"] == 2
    prompt = tokens(0, 40)
    engine.add("a", prompt, max_tokens=2)
    engine.step()
    assert not [order for order in engine.ranks.open.values() if order.request_id == "a"]
    for _ in range(2):  # its first blocks slide out
        engine.step()
    (table,) = engine.scheduler.kv_cache_manager.get_block_ids("a")
    assert table[0] == 0
    end_all(engine)
    run(engine)
    assert 0 not in readable(engine, 0, prompt)
    assert len(readable(engine, 0, prompt)) == 2


def test_s12_a_draft_groups_last_chunk_waits_and_others_keep_their_hits(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine([full(), full()], draft={1})
    prompt = tokens(0, 8)
    engine.add("a", prompt, max_tokens=9)
    while engine.scheduler.requests["a"].num_computed_tokens < 12:
        engine.step()
        end_all(engine)
    engine.step()
    end_all(engine)
    engine.step()
    whole = [*prompt, *[engine.sampled_token] * 4]
    assert readable(engine, 0, whole) == [0, 1, 2]
    assert readable(engine, 1, whole) == [0, 1]  # volatile while it decodes
    assert hit(engine, [*prompt, 8]) == 4  # a draft group needs one chunk more than it uses
    assert hit(engine, [*whole, 8]) == 4
    run(engine)
    assert readable(engine, 1, [*whole, *[engine.sampled_token] * 4]) == [0, 1, 2, 3]
    assert hit(engine, [*whole, *[engine.sampled_token] * 4, 8]) == 12


@pytest.mark.parametrize("connector", ["KVFerryOffloadingConnector", "KVFerrySimpleConnector"])
def test_requests_that_load_do_not_take_from_each_other_what_they_need_to_go_on(
    model_config_dir: Path, connector: str
) -> None:
    """Both fit in the pool while they load. vLLM counts too few blocks as reserved for the first,
    which then stands at the head of the queue and waits for what the second holds."""
    num_blocks = 42
    engine = SymbolicEngine(
        model_config_dir,
        connector=connector,
        num_blocks=num_blocks,
        num_slots=200,
        max_batched_tokens=32,
        kv_cache_config=grouped_config(num_blocks, [full(), window(8), window(8)]),
        extra_config={"min_load_tokens": 0},
    )
    prompts = {"a": tokens(0, 49), "b": tokens(1, 28)}
    for name, prompt in prompts.items():
        engine.add(f"{name} before", [*prompt[:20], 8])
    run(engine)
    engine.reset_gpu_cache()
    for name, prompt in prompts.items():
        engine.add(name, prompt, max_tokens=2)
    run(engine)
    assert engine.snapshot()["hits"] == 2


@pytest.mark.parametrize(
    "spec", [full(), window(8), local(16), mla()], ids=lambda s: type(s).__name__
)
def test_where_a_load_fails_nothing_is_read_that_was_not_loaded(
    make_engine: MakeEngine, spec: KVCacheSpec
) -> None:
    """vLLM would go on in front of the block that failed: of a window's blocks before it there are
    none, since the hit did not need them."""
    engine = make_engine([spec])
    prompt = [*tokens(0, 28), 8]
    engine.add("a", prompt)
    run(engine)
    engine.reset_gpu_cache()
    engine.add("b", prompt, max_tokens=3)
    engine.step()
    (job_id,) = engine.ranks.open
    engine.ranks.report(job_id, 0, error="told to fail")
    run(engine)
    assert engine.snapshot()["failed_loads"] == 1


@pytest.mark.parametrize("connector", ["KVFerryOffloadingConnector", "KVFerrySimpleConnector"])
def test_a_long_load_is_not_overtaken_by_short_ones_for_ever(
    model_config_dir: Path, connector: str
) -> None:
    """A short one comes with every step, and each loads for three: there is always one under way,
    and beside it the long one does not fit."""
    num_blocks = 46
    engine = SymbolicEngine(
        model_config_dir,
        connector=connector,
        num_blocks=num_blocks,
        num_slots=200,
        kv_cache_config=grouped_config(num_blocks, [full()]),
        extra_config={"min_load_tokens": 0},
    )
    long, *short = [[*tokens(i, 40 if i else 100), 8] for i in range(6)]
    for i, prompt in enumerate([long, *short]):
        engine.add(f"before {i}", prompt)
        run(engine)
    engine.reset_gpu_cache()
    ages: Counter[JobId] = Counter()
    for i in range(40):
        engine.add(f"short {i}", short[i % len(short)])
        if i == 3:
            engine.add("long", long)
        engine.step()
        engine.scheduler.reset_prefix_cache()  # what comes again loads again
        ages.update(list(engine.ranks.open))
        for job_id, order in list(engine.ranks.open.items()):
            if order.direction is Direction.STORE or ages[job_id] == 3:
                engine.ranks.report(job_id, 0)
    assert "long" not in engine.scheduler.requests
    run(engine)


def test_a_windows_chunks_far_back_are_not_needed_for_a_hit(make_engine: MakeEngine) -> None:
    engine = make_engine([full(), window(8)])
    prompt = [*tokens(0, 40), 8]
    engine.add("a", prompt)
    run(engine)
    engine.reset_gpu_cache()
    engine.add("b", prompt)
    engine.step()
    (load,) = [o for o in engine.ranks.open.values() if o.direction is Direction.LOAD]
    assert {s.group: len(s.slots) for s in load.segments} == {0: 10, 1: 2}
    run(engine)


def test_what_no_hit_can_use_is_not_stored(make_engine: MakeEngine) -> None:
    """A token looks back to the beginning of its own 16: nobody needs the last chunk of these."""
    engine = make_engine([full(), local(16)])
    prompt = [*tokens(0, 40), 8]
    engine.add("a", prompt)
    run(engine)
    assert readable(engine, 0, prompt) == list(range(10))
    assert readable(engine, 1, prompt) == [0, 1, 2, 4, 5, 6, 8, 9]
    engine.reset_gpu_cache()
    assert hit(engine, prompt) == 40


@pytest.mark.parametrize(("limit", "right"), [(0, 0), (7, 4), (8, 8), (100, 20)])
def test_max_load_tokens_bounds_a_hit(make_engine: MakeEngine, limit: int, right: int) -> None:
    engine = make_engine([full(), window(8)])
    prompt = [*tokens(0, 20), 8]
    engine.add("a", prompt)
    run(engine)
    assert hit(engine, prompt, kv_transfer_params={"max_load_tokens": limit}) == right


@pytest.mark.parametrize(("limit", "right"), [(0, 0), (7, 1), (8, 2), (100, 5)])
def test_max_offload_tokens_bounds_what_is_stored(
    make_engine: MakeEngine, limit: int, right: int
) -> None:
    engine = make_engine([full(), window(8)])
    prompt = [*tokens(0, 20), 8]
    request = engine.request("a", prompt)
    request.kv_transfer_params = {"max_offload_tokens": limit}
    engine.scheduler.add_request(request)
    run(engine)
    assert readable(engine, 0, prompt) == list(range(right))


def test_store_threshold_counts_offers_of_every_group(make_engine: MakeEngine) -> None:
    engine = make_engine([full(), window(8)], extra={"store_threshold": 2})
    prompt = [*tokens(0, 12), 8]
    stored = []
    for i in range(3):
        engine.add(f"r{i}", prompt)
        run(engine)
        engine.reset_gpu_cache()
        stored.append(engine.snapshot()["stored_chunks"])
    assert stored == [0, 6, 6]


def test_offload_prompt_only_leaves_out_what_is_sampled(make_engine: MakeEngine) -> None:
    engine = make_engine([full(), window(8)], extra={"offload_prompt_only": True})
    prompt = tokens(0, 10)
    engine.add("a", prompt, max_tokens=8)
    run(engine)
    whole = [*prompt, *[engine.sampled_token] * 7]
    assert readable(engine, 0, whole) == readable(engine, 1, whole) == [0, 1]


def test_s13_ranks_with_bytes_for_different_numbers_of_slots_use_the_least(
    make_engine: MakeEngine,
) -> None:
    """1,200 bytes each; 100 and 120 bytes a block: 12 and 10 slots, and the 11th is never used."""
    engine = make_engine([full()], num_ranks=2, num_slots=12)
    capacities = {(0, 0): RankCapacity(1200 // 100), (0, 1): RankCapacity(1200 // 120)}
    engine.connector.set_xfer_handshake_metadata_pp_aware(capacities)
    engine.add("a", [*tokens(0, 48), 8])
    slots: set[int] = set()
    for _ in range(6):
        engine.step()
        slots |= {s for o in engine.ranks.open.values() for part in o.segments for s in part.slots}
        end_all(engine)
    assert slots == set(range(10))


def test_s19_sleep_drains_a_store_and_the_host_serves_it_after_waking(tmp_path: Path) -> None:
    """On the real engine: the hooks of vLLM 0.33 around an unmapping, one step after a store."""
    model = build_model("llama", tmp_path)
    (prompt,) = shared_prefix_prompts(5, 1)
    prompt = [*prompt, *prompt][:200]
    with tiny_engine(model, connector="KVFerryOffloadingConnector") as engine:
        worker = engine.worker._worker
        worker.poll = lambda *_args: None  # nothing is seen to end before it sleeps
        (right,) = engine.generate([prompt], max_tokens=1)
        assert engine.worker.snapshot()["jobs"] > 0
        assert engine.scheduler.reset_prefix_cache()
        engine.worker.unregister_kv_caches()
        assert engine.worker.snapshot()["jobs"] == 0
        for tensor in worker._engine._layout.tensors:
            tensor.zero_()  # what was not drained is lost
        engine.worker.restore_kv_caches()
        del worker.poll
        engine.drain()
        (again,) = engine.generate([prompt], max_tokens=1)
        assert again.num_cached_tokens == 192
        assert again.token_ids == right.token_ids
        engine.check_idle()

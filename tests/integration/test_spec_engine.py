"""vLLM's own ``OffloadingConnector`` with our spec, on the real engine: tokens are those without.

No stand-in is needed: vLLM's connector runs on the CPU platform as it is; it is only its own spec
that refuses to.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvferry.engine.devices.cpu import CpuDevice
from kvferry.engine.state import SlotState
from kvferry.engine.types import Direction
from kvferry.integration.vllm.spec import KVFerryOffloadingManager, KVFerryOffloadingWorker
from real_runs import (
    LEAST_SHARE,
    MAX_MODEL_LEN,
    PRESSURES,
    count_host_tokens,
    put_async_scheduling_back,
    without_kvferry,
)
from tiny_models import TinyEngine, build_model, shared_prefix_prompts, tiny_engine
from vllm import SamplingParams

SEED = 21
IS_SLOW = os.environ.get("KVFERRY_SLOW") == "1"
PRESSURE: dict[str, Any] = {"max_num_batched_tokens": 256, "max_num_seqs": 6}
SPEC = {
    "spec_name": "KVFerryOffloadingSpec",
    "spec_module_path": "kvferry.integration.vllm.spec",
    "offload_prompt_only": False,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def llama(models: Path) -> Path:
    return build_model("llama", models)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    print(f"seed {SEED}")
    return shared_prefix_prompts(SEED, 120)


@pytest.fixture(scope="module")
def expected(llama: Path, prompts: list[list[int]]) -> list[list[int]]:
    """The tokens of an engine without a connector and without prefix caching."""
    with tiny_engine(llama, connector=None, num_blocks=400, enable_prefix_caching=False) as engine:
        return [answer.token_ids for answer in engine.generate(prompts)]


def under_spec(
    model: Path, *, num_blocks: int = 40, overrides: dict[str, Any] | None = None, **options: Any
) -> Any:
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": "64MiB", **SPEC, **options},
    }
    settings = {**PRESSURE, **(overrides or {})}
    return tiny_engine(
        model, connector=None, num_blocks=num_blocks, kv_transfer_config=transfer, **settings
    )


def manager_of(engine: TinyEngine) -> KVFerryOffloadingManager:
    manager = engine.connector.connector_scheduler.manager
    assert isinstance(manager, KVFerryOffloadingManager)
    return manager


def worker_of(engine: TinyEngine) -> KVFerryOffloadingWorker:
    worker = engine.worker.connector_worker.worker
    assert isinstance(worker, KVFerryOffloadingWorker)
    return worker


def check_idle(engine: TinyEngine) -> None:
    engine.drain()
    manager = manager_of(engine)
    manager._ledger.check()
    assert manager._ledger.num_leases == 0
    assert worker_of(engine).snapshot()["jobs"] == 0


@pytest.mark.parametrize("options", [{}, {"blocks_per_chunk": 3, "eviction_policy": "lru"}])
def test_tokens_are_equal_when_both_pools_evict(
    llama: Path, prompts: list[list[int]], expected: list[list[int]], options: dict[str, Any]
) -> None:
    """About 170 blocks are computed, 40 fit on the "GPU" and 96 in the host cache."""
    num_slots = 96 // options.get("blocks_per_chunk", 1)
    with under_spec(llama, num_cpu_blocks=num_slots, **options) as engine:
        answers = engine.generate(prompts)
        assert engine.num_preemptions > 0
        check_idle(engine)
        manager, worker = manager_of(engine), worker_of(engine)
        assert worker.snapshot()["failed_jobs"] == 0
        assert worker.snapshot()["loaded_bytes"] > worker.snapshot()["stored_bytes"] / 2
        assert manager._ledger.num_evicted > 10
    assert [answer.token_ids for answer in answers] == expected
    assert worker.snapshot()["arena_bytes"] == 0  # closed with the engine


def test_tokens_are_equal_with_several_groups(models: Path, prompts: list[list[int]]) -> None:
    """Two groups with a window and one without, which overlay each other on the "GPU"."""
    model, some = build_model("gemma3", models), prompts[:40]
    with tiny_engine(model, connector=None, num_blocks=400, enable_prefix_caching=False) as engine:
        expected = [answer.token_ids for answer in engine.generate(some)]
    with under_spec(model, cpu_bytes_to_use="4MiB", eviction_policy="arc", num_blocks=80) as engine:
        answers = engine.generate(some)
        check_idle(engine)
        worker = worker_of(engine).snapshot()
        assert len(worker_of(engine)._engine._layout.groups) == 3
    assert [answer.token_ids for answer in answers] == expected
    assert worker["loaded_bytes"] > 0
    assert worker["failed_jobs"] == 0


@pytest.mark.skipif(not IS_SLOW, reason="takes minutes: set KVFERRY_SLOW=1")
@pytest.mark.parametrize("scheduling", ["sync", "async"])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt_oss"])
def test_tokens_are_equal_for_every_model(
    models: Path, name: str, num_ranks: int, scheduling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 requests; both pools evict, requests are preempted, prompts come in pieces."""
    model, pressure = build_model(name, models), PRESSURES[name]
    many = shared_prefix_prompts(SEED, 200)
    expected = without_kvferry(model, many, 24)
    if scheduling == "async":
        put_async_scheduling_back(monkeypatch)
    sizes = {"max_model_len": MAX_MODEL_LEN, "tensor_parallel_size": num_ranks}
    slots = pressure.num_slots
    with under_spec(
        model, num_blocks=pressure.num_blocks, num_cpu_blocks=slots, overrides=sizes
    ) as engine:
        from_host = count_host_tokens(engine)
        answers = engine.generate(many, max_tokens=24)
        engine.drain()
        ledger = manager_of(engine)._ledger
        ledger.check()
        assert ledger.num_leases == 0
        assert ledger.num_evicted > 0
    assert [answer.token_ids for answer in answers] == expected
    assert from_host.total >= LEAST_SHARE * sum(map(len, many))


@pytest.fixture(scope="module")
def engine(llama: Path) -> Iterator[TinyEngine]:
    with under_spec(llama) as engine:
        yield engine


def test_a_corrupted_byte_changes_tokens(engine: TinyEngine, prompts: list[list[int]]) -> None:
    """The comparison above is able to fail, and integrity really is off."""
    (right,) = engine.generate([prompts[0]], max_tokens=16)
    engine.drain()
    arena = worker_of(engine)._engine._arena
    assert arena.checksum_stride_bytes == 0
    arena.slots[3 :: arena.slot_stride_bytes] ^= 0x40  # in the exponent of a float
    engine.scheduler.reset_prefix_cache()
    (wrong,) = engine.generate([prompts[0]], max_tokens=16)
    assert wrong.num_cached_tokens > 0
    assert wrong.token_ids != right.token_ids
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)


def test_nothing_from_before_a_reset_is_found(engine: TinyEngine, prompts: list[list[int]]) -> None:
    """Also what was on its way to the host cache, or out of it, at the reset."""
    loaded, stored = prompts[1], shared_prefix_prompts(SEED + 1, 1)[0]
    (right,) = engine.generate([loaded])
    engine.drain()
    engine.scheduler.reset_prefix_cache()
    for name, prompt in (("loads", loaded), ("stores", stored)):
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False)
        engine.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)
    schedule = engine.scheduler.schedule

    def planned(*args: Any) -> Any:
        """Reset between a step's planning and its execution."""
        engine.scheduler.schedule = schedule
        output = schedule(*args)
        assert output.kv_connector_metadata.load_jobs
        assert output.kv_connector_metadata.store_jobs
        engine.scheduler.reset_prefix_cache(reset_connector=True)
        counts = manager_of(engine)._ledger.counts()
        assert counts[SlotState.FREE] == manager_of(engine)._ledger.num_slots
        return output

    engine.scheduler.schedule = planned
    for _ in range(1000):
        if not engine.llm.llm_engine.has_unfinished_requests():
            break
        engine.llm.llm_engine.step()
    assert engine.scheduler.schedule is not planned
    engine.drain()
    engine.scheduler.reset_prefix_cache()
    (again,) = engine.generate([loaded])
    assert again.token_ids == right.token_ids
    check_idle(engine)


def test_vllms_own_guard_stands(engine: TinyEngine, prompts: list[list[int]]) -> None:
    """What a bypassing request asks of our manager: nothing."""
    engine.generate([prompts[2]])
    engine.drain()
    engine.scheduler.reset_prefix_cache()
    looked_up: list[bytes] = []
    manager = manager_of(engine)
    lookup = manager.lookup
    manager.lookup = lambda key, context: looked_up.append(key) or lookup(key, context)
    (answer,) = engine.generate([prompts[2]], prompt_logprobs=1)
    assert looked_up == []
    assert answer.prompt_logprobs is not None
    assert all(answer.prompt_logprobs[1:])
    engine.drain()
    engine.scheduler.reset_prefix_cache()
    engine.generate([prompts[2]])
    assert looked_up  # the recorder records
    del manager.lookup
    check_idle(engine)


def test_a_broken_transfer_stops_the_engine(
    llama: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit that the docs state: vLLM's worker asserts that no transfer fails."""
    launch = CpuDevice.launch

    def broken(self: CpuDevice, piece: Any, *args: Any) -> Any:
        if piece.direction is Direction.STORE:
            raise RuntimeError("told to fail")
        return launch(self, piece, *args)

    monkeypatch.setattr(CpuDevice, "launch", broken)
    with under_spec(llama) as engine, pytest.raises(AssertionError):
        run_to_the_end(engine, prompts[:1])


def run_to_the_end(engine: TinyEngine, prompts: list[list[int]]) -> None:
    engine.generate(prompts, max_tokens=40)
    engine.drain()

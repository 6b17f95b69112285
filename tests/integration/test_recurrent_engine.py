"""Tokens with and without kvferry on vLLM's real engine, for a model with Mamba-2 layers."""

import itertools
import os
from pathlib import Path

import pytest
from real_runs import (
    CONNECTORS,
    LEAST_SHARE,
    PRESSURES,
    count_host_tokens,
    cut_pieces_at_states,
    hold_tokens_equal,
    put_async_scheduling_back,
    without_kvferry,
)
from test_spec_engine import under_spec
from tiny_models import build_model, shared_prefix_prompts, tiny_engine
from vllm.v1.kv_cache_interface import MambaSpec

SEED = 22
IS_SLOW = os.environ.get("KVFERRY_SLOW") == "1"
NUM_REQUESTS = 200 if IS_SLOW else 60
MAX_TOKENS = 24

RUNS = (
    list(itertools.product(CONNECTORS, ("sync", "async"))) if IS_SLOW else [("offloading", "async")]
)


@pytest.fixture(autouse=True)
def _pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_pieces_at_states(monkeypatch)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    print(f"seed {SEED}")
    return shared_prefix_prompts(SEED, NUM_REQUESTS)


@pytest.fixture(scope="module")
def granite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model("granite", tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(("connector", "scheduling"), RUNS)
def test_tokens_are_equal_under_pressure(
    granite: Path,
    prompts: list[list[int]],
    connector: str,
    scheduling: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = without_kvferry(granite, prompts, MAX_TOKENS)
    if scheduling == "async":
        put_async_scheduling_back(monkeypatch)
    is_async = scheduling == "async"
    num_preemptions = hold_tokens_equal(
        granite, connector, prompts, expected, MAX_TOKENS, is_async=is_async
    )
    assert num_preemptions > 0


@pytest.mark.skipif(not IS_SLOW, reason="takes half a minute: set KVFERRY_SLOW=1")
def test_tokens_are_equal_with_the_spec(granite: Path, prompts: list[list[int]]) -> None:
    """It is vLLM's own connector that decides there what is loaded and stored."""
    expected = without_kvferry(granite, prompts, MAX_TOKENS)
    with under_spec(granite, num_blocks=PRESSURES["granite"].num_blocks) as engine:
        from_host = count_host_tokens(engine)
        answers = engine.generate(prompts, max_tokens=MAX_TOKENS)
    assert [answer.token_ids for answer in answers] == expected
    assert from_host.total >= LEAST_SHARE * sum(map(len, prompts))


def test_a_corrupted_state_changes_tokens(granite: Path, prompts: list[list[int]]) -> None:
    """The comparison above is able to fail on the states alone."""
    prompt = max(prompts, key=len)
    with tiny_engine(
        granite, connector="KVFerryOffloadingConnector", extra_config={"integrity": "off"}
    ) as engine:
        (right,) = engine.generate([prompt], max_tokens=16)
        engine.drain()
        arena = engine.worker._worker._engine._arena
        stride = arena.slot_stride_bytes
        groups = engine.scheduler.kv_cache_config.kv_cache_groups
        (group,) = [i for i, one in enumerate(groups) if isinstance(one.kv_cache_spec, MambaSpec)]
        (slot,) = engine.connector._manager.core.ledger._readable[group].values()
        arena.slots[slot * stride + 3 : (slot + 1) * stride : 4] ^= 0x40  # every float's exponent
        engine.scheduler.reset_prefix_cache()
        (wrong,) = engine.generate([prompt], max_tokens=16)
        assert wrong.num_cached_tokens > 0
    assert wrong.token_ids != right.token_ids

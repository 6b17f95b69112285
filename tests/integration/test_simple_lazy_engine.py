"""Lazy mode on vLLM's real engine: tokens are those of an engine without a connector."""

from typing import Any

import pytest
from tiny_models import TinyEngine, build_model, shared_prefix_prompts, tiny_engine

SEED = 21
NUM_PROMPTS = 100
PRESSURE: dict[str, Any] = {"max_model_len": 512, "max_num_batched_tokens": 256, "max_num_seqs": 6}
NUM_BLOCKS = {"llama": 24, "gemma3": 42}
"""Pools that six requests do not fit in."""


@pytest.mark.parametrize("name", NUM_BLOCKS)
def test_tokens_are_equal_under_pressure(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Requests with shared prefixes; the pool is small enough to evict and chunk."""
    print(f"seed {SEED}")
    model = build_model(name, tmp_path_factory.mktemp("models"))
    prompts = shared_prefix_prompts(SEED, NUM_PROMPTS)
    with tiny_engine(model, connector=None, num_blocks=400, enable_prefix_caching=False) as engine:
        expected = [answer.token_ids for answer in engine.generate(prompts)]
    lazy = {"lazy_offload": True}
    with tiny_engine(model, num_blocks=NUM_BLOCKS[name], extra_config=lazy, **PRESSURE) as engine:
        loads = record_loads(engine)
        answers = engine.generate(prompts)
        print(f"{engine.num_preemptions} preemptions")  # as many as the loads' times bring about
        engine.check_idle()
        snapshot, worker = engine.connector.snapshot(), engine.worker.snapshot()
    assert [answer.token_ids for answer in answers] == expected
    assert worker["failed_jobs"] == 0
    num_prompt = sum(map(len, prompts))
    assert sum(loads) >= 0.3 * num_prompt, f"{sum(loads)} of {num_prompt} tokens from the host"
    assert snapshot["stored_chunks"] > 0


def record_loads(engine: TinyEngine) -> list[int]:
    """The tokens that each request is given from the host."""
    loads: list[int] = []
    allocated = engine.connector.update_state_after_alloc

    def recorded(request: Any, blocks: Any, num_external_tokens: int) -> None:
        loads.append(num_external_tokens)
        allocated(request, blocks, num_external_tokens)

    engine.connector.update_state_after_alloc = recorded
    return loads

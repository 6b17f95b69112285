"""The option ``kv_cache_layout`` on vLLM's real engine, where its CPU attention reads the layout.

The CPU backend declares one layout, the test declares more: LBHNC, LHBNC, BLHNC and BHLNC work.
LBNHC and BLNHC crash in that attention; their bytes are compared in ``engine/test_transfer``.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from real_runs import MAX_MODEL_LEN, PRESSURES, count_host_tokens, without_kvferry
from tiny_models import build_model, shared_prefix_prompts, tiny_engine
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_layout import KVCacheLayout

SEED = 25
NUM_REQUESTS = 60
MAX_TOKENS = 8
LAYOUTS = ("LBHNC", "LHBNC", "BLHNC", "BHLNC")
NUM_FRAGMENTS = {
    # Four layers of two heads; two layers a group.
    "llama": {"LBHNC": 4, "LHBNC": 8, "BLHNC": 1, "BHLNC": 1},
    "gpt_oss": {"LBHNC": 2, "LHBNC": 4, "BLHNC": 1, "BHLNC": 1},
}


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("models")
    return lambda name: build_model(name, folder)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    print(f"seed {SEED}")
    return shared_prefix_prompts(SEED, NUM_REQUESTS)


@pytest.fixture(scope="module")
def expected(model_of: Callable[[str], Path], prompts: list[list[int]]) -> dict[str, list]:
    return {name: without_kvferry(model_of(name), prompts, MAX_TOKENS) for name in NUM_FRAGMENTS}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("name", "connector"),
    [("llama", "KVFerryOffloadingConnector"), ("gpt_oss", "KVFerrySimpleConnector")],
)
def test_tokens_are_equal_in_the_layout_that_was_asked_for(
    name: str,
    connector: str,
    layout: str,
    prompts: list[list[int]],
    expected: dict[str, list],
    model_of: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    declared = tuple(KVCacheLayout[name] for name in LAYOUTS)
    monkeypatch.setattr(CPUAttentionBackend, "supported_kv_cache_layouts", lambda: declared)
    with tiny_engine(
        model_of(name),
        connector=connector,
        num_blocks=PRESSURES[name].num_blocks,
        extra_config={"kv_cache_layout": layout},
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=256,
        max_num_seqs=10,
    ) as engine:
        resolved = engine.llm.llm_engine.vllm_config.cache_config.get_resolved_kv_cache_layout()
        assert resolved is KVCacheLayout[layout]
        groups = engine.worker._worker._engine._layout.groups
        assert {len(group.fragments) for group in groups} == {NUM_FRAGMENTS[name][layout]}
        from_host = count_host_tokens(engine)
        answers = engine.generate(prompts, max_tokens=MAX_TOKENS)
        engine.check_idle()
        assert engine.connector.snapshot()["failed_jobs"] == 0
    assert [answer.token_ids for answer in answers] == expected[name]
    assert from_host.total >= 0.3 * sum(map(len, prompts))

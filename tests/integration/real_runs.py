"""vLLM's real engine put under pressure: for tests that compare its tokens with and without us."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from real_scheduler import Engine
from tiny_models import TinyEngine, tiny_engine
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.kv_cache_interface import MambaSpec

MAX_MODEL_LEN = 512
LEAST_SHARE = 0.3
"""Of the prompt tokens, from the host: with less a comparison would say little."""


@dataclass(frozen=True)
class Pressure:
    """``num_blocks`` on the "GPU" and ``num_slots`` in the host are both too few for the test's
    prompts, and ``max_num_seqs`` running requests are too many for the blocks. Prompts of more than
    ``max_num_batched_tokens`` come in pieces."""

    num_blocks: int
    num_slots: int
    max_num_seqs: int = 10
    max_num_batched_tokens: int = 256


PRESSURES = {
    "llama": Pressure(num_blocks=34, num_slots=110),
    "mistral": Pressure(num_blocks=18, num_slots=120),
    "gemma3": Pressure(num_blocks=56, num_slots=400),
    "gpt_oss": Pressure(num_blocks=40, num_slots=200),
    "granite": Pressure(num_blocks=24, num_slots=80),
}
"""By the number of groups, and of blocks that a window leaves."""

CONNECTORS: dict[str, tuple[str, dict[str, Any]]] = {
    "offloading": ("KVFerryOffloadingConnector", {}),
    "simple": ("KVFerrySimpleConnector", {}),
    "simple_lazy": ("KVFerrySimpleConnector", {"lazy_offload": True}),
}


def put_async_scheduling_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's CPU platform turns async scheduling off, only because it brings nothing there."""
    update = CpuPlatform.check_and_update_config

    def updated(config: Any) -> None:
        update(config)
        config.scheduler_config.async_scheduling = True

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", staticmethod(updated))


def cut_pieces_at_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's CPU build cannot save a state of Mamba-2 inside a piece of a prompt: it fails with an
    IndexError, also without a connector. It cuts the pieces where it wants a state instead, as for
    the kinds of layers that can save none inside; ``test_recurrent_scheduler`` has both ways.
    """
    right = MambaMixer2.get_kv_cache_spec

    def get_kv_cache_spec(self: MambaMixer2, vllm_config: Any) -> MambaSpec:
        spec = right(self, vllm_config)
        assert isinstance(spec, MambaSpec)
        return replace(spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None)

    monkeypatch.setattr(MambaMixer2, "get_kv_cache_spec", get_kv_cache_spec)


@dataclass
class HostTokens:
    """Prompt tokens that the host served when their request was first given blocks."""

    by_request: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.by_request.values())


def count_host_tokens(engine: TinyEngine | Engine) -> HostTokens:
    counted = HostTokens()
    allocated = engine.connector.update_state_after_alloc

    def counting(request: Any, blocks: Any, num_external_tokens: int) -> None:
        allocated(request, blocks, num_external_tokens)
        prompt_tokens = min(num_external_tokens, request.num_prompt_tokens)
        counted.by_request.setdefault(request.request_id, prompt_tokens)

    engine.connector.update_state_after_alloc = counting
    return counted


def without_kvferry(model: Path, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """The tokens of an engine without a connector and without prefix caching."""
    with tiny_engine(
        model,
        connector=None,
        num_blocks=400,
        enable_prefix_caching=False,
        max_model_len=MAX_MODEL_LEN,
    ) as engine:
        return [answer.token_ids for answer in engine.generate(prompts, max_tokens=max_tokens)]


def hold_tokens_equal(
    model: Path,
    connector: str,
    prompts: list[list[int]],
    expected: list[list[int]],
    max_tokens: int,
    *,
    is_async: bool,
    num_ranks: int = 1,
) -> int:
    """The model under its pressure answers as ``expected``, ``LEAST_SHARE`` of the prompt tokens
    from the host, while the host evicts; returns how many requests were preempted."""
    with pressed_engine(model, connector, num_ranks=num_ranks) as engine:
        assert engine.core.async_scheduling is is_async
        from_host = count_host_tokens(engine)
        answers = engine.generate(prompts, max_tokens=max_tokens)
        engine.check_idle()
        snapshot, num_preemptions = engine.connector.snapshot(), engine.num_preemptions
    assert [answer.token_ids for answer in answers] == expected
    share = from_host.total / sum(map(len, prompts))
    print(f"{share:.0%} from the host, {num_preemptions} preemptions, {snapshot}")
    assert share >= LEAST_SHARE
    assert snapshot["failed_jobs"] == 0
    assert snapshot["evicted_chunks"] > 0
    return num_preemptions


@contextlib.contextmanager
def pressed_engine(
    model: Path, connector: str, *, num_ranks: int = 1, **overrides: Any
) -> Iterator[TinyEngine]:
    """An engine with one of ``CONNECTORS`` under the model's pressure, on ``num_ranks`` of TP."""
    pressure = PRESSURES[model.name]
    name, options = CONNECTORS[connector]
    with tiny_engine(
        model,
        connector=name,
        num_blocks=pressure.num_blocks,
        extra_config={"num_cpu_blocks": pressure.num_slots, **options},
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=pressure.max_num_seqs,
        max_num_batched_tokens=pressure.max_num_batched_tokens,
        tensor_parallel_size=num_ranks,
        **overrides,
    ) as engine:
        yield engine

"""Models that are not supported are refused at the start, by the name of what they hold."""

from pathlib import Path
from typing import Any

import pytest
import torch
from kv_groups import BLOCK_TOKENS, full, grouped_config, mamba, window
from kvferry.integration.vllm import support
from kvferry.integration.vllm.config import OffloadingOptions
from real_scheduler import Engine
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    CrossAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
)

CONNECTORS = ["KVFerrySimpleConnector", "KVFerryOffloadingConnector"]
SHAPE: dict[str, Any] = {
    "block_size": BLOCK_TOKENS,
    "num_kv_heads": 2,
    "head_size": 16,
    "dtype": torch.float32,
}

REFUSED: dict[str, KVCacheSpec] = {
    "CrossAttentionSpec": CrossAttentionSpec(**SHAPE),
    "SinkFullAttentionSpec": SinkFullAttentionSpec(**SHAPE, sink_len=4),
    "CircularBufferSpec": CircularBufferSpec(**SHAPE),  # no prefix cache serves it
    "SlidingWindowMLASpec": SlidingWindowMLASpec(
        **{**SHAPE, "num_kv_heads": 1, "head_size": 64}, sliding_window=8
    ),
}


def start(model: Path, connector: str, config: KVCacheConfig) -> Engine:
    return Engine(
        model, connector=connector, block_tokens=BLOCK_TOKENS, num_blocks=24, kv_cache_config=config
    )


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("name", REFUSED)
def test_a_kind_that_is_not_supported_is_named(
    model_config_dir: Path, connector: str, beside: bool, name: str
) -> None:
    """Alone, and beside a group that is supported."""
    specs = [full(), REFUSED[name]] if beside else [REFUSED[name]]
    with pytest.raises(ValueError, match=f"{name} is not supported yet; allowed: .*SlidingWindow"):
        start(model_config_dir, connector, grouped_config(24, specs))


@pytest.mark.parametrize("connector", CONNECTORS)
def test_a_group_of_several_kinds_is_named(model_config_dir: Path, connector: str) -> None:
    config = grouped_config(24, [full(), window(8)])
    both = UniformTypeKVCacheSpecs(
        block_size=BLOCK_TOKENS, kv_cache_specs={"layer.0": full(), "layer.1": window(8)}
    )
    config.kv_cache_groups[1].kv_cache_spec = both
    with pytest.raises(ValueError, match="mixes FullAttentionSpec, SlidingWindowSpec"):
        start(model_config_dir, connector, config)


@pytest.mark.parametrize("name", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallelism_is_named(model_config_dir: Path, name: str) -> None:
    engine = Engine(model_config_dir)
    setattr(engine.config.parallel_config, name, 2)
    with pytest.raises(ValueError, match=f"{name}=2: context parallelism .*allowed: 1"):
        support.check_config(engine.config)


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("mode", ["none", "all"])
@pytest.mark.parametrize("beside", [True, False])
def test_states_that_are_not_aligned_are_named(
    model_config_dir: Path, connector: str, mode: str, beside: bool
) -> None:
    specs = [full(), mamba(mode)] if beside else [mamba(mode)]
    with pytest.raises(ValueError, match=f"mamba_cache_mode='{mode}': .*allowed: 'align'"):
        start(model_config_dir, connector, grouped_config(24, specs))


@pytest.mark.parametrize("connector", CONNECTORS)
def test_hits_inside_blocks_of_states_are_named(model_config_dir: Path, connector: str) -> None:
    config = grouped_config(24, [full(), mamba(block_tokens=8)])
    with pytest.raises(ValueError, match=r"hashes of 4 .* blocks of 8: .*OffloadingConnector"):
        start(model_config_dir, connector, config)


def test_speculative_decoding_beside_states_is_named(model_config_dir: Path) -> None:
    engine = start(model_config_dir, CONNECTORS[1], grouped_config(24, [full(), mamba()]))
    engine.config.speculative_config = object()  # type: ignore[assignment]
    groups, options = engine.kv_cache_config, OffloadingOptions()
    with pytest.raises(ValueError, match=r"speculative decoding .*OffloadingConnector"):
        support.groups_from(groups, engine.config, options)

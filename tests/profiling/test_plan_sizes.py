"""Byte counts of ``kvferry plan`` against vLLM's own spec objects and its own grouping."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvferry.profiling.plan_groups import KV_LAYOUTS, block_tokens_of, groups_of, layout_of
from kvferry.profiling.plan_model import Attention, LayerCache, Model, model_of, read_model

SHAPES = Path(__file__).resolve().parents[2] / "docs" / "shapes"
BLOCK_TOKENS = 16

pytest.importorskip("vllm")

Spec = Callable[[int], Any]


def specs_of(name: str, num_ranks: int, block_tokens: int) -> dict[str, Any]:
    """vLLM's specs of a public model, written down from its published description."""
    import torch
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
    )

    def of(kind: type, heads: int, size: int, **more: int) -> Any:
        return kind(
            block_size=block_tokens,
            num_kv_heads=max(1, heads // num_ranks),
            head_size=size,
            dtype=torch.bfloat16,
            **more,
        )

    net = MambaSpec(
        shapes=MambaStateShapeCalculator.gated_delta_net_state_shape(
            num_ranks, 16, 32, 128, 128, 4
        ),
        dtypes=(torch.bfloat16, torch.bfloat16),
        block_size=block_tokens,
        page_size_padded=max(1, 2 // num_ranks) * block_tokens * 2 * 256 * 2,
        mamba_cache_mode="align",
    )
    full, window, local = FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec
    layers: dict[str, tuple[int, Spec]] = {
        "llama-3.1-8b": (32, lambda i: of(full, 8, 128)),
        "llama-3.1-70b": (80, lambda i: of(full, 8, 128)),
        "mistral-7b-v0.1": (32, lambda i: of(window, 8, 128, sliding_window=4096)),
        "gemma-3-27b": (
            62,
            lambda i: of(full, 16, 128) if i % 6 == 5 else of(window, 16, 128, sliding_window=1024),
        ),
        "gpt-oss-20b": (
            24,
            lambda i: of(full, 8, 64) if i % 2 else of(window, 8, 64, sliding_window=128),
        ),
        "deepseek-v3": (61, lambda i: of(MLAAttentionSpec, 1, 576)),
        "llama-4-scout": (
            48,
            lambda i: (
                of(full, 8, 128) if i % 4 == 3 else of(local, 8, 128, attention_chunk_size=8192)
            ),
        ),
        "qwen3-next-80b-a3b": (48, lambda i: of(full, 2, 256) if i % 4 == 3 else net),
    }
    count, spec = layers[name]
    return {f"layer.{index}": spec(index) for index in range(count)}


def groups_by_vllm(specs: dict[str, Any]) -> list[tuple[str, int, int]]:
    """Kind, layers and page bytes of the groups that vLLM forms."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
    from vllm.v1.kv_cache_layout import KVCacheLayout

    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBHNC),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        model_config=None,
    )
    groups = get_kv_cache_groups(config, specs)  # type: ignore[arg-type]
    kinds = {
        "FullAttentionSpec": Attention.FULL,
        "SlidingWindowSpec": Attention.WINDOW,
        "ChunkedLocalAttentionSpec": Attention.CHUNKED,
        "MLAAttentionSpec": Attention.LATENT,
        "MambaSpec": Attention.RECURRENT,
    }
    return sorted(
        (
            kinds[type(one.kv_cache_spec).__name__],
            len(one.layer_names),
            one.kv_cache_spec.page_size_bytes,
        )
        for one in groups
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
@pytest.mark.parametrize("path", sorted(SHAPES.glob("*.json")), ids=lambda path: path.stem)
def test_groups_and_pages_are_those_of_vllm(path: Path, num_ranks: int) -> None:
    layers = read_model(str(path)).layers
    block_tokens = block_tokens_of(layers, BLOCK_TOKENS, num_ranks, item_bytes=2)
    groups = groups_of(layers, block_tokens, num_ranks, item_bytes=2)
    ours = sorted((one.attention, one.num_layers, one.page_bytes) for one in groups)
    assert ours == groups_by_vllm(specs_of(path.stem, num_ranks, block_tokens))


@pytest.mark.parametrize(("num_full", "num_window"), [(4, 5), (4, 6), (3, 7), (5, 2), (1, 1)])
def test_uneven_kinds_are_grouped_as_vllm_does(num_full: int, num_window: int) -> None:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    sizes = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
    full = {f"full.{i}": FullAttentionSpec(**sizes) for i in range(num_full)}
    slides = {
        f"window.{i}": SlidingWindowSpec(**sizes, sliding_window=64) for i in range(num_window)
    }
    layers = (LayerCache(Attention.FULL, 2, 64),) * num_full
    layers += (LayerCache(Attention.WINDOW, 2, 64, 64),) * num_window
    groups = groups_of(layers, 16, 1, item_bytes=2)
    ours = sorted((one.attention, one.num_layers, one.page_bytes) for one in groups)
    assert ours == groups_by_vllm(full | slides)


@pytest.mark.parametrize("kv_layout", KV_LAYOUTS)
def test_every_layout_of_a_block_holds_its_bytes(kv_layout: str) -> None:
    groups = groups_of((LayerCache(Attention.FULL, 4, 64),) * 3, 16, 1, item_bytes=2)
    layout = layout_of(groups, 2, kv_layout)
    assert layout.groups[0].block_bytes == groups[0].block_bytes == 3 * 4 * 16 * 64 * 2
    expected = {"BL": 1, "BH": 1, "LB": 3, "LH": 12}[kv_layout[:2]]
    assert len(layout.groups[0].fragments) == expected


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layer_types": ["mamba", "full_attention"]}, "mamba"),
        ({"layer_types": ["full_attention"]}, "1 entries for 2 layers"),
        ({"index_topk": 2048}, "index_topk"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"sliding_window": "long", "layer_types": ["sliding_attention"] * 2}, "sliding_window"),
    ],
)
def test_what_cannot_be_sized_is_named(change: dict[str, Any], named: str) -> None:
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 128, **change}
    with pytest.raises(ValueError, match=named):
        model_of(config, "made")


@pytest.mark.parametrize("path", sorted(SHAPES.glob("*.json")), ids=lambda path: path.stem)
def test_our_own_rules_agree_with_transformers(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    filled_in = read_model(str(path))
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert read_model(str(path)) == filled_in


def test_transformers_fills_in_what_a_file_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 3 4B as published: its heads are the defaults of its model type."""
    pytest.importorskip("transformers")
    text = {"model_type": "gemma3_text", "num_hidden_layers": 34, "sliding_window": 1024}
    config = {"model_type": "gemma3", "text_config": {**text, "hidden_size": 2560}}
    layers = model_of(config, "gemma").layers
    assert layers[0] == LayerCache(Attention.WINDOW, 4, 512, 1024)
    assert [index for index, one in enumerate(layers) if one.attention is Attention.FULL] == [
        *range(5, 34, 6)
    ]
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match="num_attention_heads"):
        model_of(config, "gemma")


def test_layers_that_share_a_cache_are_counted_once() -> None:
    config = {"num_hidden_layers": 6, "num_attention_heads": 4, "hidden_size": 128}
    assert len(model_of({**config, "num_kv_shared_layers": 2}, "made").layers) == 4


def test_ranks_that_do_not_divide_the_heads_are_refused() -> None:
    layer = LayerCache(Attention.FULL, 8, 128)
    assert [layer.heads_per_rank(ranks) for ranks in (1, 2, 8, 16)] == [8, 4, 1, 1]
    with pytest.raises(ValueError, match="tensor parallel size 3 with 8 KV heads"):
        layer.heads_per_rank(3)


def test_a_model_is_found_in_the_local_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 128}
    (snapshot / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    expected = (LayerCache(Attention.FULL, 4, 64),) * 2
    assert read_model("owner/name") == Model("owner/name", expected, "bfloat16", 131072)
    with pytest.raises(ValueError, match="no model at 'owner/other'"):
        read_model("owner/other")

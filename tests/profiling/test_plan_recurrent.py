"""Hybrid models: states by hand and by vLLM's own shapes, the longer blocks, what is refused."""

import sys
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from kvferry.profiling.plan import Plan, Wanted, main, make_plan, state_dtype
from kvferry.profiling.plan_groups import ITEM_BYTES, Group, block_tokens_of, groups_of, layout_of
from kvferry.profiling.plan_load import LoadCost, Prompts
from kvferry.profiling.plan_metrics import Server, server_from
from kvferry.profiling.plan_model import Attention, LayerCache, model_of, read_model
from kvferry.profiling.plan_recurrent import LayerState

SHAPES = Path(__file__).resolve().parents[2] / "docs" / "shapes"

COMMON = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "hidden_size": 512,
    "torch_dtype": "bfloat16",
}
MAMBA = {
    "mamba_n_heads": 16,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
GRANITE: dict[str, Any] = {
    **COMMON,
    **MAMBA,
    "model_type": "granitemoehybrid",
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
}
FALCON: dict[str, Any] = {**COMMON, **MAMBA, "model_type": "falcon_h1", "mamba_d_ssm": 1024}
NEMOTRON: dict[str, Any] = {
    **COMMON,
    "num_hidden_layers": 6,
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-M*ME",
    "mamba_num_heads": 16,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
}
QWEN: dict[str, Any] = {
    **COMMON,
    "model_type": "qwen3_next",
    "full_attention_interval": 4,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}


def state_in(config: dict[str, Any]) -> LayerState:
    (state,) = {one for one in model_of(config, "made").layers if isinstance(one, LayerState)}
    return state


@pytest.mark.parametrize(
    ("config", "num_states", "num_caches", "num_bytes"),
    [
        # Three inputs of 1024 + 2 * 128 channels, 16 heads of 64 * 128, all in 2 bytes.
        (GRANITE, 3, 1, 3 * 1280 * 2 + 16 * 64 * 128 * 2),
        ({**GRANITE, "mamba_d_head": "auto"}, 3, 1, 3 * 1280 * 2 + 16 * 64 * 128 * 2),
        ({**GRANITE, "torch_dtype": "float32"}, 3, 1, 3 * 1280 * 2 + 16 * 64 * 128 * 2),
        (FALCON, 4, 4, 3 * 1280 * 2 + 16 * 64 * 128 * 2),
        ({**FALCON, "mamba_d_ssm": None}, 4, 4, 3 * 1280 * 2 + 16 * 64 * 128 * 2),
        # Eight groups of 2 * 128 channels; heads in 4 bytes.
        (NEMOTRON, 3, 1, 3 * 3072 * 2 + 16 * 64 * 128 * 4),
        ({**NEMOTRON, "mamba_ssm_cache_dtype": "float16"}, 3, 1, 3 * 3072 * 2 + 16 * 64 * 128 * 2),
        # Keys twice and values: 2 * 8 * 128 + 16 * 64 channels.
        (QWEN, 3, 1, 3 * 3072 * 2 + 16 * 64 * 128 * 2),
        ({**QWEN, "model_type": "qwen3_5_text"}, 3, 1, 3 * 3072 * 2 + 16 * 64 * 128 * 2),
        (
            {**QWEN, "model_type": "qwen3_5_text", "mamba_ssm_dtype": "float32"},
            *(3, 1, 3 * 3072 * 2 + 16 * 64 * 128 * 4),
        ),
    ],
)
@pytest.mark.parametrize("with_transformers", [True, False])
def test_states_by_hand(
    config: dict[str, Any],
    num_states: int,
    num_caches: int,
    num_bytes: int,
    with_transformers: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not with_transformers:
        monkeypatch.setitem(sys.modules, "transformers", None)
    layers = model_of(config, "made").layers
    states = [one for one in layers if isinstance(one, LayerState)]
    assert len(states) == num_states
    assert [one for one in layers if isinstance(one, LayerCache)] == [
        LayerCache(Attention.FULL, 4, 128)
    ] * num_caches
    assert {one.bytes_per_rank(1, ITEM_BYTES) for one in states} == {num_bytes}


def _granite_shapes(ranks: int) -> Any:
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes

    return Shapes.mamba2_state_shape(ranks, 1024, 1, 16, 64, 128, 4)


def _nemotron_shapes(ranks: int) -> Any:
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes

    return Shapes.mamba2_state_shape(ranks, 1024, 8, 16, 64, 128, 4)


def _qwen_shapes(ranks: int) -> Any:
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes

    return Shapes.gated_delta_net_state_shape(ranks, 8, 16, 128, 64, 4)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("config", "shapes"),
    [(GRANITE, _granite_shapes), (NEMOTRON, _nemotron_shapes), (QWEN, _qwen_shapes)],
)
def test_states_are_those_of_vllm_on_every_rank(
    config: dict[str, Any], shapes: Callable[[int], Any], num_ranks: int
) -> None:
    pytest.importorskip("vllm")
    conv, heads = shapes(num_ranks)
    state = state_in(config)
    head_bytes = ITEM_BYTES[state.head_dtype]
    assert state.bytes_per_rank(num_ranks, ITEM_BYTES) == prod(conv) * 2 + prod(heads) * head_bytes


@pytest.mark.parametrize(
    ("asked", "num_ranks", "expected"),
    [
        # Qwen3-Next: a state of 1,097,728 bytes, 2,048 bytes of attention a token: 536 tokens.
        (16, 1, 544),
        (16, 2, 544),  # both halve
        (8, 1, 544),  # no kernel takes fewer than 16
        (64, 1, 576),
        (544, 1, 544),  # what a server that has raised it tells
        (1024, 1, 1024),
    ],
)
def test_blocks_grow_until_a_page_holds_a_state(asked: int, num_ranks: int, expected: int) -> None:
    layers = read_model(str(SHAPES / "qwen3-next-80b-a3b.json")).layers
    assert block_tokens_of(layers, asked, num_ranks, item_bytes=2) == expected


def test_without_recurrent_layers_blocks_stay() -> None:
    layers = (LayerCache(Attention.FULL, 4, 64),)
    assert block_tokens_of(layers, 8, 1, item_bytes=2) == 8


def test_pages_too_small_for_a_state_are_refused() -> None:
    layers = read_model(str(SHAPES / "qwen3-next-80b-a3b.json")).layers
    with pytest.raises(ValueError, match="states of 1097728 bytes, pages of 32768"):
        groups_of(layers, 16, 1, item_bytes=2)


def qwen3_next(blocks_per_chunk: int = 1, **changes: Any) -> Plan:
    wanted = Wanted(
        read_model(str(SHAPES / "qwen3-next-80b-a3b.json")),
        num_ranks=1,
        dtype="bfloat16",
        block_tokens=16,
        blocks_per_chunk=blocks_per_chunk,
        kv_layout="LBHNC",
        checksums=False,
        host_bytes=64 << 30,
        cost=LoadCost(50e9, 0.0),
        tokens_per_s=None,
        lengths=(5441,),
    )
    return make_plan(replace(wanted, **changes))


STATES = 36 * 1_097_728
BLOCK = 12 * 544 * 2048


def test_qwen3_next_by_hand() -> None:
    plan = qwen3_next()
    assert [(one.attention, one.num_layers) for one in plan.groups] == [
        *[(Attention.RECURRENT, 12)] * 3,
        (Attention.FULL, 12),
    ]
    assert (plan.bytes_per_token, plan.block_bytes, plan.state_bytes) == (24576, BLOCK, STATES)
    assert plan.slot_bytes == BLOCK
    assert plan.wasted_bytes == (*[BLOCK - STATES // 3] * 3, 0)
    assert plan.num_slots == (64 << 30) // BLOCK
    assert plan.held_tokens == plan.num_slots // 4 * 544
    assert plan.most_held_tokens == plan.num_slots * 544


@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_a_hit_loads_one_state_at_any_length(blocks_per_chunk: int) -> None:
    (row,) = qwen3_next(blocks_per_chunk).rows
    assert row.hit_tokens == 5440
    assert row.load_bytes == 10 * BLOCK + STATES


def test_no_hit_loads_no_state() -> None:
    group = Group(Attention.RECURRENT, 0, 4, 2, 1000, 900)
    assert Prompts((group,), 16, 16, LoadCost(1e6), None).row(16).load_bytes == 0
    assert Prompts((group,), 16, 16, LoadCost(1e6), None).row(17).load_bytes == 4 * 900


def test_states_in_another_type() -> None:
    plan = qwen3_next(state_dtype="float32")
    assert plan.state_bytes == 36 * (3 * 8192 * 2 + 32 * 128 * 128 * 4)
    assert plan.block_tokens == 1056  # 2,146,304 bytes at 2,048 a token: 1,048 tokens


def test_the_type_of_states_is_asked_for_or_the_servers() -> None:
    server = Server("model", 544, "auto", None, "float32")
    assert state_dtype("auto", server) == "float32"
    assert state_dtype("bfloat16", server) == "bfloat16"
    assert state_dtype("auto", replace(server, state_dtype="auto")) is None
    assert state_dtype("auto", None) is None
    text = 'vllm:cache_config_info{block_size="544",mamba_ssm_cache_dtype="float32"} 1.0\n'
    text += 'vllm:num_requests_running{model_name="model"} 0.0\n'
    assert server_from(text, "url").state_dtype == "float32"


@pytest.mark.parametrize(
    ("kv_layout", "num_fragments", "num_bytes"),
    [("LBHNC", 4, 4 * 900), ("LHBNC", 4, 4 * 900), ("BLHNC", 1, 3 * 1000 + 900)],
)
def test_padding_is_copied_only_between_neighbours(
    kv_layout: str, num_fragments: int, num_bytes: int
) -> None:
    layout = layout_of((Group(Attention.RECURRENT, 0, 4, 2, 1000, 900),), 1, kv_layout)
    assert len(layout.groups[0].fragments) == num_fragments
    assert layout.groups[0].block_bytes == num_bytes


def test_a_hybrid_without_recurrent_layers_is_plain_attention() -> None:
    model = model_of({**GRANITE, "layer_types": ["attention"] * 4}, "made")
    assert model.layers == (LayerCache(Attention.FULL, 4, 128),) * 4


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({**GRANITE, "model_type": "bamba"}, "mamba_d_state=128 and model_type='bamba'"),
        ({**QWEN, "model_type": "olmo_hybrid"}, "model_type='olmo_hybrid'"),
        ({**COMMON, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "linear_attn_config": {"a": 1}},
         "linear_attn_config"),
        ({**COMMON, "layer_types": ["conv", "full_attention"] * 2}, "layer_types='conv'"),
        ({**GRANITE, "layer_types": ["mamba", "attention"]}, "2 entries for 4 layers"),
        ({**GRANITE, "layer_types": ["mamba", "magic"] * 2}, "kind magic; allowed: mamba"),
        ({**GRANITE, "layer_types": ["mamba"] * 4}, "no layer with attention"),
        ({**GRANITE, "mamba_n_heads": "many"}, "mamba_n_heads='many'"),
    ],
)  # fmt: skip
def test_what_cannot_be_sized_is_named(
    config: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=named):
        model_of(config, "made")


@pytest.mark.parametrize(
    ("config", "num_ranks", "named"),
    [
        (GRANITE, 3, "tensor parallel size 3 with 16 recurrent heads"),
        (NEMOTRON, 16, "tensor parallel size 16 with 8 groups"),
        ({**NEMOTRON, "mamba_ssm_cache_dtype": "int4"}, 1, "states of int4; allowed: float32"),
    ],
)
def test_what_does_not_divide_is_refused(
    config: dict[str, Any], num_ranks: int, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        state_in(config).bytes_per_rank(num_ranks, ITEM_BYTES)


def test_the_command_tells_states_from_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(SHAPES / "qwen3-next-80b-a3b.json")
    assert main([path, "--lengths", "5441"]) == 0
    out = capsys.readouterr().out
    for line in (
        "12 layers, recurrent, 32 heads, 1.047 MiB a layer and state, in a page of 1.062 MiB",
        "24 KiB over all layers with attention",
        "37.69 MiB over all recurrent layers, at any length",
        "699,040 to 2,796,160 tokens",
    ):
        assert line in out
    assert main([path, "--mamba-ssm-cache-dtype", "float32"]) == 0
    assert "block      1056 tokens" in capsys.readouterr().out

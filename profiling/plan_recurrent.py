"""Hybrid models: which layers are recurrent, and what state each of those keeps.

A state is the same size at any length of a prompt: the last inputs of a short convolution, and a
matrix for each head. Names of keys differ by model type, so only the types below are known.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

Config = Mapping[str, Any]

_MAMBA = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
MAMBA2_KEYS: Final = {
    "granitemoehybrid": _MAMBA,
    "falcon_h1": _MAMBA,
    "nemotron_h": (
        "mamba_num_heads",
        "mamba_head_dim",
        "n_groups",
        "ssm_state_size",
        "conv_kernel",
    ),
}
"""Heads, their size, groups, columns of a head's state, width of the convolution."""

DELTA_NET_TYPES: Final = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
HYBRID_TYPES: Final = (*MAMBA2_KEYS, *DELTA_NET_TYPES)

_STATE, _CACHE = "state", "cache"
_PARTS: Final = {
    "mamba": (_STATE,),
    "linear_attention": (_STATE,),
    "M": (_STATE,),
    "attention": (_CACHE,),
    "full_attention": (_CACHE,),
    "*": (_CACHE,),
    "hybrid": (_STATE, _CACHE),
    "mlp": (),
    "moe": (),
    "-": (),
    "E": (),
}
"""What a layer of that name keeps. Nemotron-H has a letter for each layer."""

_MARKS: Final = (
    "ssm_cfg",
    "mamba_d_state",
    "hybrid_override_pattern",
    "linear_attn_config",
    "linear_num_value_heads",
    "attn_layer_period",
    "block_types",
    "conv_L_cache",
)
_RECURRENT_NAMES: Final = {"mamba", "linear_attention", "hybrid", "conv", "recurrent"}


@dataclass(frozen=True, slots=True)
class LayerState:
    """One recurrent layer's state, before it is split over ranks.

    The convolution keeps ``conv_tokens`` inputs of ``conv_channels`` elements, and of
    ``group_channels`` for each of the ``num_groups`` that heads share; each head keeps
    ``head_elements``. The dtypes are vLLM's names.
    """

    num_heads: int
    head_elements: int
    conv_tokens: int
    conv_channels: int
    num_groups: int = 0
    group_channels: int = 0
    conv_dtype: str = "bfloat16"
    head_dtype: str = "bfloat16"

    def bytes_per_rank(self, num_ranks: int, item_bytes: Mapping[str, int]) -> int:
        """Bytes on one rank; a group is repeated where there are fewer than ranks.

        Raises ValueError for ranks that do not divide the layer, and for an unknown dtype.
        """
        if self.num_groups > 1 and self.num_groups % num_ranks:
            raise ValueError(
                f"tensor parallel size {num_ranks} with {self.num_groups} groups of recurrent "
                "heads; allowed: a divisor, or any size for a single group"
            )
        groups = max(self.num_groups, num_ranks) if self.num_groups else 0
        channels = self.conv_channels + groups * self.group_channels
        if num_ranks < 1 or self.num_heads % num_ranks or channels % num_ranks:
            raise ValueError(
                f"tensor parallel size {num_ranks} with {self.num_heads} recurrent heads; allowed: "
                "a divisor"
            )
        for dtype in (self.conv_dtype, self.head_dtype):
            if dtype not in item_bytes:
                raise ValueError(f"states of {dtype}; allowed: {', '.join(item_bytes)}")
        conv = self.conv_tokens * channels // num_ranks * item_bytes[self.conv_dtype]
        heads = self.num_heads // num_ranks * self.head_elements * item_bytes[self.head_dtype]
        return conv + heads


def need(text: Config, key: str) -> int:
    """A size from ``config.json``. Raises ValueError where it is none."""
    value = text.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"config.json has {key}={value!r}; allowed: a positive integer")
    return value


def check_recurrent(text: Config, name: str) -> None:
    """Raises ValueError for recurrent layers of a model type that is not known here."""
    model_type = text.get("model_type")
    if model_type in HYBRID_TYPES:
        return
    found = {key: text[key] for key in _MARKS if text.get(key)}
    kinds = text.get("layer_types") or text.get("layers_block_type") or ()
    if names := sorted(_RECURRENT_NAMES.intersection(kinds)):
        found["layer_types"] = ", ".join(names)
    for key, value in found.items():
        raise ValueError(
            f"{name} has {key}={value!r} and model_type={model_type!r}: recurrent layers of a kind "
            f"that kvferry plan cannot size; allowed: {', '.join(HYBRID_TYPES)}"
        )


def keeps_of(text: Config) -> list[bool]:
    """For each thing that a layer of a hybrid keeps, in order: whether it is a state."""
    names = _names_of(text)
    unknown = sorted({str(name) for name in names} - set(_PARTS))
    if unknown:
        raise ValueError(f"layers of kind {', '.join(unknown)}; allowed: {', '.join(_PARTS)}")
    kept = [part == _STATE for name in names for part in _PARTS[name]]
    if False not in kept:
        raise ValueError(
            "no layer with attention; kvferry plan sizes recurrent layers beside attention"
        )
    return kept


def _names_of(text: Config) -> list[str]:
    model_type = text.get("model_type")
    names = list(text.get("hybrid_override_pattern") or ())
    names = names or list(text.get("layers_block_type") or text.get("layer_types") or ())
    if model_type == "nemotron_h" and names:  # the pattern counts, not num_hidden_layers
        return names
    num_layers = need(text, "num_hidden_layers")
    if model_type == "falcon_h1":
        return ["hybrid"] * num_layers
    if model_type in DELTA_NET_TYPES and not names:
        every = int(text.get("full_attention_interval") or 4)
        kinds = ("full_attention", "linear_attention")
        names = [kinds[bool((layer + 1) % every)] for layer in range(num_layers)]
    if len(names) != num_layers:
        raise ValueError(
            f"layer_types has {len(names)} entries for {num_layers} layers; allowed: one a layer"
        )
    return names


def state_of(text: Config, dtype: str) -> LayerState:
    """The state of a recurrent layer where the model is served in ``dtype``. Raises ValueError for
    a number that is missing."""
    model_type = str(text["model_type"])
    if model_type in DELTA_NET_TYPES:
        keys = need(text, "linear_num_key_heads") * need(text, "linear_key_head_dim")
        heads, size = need(text, "linear_num_value_heads"), need(text, "linear_value_head_dim")
        return LayerState(
            heads,
            size * need(text, "linear_key_head_dim"),
            need(text, "linear_conv_kernel_dim") - 1,
            2 * keys + heads * size,
            conv_dtype=dtype,
            head_dtype=text.get("mamba_ssm_dtype") or dtype,
        )
    heads_key, size_key, groups_key, columns_key, conv_key = MAMBA2_KEYS[model_type]
    heads, columns = need(text, heads_key), need(text, columns_key)
    if model_type == "nemotron_h":
        width = heads * need(text, size_key)
    elif not (width := int(text.get("mamba_d_ssm") or 0)):
        width = need(text, "mamba_expand") * need(text, "hidden_size")
    size = width // heads if text.get(size_key) == "auto" else need(text, size_key)
    # vLLM keeps the heads' states of this type alone in float32 unless the file says otherwise.
    own = (text.get("mamba_ssm_cache_dtype") or "float32") if model_type == "nemotron_h" else dtype
    return LayerState(
        heads,
        size * columns,
        need(text, conv_key) - 1,
        width,
        need(text, groups_key),
        2 * columns,
        dtype,
        own,
    )

"""A model's ``config.json`` -> what each layer keeps in the KV cache.

Published files leave out what their authors took for granted (Gemma 3 its heads, most files the
kind of each layer). Where transformers is installed and knows the model type it fills that in;
else the rules below do, and a key that is missing all the same is an error that names it.
"""

import enum
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .plan_recurrent import (
    HYBRID_TYPES,
    Config,
    LayerState,
    check_recurrent,
    keeps_of,
    need,
    state_of,
)

MAX_TOKENS: Final = 131072
"""As far as a table goes for a model that names no length."""


class Attention(enum.StrEnum):
    """Kinds of attention, by what a later token still reads."""

    FULL = "full"
    WINDOW = "sliding window"
    CHUNKED = "chunked local"
    LATENT = "latent (MLA)"
    RECURRENT = "recurrent"


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's KV cache, before it is split over ranks.

    ``num_elements`` are those of one token and one KV head: K and V together, or the one latent
    vector. ``reach_tokens`` is the window or the chunk of attention, 0 where there is none.
    """

    attention: Attention
    num_kv_heads: int
    num_elements: int
    reach_tokens: int = 0

    def heads_per_rank(self, num_ranks: int) -> int:
        """KV heads of one tensor-parallel rank: split, or repeated where there are too few.

        Raises ValueError for a number of ranks that vLLM refuses as well.
        """
        if self.attention is Attention.LATENT:
            return 1
        if num_ranks < 1 or max(self.num_kv_heads, num_ranks) % min(self.num_kv_heads, num_ranks):
            raise ValueError(
                f"tensor parallel size {num_ranks} with {self.num_kv_heads} KV heads; allowed: a "
                "divisor or a multiple of the number of heads"
            )
        return max(1, self.num_kv_heads // num_ranks)


Layer = LayerCache | LayerState


@dataclass(frozen=True, slots=True)
class Model:
    """What a plan needs to know about a model. ``dtype`` is the weights', as its file names it."""

    name: str
    layers: tuple[Layer, ...]
    dtype: str
    max_tokens: int


_TEXT_PARTS: Final = ("text_config", "language_config", "llm_config", "thinker_config")
_KINDS: Final = {
    "full_attention": Attention.FULL,
    "attention": Attention.FULL,
    "sliding_attention": Attention.WINDOW,
    "chunked_attention": Attention.CHUNKED,
}
_FULL_EVERY: Final = {"gemma2": 2, "gpt_oss": 2, "cohere2": 4, "gemma3_text": 6, "gemma3n_text": 5}
"""Model types in which every n-th layer is full attention and the others slide, unless said."""

_REFUSED: Final = {
    "index_topk": "sparse attention keeps an index of its own in the cache",
    "global_head_dim": "its full layers have another head size than its sliding ones",
    "swa_head_dim": "its sliding layers have another head size than its full ones",
    "swa_num_key_value_heads": "its sliding layers have other heads than its full ones",
    "is_encoder_decoder": "cross attention keeps the encoder's states",
}


def read_model(source: str) -> Model:
    """A model from a ``config.json``, a folder with one, or an ``owner/name`` in the local cache.

    Nothing is downloaded. Raises ValueError for what cannot be found, read or sized.
    """
    path = find_config(source)
    try:
        config = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a readable config.json: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds {type(config).__name__}; allowed: a JSON object")
    return model_of(config, source)


def find_config(source: str) -> Path:
    """The ``config.json`` that ``source`` means. Raises ValueError where there is none."""
    path = Path(source).expanduser()
    if path.is_file():
        return path
    if (path / "config.json").is_file():
        return path / "config.json"
    home = os.environ.get("HF_HOME") or Path.home() / ".cache/huggingface"
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    snapshots = hub / f"models--{source.replace('/', '--')}" / "snapshots"
    found = sorted(snapshots.glob("*/config.json"), key=lambda one: one.stat().st_mtime)
    if found:
        return found[-1]
    raise ValueError(
        f"no model at {source!r}; allowed: a config.json, a folder that holds one, a model in the "
        f"local cache ({hub}), or the address of a running server"
    )


def model_of(config: Config, name: str) -> Model:
    """A parsed ``config.json`` as a ``Model``. Raises ValueError for what cannot be sized."""
    text = _complete(_text_part(config))
    for key, why in _REFUSED.items():
        if text.get(key):
            raise ValueError(f"{name} has {key}={text[key]!r}: {why}; kvferry plan cannot size it")
    check_recurrent(text, name)
    dtype = text.get("dtype") or text.get("torch_dtype")
    dtype = dtype or config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    max_tokens = int(text.get("max_position_embeddings") or MAX_TOKENS)
    return Model(name, _layers(text, served_dtype(str(dtype))), str(dtype), max_tokens)


def _text_part(config: Config) -> Config:
    """The language model's part of a file that describes several."""
    for key in _TEXT_PARTS:
        part = config.get(key)
        if isinstance(part, Mapping) and "num_hidden_layers" not in config:
            return _text_part(part)
    return config


def _complete(text: Config) -> Config:
    """The same with transformers' defaults where it knows the model type; else as it was."""
    model_type = text.get("model_type")
    try:
        from transformers import AutoConfig

        whole = AutoConfig.for_model(**text).to_dict() if model_type else {}
    except Exception:  # not installed, unknown type, or a file that it refuses: our own rules then
        whole = {}
    given = {key: value for key, value in text.items() if value is not None}
    return {**whole, **given}


def served_dtype(dtype: str) -> str:
    """What vLLM computes in on its own: float32 weights are served in 16 bits."""
    return "bfloat16" if dtype == "float32" else dtype


def _layers(text: Config, dtype: str) -> tuple[Layer, ...]:
    if text.get("model_type") in HYBRID_TYPES:
        kept = keeps_of(text)
        cache = _attention(text, Attention.FULL)
        state = state_of(text, dtype) if any(kept) else None
        return tuple(state if is_state and state else cache for is_state in kept)
    num_layers = need(text, "num_hidden_layers") - int(text.get("num_kv_shared_layers") or 0)
    if text.get("kv_lora_rank"):
        width = need(text, "kv_lora_rank") + need(text, "qk_rope_head_dim")
        return (LayerCache(Attention.LATENT, 1, width),) * num_layers
    kinds_of = _kinds(text)
    kinds = {kind: _attention(text, kind) for kind in set(kinds_of)}
    return tuple(kinds[kind] for kind in kinds_of[:num_layers])


def _attention(text: Config, kind: Attention) -> LayerCache:
    """What a layer with that kind of attention keeps."""
    num_heads = need(text, "num_attention_heads")
    num_kv_heads = int(text.get("num_key_value_heads") or num_heads)
    head_size = int(text.get("head_dim") or need(text, "hidden_size") // num_heads)
    width = head_size + int(text.get("v_head_dim") or head_size)
    reach = 0
    if kind is Attention.WINDOW:
        reach = need(text, "sliding_window")
    elif kind is Attention.CHUNKED:
        reach = need(text, "attention_chunk_size")
    return LayerCache(kind, num_kv_heads, width, reach)


def _kinds(text: Config) -> list[Attention]:
    """The kind of every layer, in order."""
    num_layers = need(text, "num_hidden_layers")
    window = bool(text.get("sliding_window")) and text.get("use_sliding_window") is not False
    if names := text.get("layer_types"):
        unknown = sorted(set(names) - set(_KINDS))
        if unknown or len(names) != num_layers:
            raise ValueError(
                f"layer_types has {len(names)} entries for {num_layers} layers, unknown: {unknown};"
                f" allowed: {', '.join(_KINDS)}, one a layer"
            )
        kinds = [_KINDS[name] for name in names]
    elif text.get("attention_chunk_size"):
        rope = text.get("no_rope_layers") or []
        every = int(text.get("no_rope_layer_interval") or 4)
        rope = rope or [int((layer + 1) % every != 0) for layer in range(num_layers)]
        kinds = [Attention.CHUNKED if one else Attention.FULL for one in rope[:num_layers]]
    elif every := _full_every(text):
        kinds = [
            Attention.FULL if (layer + 1) % every == 0 else Attention.WINDOW
            for layer in range(num_layers)
        ]
    else:
        kinds = [Attention.WINDOW] * num_layers
    if not window:  # vLLM serves a sliding layer without a window as a full one
        kinds = [Attention.FULL if kind is Attention.WINDOW else kind for kind in kinds]
    return kinds


def _full_every(text: Config) -> int:
    given = text.get("sliding_window_pattern") or text.get("_sliding_window_pattern")
    return given if isinstance(given, int) else _FULL_EVERY.get(str(text.get("model_type")), 0)

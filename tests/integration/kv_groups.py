"""KV cache configs with several groups, built by hand: enough for vLLM's real scheduler."""

from typing import Any

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

BLOCK_TOKENS = 4
_SHAPE: dict[str, Any] = {
    "block_size": BLOCK_TOKENS,
    "num_kv_heads": 2,
    "head_size": 16,
    "dtype": torch.float32,
}


def full() -> KVCacheSpec:
    return FullAttentionSpec(**_SHAPE)


def window(num_tokens: int) -> KVCacheSpec:
    return SlidingWindowSpec(**_SHAPE, sliding_window=num_tokens)


def local(num_tokens: int) -> KVCacheSpec:
    return ChunkedLocalAttentionSpec(**_SHAPE, attention_chunk_size=num_tokens)


def mla() -> KVCacheSpec:
    """One head of 64: a page as large as the others', where K and V are one."""
    return MLAAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.float32
    )


def mamba(
    mode: str = "align", *, block_tokens: int = BLOCK_TOKENS, checkpoints: bool = False
) -> KVCacheSpec:
    """One state a block; with ``checkpoints`` the model saves one inside a piece of a prompt."""
    return MambaSpec(
        block_size=block_tokens,
        shapes=((4, 4),),
        dtypes=(torch.float32,),
        page_size_padded=full().page_size_bytes,
        mamba_cache_mode=mode,
        num_prefill_checkpoint_blocks=int(checkpoints),
        prefill_checkpoint_alignment=1 if checkpoints else None,
    )


def grouped_config(
    num_blocks: int,
    specs: list[KVCacheSpec],
    draft: set[int] | None = None,
    retention: int | None = None,
) -> KVCacheConfig:
    """One layer for each group; the groups named in ``draft`` belong to a draft model.

    ``retention``: vLLM keeps what windows and states hold every so many tokens; None: everywhere.
    """
    groups, tensors = [], []
    for i, spec in enumerate(specs):
        layer = f"layer.{i}"
        group = KVCacheGroupSpec([layer], spec)
        group.is_eagle_group = i in (draft or set())
        groups.append(group)
        page = spec.page_size_bytes
        tensors.append(
            KVCacheTensor(
                size=page * num_blocks,
                layers=[layer],
                layer_stride=page * num_blocks,
                block_stride=page,
            )
        )
    return KVCacheConfig(num_blocks, tensors, groups, prefix_cache_retention_interval=retention)

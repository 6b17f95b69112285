"""vLLM's registered KV caches and its ``KVCacheConfig`` -> the engine's ``Layout``.

vLLM (0.32, 0.33) hands over one strided view ``[num_blocks, heads, tokens, content]`` for each
layer; all views lie in one allocation, and groups may overlay each other there. Where a block is
split for the kernels, the first dimension is a multiple of ``num_blocks``. What a page takes is
told by the layer's spec: a view can be shorter (padding) and its block stride longer (packing).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from ...engine.layout import GroupLayout, Layout, group_layout
from ...engine.types import GroupId

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec


def layout_from(
    kv_caches: dict[str, torch.Tensor],
    kv_cache_config: "KVCacheConfig",
    blocks_per_chunk: Mapping[GroupId, int] | None = None,
) -> Layout:
    """The layout of the groups named in ``blocks_per_chunk``.

    A group's id is its index in ``kv_cache_groups``; without ``blocks_per_chunk`` it is every group
    that vLLM lets be transferred, with one block a chunk. Raises ValueError for a spec that is not
    supported, a layer that is not registered, or a tensor that does not fit its spec.
    """
    groups = kv_cache_config.kv_cache_groups
    if blocks_per_chunk is None:
        blocks_per_chunk = {GroupId(index): 1 for index in kv_cache_config.transfer_group_ids}
    unknown = sorted(index for index in blocks_per_chunk if not 0 <= index < len(groups))
    if unknown:
        raise ValueError(f"KV cache groups {unknown}; allowed: 0 to {len(groups) - 1}")
    layouts = tuple(
        _layout_of(GroupId(index), blocks_per_chunk[index], kv_caches, kv_cache_config)
        for index in sorted(blocks_per_chunk)
    )
    kept = {id(cache): cache for cache in kv_caches.values()}
    return Layout(layouts, tuple(kept.values()))


def _layout_of(
    index: GroupId,
    blocks_per_chunk: int,
    kv_caches: dict[str, torch.Tensor],
    kv_cache_config: "KVCacheConfig",
) -> GroupLayout:
    group = kv_cache_config.kv_cache_groups[index]
    if group.host_resident:
        raise ValueError(
            f"KV cache group {index} lives in host memory already; supported: device groups"
        )
    missing = [name for name in group.layer_names if name not in kv_caches]
    if missing:
        raise ValueError(f"KV cache group {index}: layers {missing} are not registered")
    caches = []
    for name in group.layer_names:
        spec = _layer_spec(group, name)
        cache = _by_block(kv_caches[name], kv_cache_config.num_blocks, name)
        _check_spec(spec, cache, name)
        _check_strides(cache, kv_cache_config, name)
        caches.append((cache, spec.page_size_bytes))
    return group_layout(index, blocks_per_chunk, caches)


def _layer_spec(group: "KVCacheGroupSpec", name: str) -> "KVCacheSpec":
    """A layer's own spec, also where the group holds one for each layer."""
    by_layer: dict[str, KVCacheSpec] = getattr(group.kv_cache_spec, "kv_cache_specs", {})
    return by_layer.get(name, group.kv_cache_spec)


def _by_block(cache: torch.Tensor, num_blocks: int, name: str) -> torch.Tensor:
    """The cache with vLLM's blocks, not the kernels' parts of them, as its first dimension."""
    if cache.dim() < 2 or cache.shape[0] % num_blocks or not cache.numel():
        raise ValueError(
            f"layer {name}: cache of shape {tuple(cache.shape)}; allowed: a multiple of "
            f"{num_blocks} blocks first"
        )
    return cache.view(num_blocks, -1, *cache.shape[1:])


def _check_spec(spec: "KVCacheSpec", cache: torch.Tensor, name: str) -> None:
    """A spec must describe pages of its own, and a view must show all of a page but padding."""
    from vllm.v1.kv_cache_interface import AttentionSpec, EncoderOnlyAttentionSpec, MambaSpec

    stored = isinstance(spec, AttentionSpec | MambaSpec) and spec.has_layer_views
    if not stored or isinstance(spec, EncoderOnlyAttentionSpec):
        raise ValueError(
            f"layer {name}: a KV cache of {type(spec).__name__} is not supported; supported: "
            "attention and Mamba specs with a view for each layer"
        )
    assert isinstance(spec, AttentionSpec | MambaSpec)
    shown = cache[0].numel() * cache.element_size()
    if shown != spec.real_page_size_bytes:
        raise ValueError(
            f"layer {name}: a block shows {shown} bytes, its {type(spec).__name__} says "
            f"{spec.real_page_size_bytes}"
        )


def _check_strides(cache: torch.Tensor, kv_cache_config: "KVCacheConfig", name: str) -> None:
    """The view must step from block to block as vLLM's plan of the allocation says."""
    for planned in kv_cache_config.kv_cache_tensors:
        if name in planned.layers and cache.shape[0] > 1:
            stride = cache.stride(0) * cache.element_size()
            if stride != planned.block_stride:
                raise ValueError(
                    f"layer {name}: blocks {stride} bytes apart, the plan of the KV cache says "
                    f"{planned.block_stride}"
                )

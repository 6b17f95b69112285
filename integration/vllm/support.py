"""What this version supports, checked once at start: refused by name, with the reason.

Nothing is half supported: a model or a setting that is not listed here stops the engine before it
serves a token, since a cache that is wrong now and then is worse than none.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import vllm
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from ...engine.admission import GpuPool
from ...engine.geometry import GroupGeometry
from ...engine.rules import GroupKind, GroupRule
from ...engine.types import GroupId
from .config import Options

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

SUPPORTED_VLLM = ((0, 32), (0, 34))
"""From the first, up to and without the second."""


def check_vllm(version: str = vllm.__version__) -> None:
    """Raises ValueError for a vLLM whose hooks this version was not written for."""
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    low, high = SUPPORTED_VLLM
    if not low <= release < high:
        raise ValueError(
            f"kvferry does not know vLLM {version}; allowed: from "
            f"{'.'.join(map(str, low))} and below {'.'.join(map(str, high))}"
        )


def check_config(vllm_config: "VllmConfig") -> None:
    """Raises ValueError for a role or a parallel setting that is not supported."""
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_role != "kv_both":
        raise ValueError(
            f"kv_role={transfer.kv_role!r}: kvferry is a cache, it both stores and loads on every "
            "engine and hands nothing over to another one; allowed: 'kv_both'"
        )
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            raise ValueError(f"{name}={size}: context parallelism is not supported yet; allowed: 1")


def groups_from(
    kv_cache_config: "KVCacheConfig", vllm_config: "VllmConfig", options: Options
) -> tuple[GroupGeometry, ...]:
    """The groups, all offloaded. Raises ValueError for a kind or a mode that is not supported."""
    _, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    groups = []
    # All of them: what no prefix cache serves (rings, replayed windows) is of no kind listed here.
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = _one_layer(group.kv_cache_spec)
        block_tokens = spec.block_size
        if isinstance(spec, MambaSpec):
            _check_recurrent(spec, hash_tokens, vllm_config)
        kind, window, retained = _kind_of(spec)
        rule = GroupRule(
            GroupId(index),
            kind,
            chunk_tokens=block_tokens * options.num_blocks_per_chunk(block_tokens),
            window_tokens=window,
            retained_tokens=retained,
            draft=group.is_eagle_group,
        )
        groups.append(GroupGeometry(rule, block_tokens, hash_tokens))
    if not groups:
        raise ValueError("the model has no KV cache group that a prefix cache can serve")
    return tuple(groups)


def _kind_of(spec: "KVCacheSpec") -> tuple[GroupKind, int | None, int]:
    """The kind of a group, its window in tokens, and what vLLM retains beyond it."""
    if type(spec) in (FullAttentionSpec, MLAAttentionSpec):
        return GroupKind.FULL, None, 0
    if type(spec) is SlidingWindowSpec:
        return GroupKind.WINDOW, spec.sliding_window, spec.extra_retained_tokens
    if type(spec) is ChunkedLocalAttentionSpec:
        return GroupKind.LOCAL, spec.attention_chunk_size, 0
    if type(spec) is MambaSpec:
        return GroupKind.RECURRENT, None, 0
    raise ValueError(
        f"KV cache of kind {type(spec).__name__} is not supported yet; allowed: FullAttentionSpec, "
        "MLAAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec, MambaSpec"
    )


def _check_recurrent(spec: MambaSpec, hash_tokens: int, vllm_config: "VllmConfig") -> None:
    """Raises ValueError where vLLM does not hand over states that end with a block."""
    if spec.mamba_cache_mode != "align":
        raise ValueError(
            f"mamba_cache_mode={spec.mamba_cache_mode!r}: a recurrent (Mamba, linear attention) "
            "group has a state to go on from only where it ends with a block; allowed: 'align' "
            "(--mamba-cache-mode align, with prefix caching on)"
        )
    if vllm_config.speculative_config is not None:
        raise ValueError(
            "speculative decoding beside a recurrent (Mamba, linear attention) group is not "
            "supported yet; allowed: no speculative_config. To have both use vLLM's own "
            "OffloadingConnector"
        )
    if spec.block_size != hash_tokens:
        raise ValueError(
            f"block hashes of {hash_tokens} tokens beside recurrent (Mamba, linear attention) "
            f"blocks of {spec.block_size}: hits that end inside such a block are not supported "
            "yet; allowed: one block size for all groups (leave --prefix-match-unit and "
            "--mamba-block-size unset). To have such hits use vLLM's own OffloadingConnector"
        )


def writes_before_flush(kv_cache_config: "KVCacheConfig", vllm_config: "VllmConfig") -> bool:
    """Whether vLLM's worker writes to fresh blocks before it hands over a step's flush list.

    The second model runner (0.32, 0.33) zeroes blocks and copies partial ones, and recurrent states
    to the next block, before it calls ``handle_preemptions``, the first one after that. It zeroes
    for caches of mixed precision and beside recurrent groups, and copies blocks where a hit may end
    inside one, which takes several groups.
    """
    if not vllm_config.use_v2_model_runner:
        return False
    several = len(kv_cache_config.kv_cache_groups) > 1
    return bool(kv_cache_config.needs_kv_cache_zeroing) or several


def gpu_pool_of(kv_cache_config: "KVCacheConfig", vllm_config: "VllmConfig") -> GpuPool:
    """What vLLM's block pool has for requests; one block of it is the null block."""
    return GpuPool(
        kv_cache_config.num_blocks - 1,
        vllm_config.max_in_flight_tokens,
        2 * vllm_config.num_speculative_tokens + 1,
    )


def estimated_slot_bytes(kv_cache_config: "KVCacheConfig", groups: Sequence[GroupGeometry]) -> int:
    """Bytes of one chunk as the scheduler sees it: a guess until the ranks have reported theirs."""
    sizes = []
    for geometry in groups:
        group = kv_cache_config.kv_cache_groups[geometry.group]
        page_bytes = int(_one_layer(group.kv_cache_spec).page_size_bytes)
        sizes.append(page_bytes * len(group.layer_names) * geometry.blocks_per_chunk)
    return max(sizes)


def _one_layer(spec: "KVCacheSpec") -> "KVCacheSpec":
    if isinstance(spec, UniformTypeKVCacheSpecs):
        kinds = {type(layer) for layer in spec.kv_cache_specs.values()}
        if len(kinds) != 1:
            names = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise ValueError(f"a KV cache group that mixes {names} is not supported yet")
        return next(iter(spec.kv_cache_specs.values()))
    return spec

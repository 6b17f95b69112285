"""``layout_from`` on caches that vLLM itself allocates, for every layout and kind of group."""

from dataclasses import replace

import pytest
import torch
from kvferry.engine.types import GroupId
from kvferry.integration.vllm.caches import layout_from
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    compute_layout_strides,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

NUM_BLOCKS = 6
NAMES = ["model.0", "model.1", "model.2"]


def full(**changes: object) -> FullAttentionSpec:
    values = {"block_size": 4, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}
    return FullAttentionSpec(**(values | changes))


def plan(spec, layout: KVCacheLayout, names: list[str]) -> KVCacheTensor:
    """Where vLLM's own stride rule puts these layers."""
    strides = compute_layout_strides(spec, NUM_BLOCKS, len(names), layout)
    page = spec.page_size_bytes
    return KVCacheTensor(NUM_BLOCKS * len(names) * page, names, strides[0], strides[1])


def allocate(config: KVCacheConfig, layout: KVCacheLayout, kernel_block_sizes=None):
    return allocate_kv_cache(
        config, torch.device("cpu"), layout=layout, kernel_block_sizes=kernel_block_sizes
    )


def bytes_at(layout, group: int, block: int) -> torch.Tensor:
    """A block's bytes through the fragments."""
    import ctypes

    parts = [
        ctypes.string_at(one.base_address + block * one.block_stride_bytes, one.num_bytes)
        for one in layout.group(GroupId(group)).fragments
    ]
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)


def fill(caches: dict[str, torch.Tensor], block: int, value: int, num_blocks: int) -> None:
    for cache in caches.values():
        ratio = cache.shape[0] // num_blocks
        cache[block * ratio : (block + 1) * ratio].view(torch.uint8).fill_(value)


@pytest.mark.parametrize(
    ("order", "num_fragments"),
    [("LBHNC", 3), ("LBNHC", 3), ("LHBNC", 6), ("BLHNC", 1), ("BLNHC", 1), ("BHLNC", 1)],
)
def test_all_physical_layouts(order: str, num_fragments: int) -> None:
    spec, layout = full(), KVCacheLayout[order]
    config = KVCacheConfig(NUM_BLOCKS, [plan(spec, layout, NAMES)], [KVCacheGroupSpec(NAMES, spec)])
    caches = allocate(config, layout)
    fill(caches, 4, 9, NUM_BLOCKS)
    made = layout_from(caches, config, {GroupId(0): 2})
    group = made.group(GroupId(0))
    assert len(group.fragments) == num_fragments
    assert group.block_bytes == 3 * spec.page_size_bytes
    assert group.blocks_per_chunk == 2
    assert group.num_blocks == NUM_BLOCKS
    assert (bytes_at(made, 0, 4) == 9).all()
    assert not bytes_at(made, 0, 3).any()
    assert not bytes_at(made, 0, 5).any()
    assert layout_from(caches, config).group(GroupId(0)).blocks_per_chunk == 1


def test_blocks_split_for_the_kernels() -> None:
    spec, layout = full(block_size=16), KVCacheLayout.LBHNC
    config = KVCacheConfig(NUM_BLOCKS, [plan(spec, layout, NAMES)], [KVCacheGroupSpec(NAMES, spec)])
    caches = allocate(config, layout, [4])
    assert caches[NAMES[0]].shape[0] == 4 * NUM_BLOCKS
    fill(caches, 2, 7, NUM_BLOCKS)
    made = layout_from(caches, config)
    assert len(made.group(GroupId(0)).fragments) == 3
    assert (bytes_at(made, 0, 2) == 7).all()
    assert not bytes_at(made, 0, 1).any()


def test_groups_that_overlay_each_other_with_a_padded_mamba_page() -> None:
    spec = full()
    page = spec.page_size_bytes
    mamba = MambaSpec(
        block_size=4, shapes=((3, 5), (7,)), dtypes=(torch.float32,) * 2, page_size_padded=page
    )
    window = SlidingWindowSpec(
        block_size=4, num_kv_heads=2, head_size=8, dtype=torch.float32, sliding_window=8
    )
    specs = [spec, mamba, window]
    size = NUM_BLOCKS * page
    tensors = [KVCacheTensor(size, [name], size, page) for name in NAMES]
    groups = [KVCacheGroupSpec([name], one) for name, one in zip(NAMES, specs, strict=True)]
    config = KVCacheConfig(NUM_BLOCKS, tensors, groups)
    made = layout_from(allocate(config, KVCacheLayout.LBHNC), config)
    assert [group.block_bytes for group in made.groups] == [page, 4 * 22, page]
    assert len({group.fragments[0].base_address for group in made.groups}) == 1
    assert made.slot_stride_bytes == page
    assert made.wasted_bytes()[GroupId(1)] == page - 88


def test_a_group_of_layers_with_sizes_of_their_own() -> None:
    small, large = full(), full(num_kv_heads=6)
    both = UniformTypeKVCacheSpecs(block_size=4, kv_cache_specs={"a": small, "b": large})
    sizes = {"a": small.page_size_bytes, "b": large.page_size_bytes}
    total = NUM_BLOCKS * sum(sizes.values())
    tensors = [
        KVCacheTensor(total, ["a"], total, sum(sizes.values()), 0),
        KVCacheTensor(total, ["b"], total, sum(sizes.values()), sizes["a"]),
    ]
    config = KVCacheConfig(NUM_BLOCKS, tensors, [KVCacheGroupSpec(["a", "b"], both)])
    made = layout_from(allocate(config, KVCacheLayout.BLHNC), config)
    assert made.group(GroupId(0)).block_bytes == sum(sizes.values())
    assert len(made.group(GroupId(0)).fragments) == 1, "packed neighbours are one fragment"


def test_latent_attention() -> None:
    spec = MLAAttentionSpec(block_size=4, num_kv_heads=1, head_size=24, dtype=torch.bfloat16)
    layout = KVCacheLayout.LBHNC
    config = KVCacheConfig(NUM_BLOCKS, [plan(spec, layout, NAMES)], [KVCacheGroupSpec(NAMES, spec)])
    made = layout_from(allocate(config, layout), config)
    assert made.group(GroupId(0)).block_bytes == 3 * 4 * 24 * 2


def test_a_layer_that_shares_another_ones_cache_is_moved_once() -> None:
    spec, layout = full(), KVCacheLayout.LBHNC
    config = KVCacheConfig(
        NUM_BLOCKS,
        [plan(spec, layout, NAMES)],
        [KVCacheGroupSpec([*NAMES, "shared"], spec)],
    )
    caches = allocate(config, layout)
    caches["shared"] = caches[NAMES[0]]
    made = layout_from(caches, config)
    assert made.group(GroupId(0)).block_bytes == 3 * spec.page_size_bytes
    assert len(made.tensors) == 3


def simple() -> tuple[dict[str, torch.Tensor], KVCacheConfig]:
    spec, layout = full(), KVCacheLayout.LBHNC
    config = KVCacheConfig(NUM_BLOCKS, [plan(spec, layout, NAMES)], [KVCacheGroupSpec(NAMES, spec)])
    return allocate(config, layout), config


def test_what_is_not_supported_is_refused_by_name() -> None:
    from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec, HiSparseHotSpec

    caches, config = simple()
    hot = HiSparseHotSpec(block_size=4, page_size=512, blocks_per_request=1)
    encoder = EncoderOnlyAttentionSpec(
        block_size=4, num_kv_heads=2, head_size=8, dtype=torch.float32
    )
    for spec in (hot, encoder):
        config.kv_cache_groups = [KVCacheGroupSpec(NAMES, spec)]
        with pytest.raises(ValueError, match=f"{type(spec).__name__} is not supported; supported"):
            layout_from(caches, config, {GroupId(0): 1})
    config.kv_cache_groups = [KVCacheGroupSpec(NAMES, full(), host_resident=True)]
    with pytest.raises(ValueError, match="lives in host memory"):
        layout_from(caches, config, {GroupId(0): 1})


def test_caches_that_do_not_fit_their_plan_are_refused() -> None:
    caches, config = simple()
    with pytest.raises(ValueError, match=r"KV cache groups \[1\]; allowed: 0 to 0"):
        layout_from(caches, config, {GroupId(1): 1})
    with pytest.raises(ValueError, match=r"layers \['model.2'\] are not registered"):
        layout_from({name: caches[name] for name in NAMES[:2]}, config)
    with pytest.raises(ValueError, match="a multiple of 5 blocks"):
        layout_from(caches, replace(config, num_blocks=5))
    wrong = replace(config, kv_cache_groups=[KVCacheGroupSpec(NAMES, full(head_size=16))])
    with pytest.raises(ValueError, match="a block shows 512 bytes, its FullAttentionSpec says"):
        layout_from(caches, wrong)
    config.kv_cache_tensors[0].block_stride += 16
    with pytest.raises(ValueError, match="the plan of the KV cache says 528"):
        layout_from(caches, config)

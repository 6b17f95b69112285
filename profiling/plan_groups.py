"""Layers -> KV cache groups, as vLLM forms them, -> the engine's own layout of slots.

vLLM gives one block table to each group. Layers of one kind form one group. Where there are
several kinds, every group has the same number of layers (that of the rarest kind, or of the most
frequent one where they are within half of each other), so that a block of any group takes the same
GPU memory and the groups can share it; a kind with more layers is spread over several groups.
"""

from dataclasses import dataclass
from typing import Final

from ..engine.layout import GroupLayout, Layout
from ..engine.rules import GroupKind, GroupRule
from ..engine.types import GroupId
from ..kernels.table import Fragment
from .plan_model import Attention, LayerCache

ITEM_BYTES: Final = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
"""Bytes of an element of the KV cache, by vLLM's names."""

KV_LAYOUTS: Final = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""vLLM's physical layouts: layer, block, head, token, content from the outside in."""

_KINDS: Final = {
    Attention.FULL: GroupKind.FULL,
    Attention.LATENT: GroupKind.FULL,
    Attention.WINDOW: GroupKind.WINDOW,
    Attention.CHUNKED: GroupKind.LOCAL,
}

_MOSTLY_EQUAL: Final = 1.5


@dataclass(frozen=True, slots=True)
class Group:
    """One KV cache group on one rank. ``page_bytes`` is one layer's for one block."""

    attention: Attention
    reach_tokens: int
    num_layers: int
    num_heads: int
    page_bytes: int

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.page_bytes

    def rule(self, chunk_tokens: int) -> GroupRule:
        """The engine's own rule for which chunks a hit needs."""
        return GroupRule(
            GroupId(0), _KINDS[self.attention], chunk_tokens, self.reach_tokens or None
        )


def groups_of(
    layers: tuple[LayerCache, ...], block_tokens: int, num_ranks: int, item_bytes: int
) -> tuple[Group, ...]:
    """The groups of one rank. Raises ValueError when kinds differ in their pages' bytes."""
    buckets: dict[LayerCache, int] = {}
    for layer in layers:
        buckets[layer] = buckets.get(layer, 0) + 1
    pages = {
        layer: layer.heads_per_rank(num_ranks) * block_tokens * layer.num_elements * item_bytes
        for layer in buckets
    }
    if len(set(pages.values())) > 1:
        raise ValueError(
            f"layers with pages of {sorted(set(pages.values()))} bytes; kvferry plan can size "
            "models whose layers all have pages of one size"
        )
    size = min(buckets.values())
    if max(buckets.values()) < size * _MOSTLY_EQUAL:
        size = max(buckets.values())
    return tuple(
        Group(
            layer.attention,
            layer.reach_tokens,
            len(range(index, count, num_groups)),
            layer.heads_per_rank(num_ranks),
            pages[layer],
        )
        for layer, count in buckets.items()
        for num_groups in [-(-count // size)]
        for index in range(num_groups)
    )


def layout_of(groups: tuple[Group, ...], blocks_per_chunk: int, kv_layout: str) -> Layout:
    """The layout that the engine would make of these groups: only sizes count, addresses do not."""
    return Layout(
        tuple(
            GroupLayout(GroupId(index), blocks_per_chunk, _fragments(group, kv_layout), 1)
            for index, group in enumerate(groups)
        )
    )


def _fragments(group: Group, kv_layout: str) -> tuple[Fragment, ...]:
    if kv_layout not in KV_LAYOUTS:
        raise ValueError(f"KV layout {kv_layout!r}; allowed: {', '.join(KV_LAYOUTS)}")
    if kv_layout.startswith("B"):
        count, size = 1, group.block_bytes
    elif kv_layout.startswith("LH"):
        count, size = group.num_layers * group.num_heads, group.page_bytes // group.num_heads
    else:
        count, size = group.num_layers, group.page_bytes
    return tuple(Fragment(index * size, size, size) for index in range(count))

"""Layers -> KV cache groups, as vLLM forms them, -> the engine's own layout of slots.

vLLM gives one block table to each group. Layers of one kind form one group. Where there are
several kinds, every group has the same number of layers (that of the rarest kind, or of the most
frequent one where they are within half of each other), so that a block of any group takes the same
GPU memory and the groups can share it; a kind with more layers is spread over several groups.

Beside recurrent layers vLLM makes the blocks longer, until a layer's page of attention holds a
state; the state's page is padded to that size. Only the state itself is copied.
"""

from dataclasses import dataclass
from typing import Final

from ..engine.layout import GroupLayout, Layout
from ..engine.rules import GroupKind, GroupRule
from ..engine.types import GroupId
from ..kernels.table import Fragment
from .plan_model import Attention, Layer, LayerCache
from .plan_recurrent import LayerState

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
    Attention.RECURRENT: GroupKind.RECURRENT,
}

_MOSTLY_EQUAL: Final = 1.5

_KERNEL_TOKENS: Final = 16
"""The shortest block of the usual attention kernels on a GPU."""


@dataclass(frozen=True, slots=True)
class Group:
    """One KV cache group on one rank. ``page_bytes`` is one layer's for one block, of which a
    recurrent layer fills ``state_bytes``; that is 0 for the others."""

    attention: Attention
    reach_tokens: int
    num_layers: int
    num_heads: int
    page_bytes: int
    state_bytes: int = 0

    @property
    def block_bytes(self) -> int:
        """GPU memory that a block takes."""
        return self.num_layers * self.page_bytes

    @property
    def is_recurrent(self) -> bool:
        return self.attention is Attention.RECURRENT

    def chunk_bytes(self, blocks_per_chunk: int) -> int:
        """What is copied of a chunk: of a recurrent group the one state at its end."""
        if self.is_recurrent:
            return self.num_layers * self.state_bytes
        return self.block_bytes * blocks_per_chunk

    def rule(self, chunk_tokens: int) -> GroupRule:
        """The engine's own rule for which chunks a hit needs."""
        return GroupRule(
            GroupId(0), _KINDS[self.attention], chunk_tokens, self.reach_tokens or None
        )


def block_tokens_of(
    layers: tuple[Layer, ...], block_tokens: int, num_ranks: int, item_bytes: int
) -> int:
    """The block size that vLLM makes of the one asked for: beside recurrent layers the least whole
    number of such blocks whose page holds a state. Raises ValueError as ``groups_of``."""
    states = _states(layers, num_ranks)
    if not states:
        return block_tokens
    token_bytes = max(
        _page_bytes(layer, 1, num_ranks, item_bytes)
        for layer in layers
        if isinstance(layer, LayerCache)
    )
    needed = block_tokens * -(-max(states.values()) // (block_tokens * token_bytes))
    return _KERNEL_TOKENS * -(-needed // _KERNEL_TOKENS)


def groups_of(
    layers: tuple[Layer, ...], block_tokens: int, num_ranks: int, item_bytes: int
) -> tuple[Group, ...]:
    """The groups of one rank, for blocks as ``block_tokens_of`` tells. Raises ValueError when kinds
    differ in their pages' bytes, and when a page of attention cannot hold a state."""
    buckets: dict[Layer, int] = {}
    for layer in layers:
        buckets[layer] = buckets.get(layer, 0) + 1
    pages = {
        _page_bytes(layer, block_tokens, num_ranks, item_bytes)
        for layer in buckets
        if isinstance(layer, LayerCache)
    }
    if len(pages) != 1:
        raise ValueError(
            f"layers with pages of {sorted(pages)} bytes; kvferry plan can size "
            "models whose layers all have pages of one size"
        )
    (page_bytes,) = pages
    states = _states(layers, num_ranks)
    if states and max(states.values()) > page_bytes:
        raise ValueError(
            f"states of {max(states.values())} bytes, pages of {page_bytes} with blocks of "
            f"{block_tokens} tokens; allowed: pages that hold a state"
        )
    size = min(buckets.values())
    if max(buckets.values()) < size * _MOSTLY_EQUAL:
        size = max(buckets.values())
    return tuple(
        _group(layer, len(range(index, count, num_groups)), num_ranks, page_bytes, states)
        for layer, count in buckets.items()
        for num_groups in [-(-count // size)]
        for index in range(num_groups)
    )


def _group(
    layer: Layer, num_layers: int, num_ranks: int, page_bytes: int, states: dict[LayerState, int]
) -> Group:
    if isinstance(layer, LayerState):
        heads = layer.num_heads // num_ranks
        return Group(Attention.RECURRENT, 0, num_layers, heads, page_bytes, states[layer])
    heads = layer.heads_per_rank(num_ranks)
    return Group(layer.attention, layer.reach_tokens, num_layers, heads, page_bytes)


def _states(layers: tuple[Layer, ...], num_ranks: int) -> dict[LayerState, int]:
    """The bytes on one rank of each kind of state."""
    kinds = {layer for layer in layers if isinstance(layer, LayerState)}
    return {layer: layer.bytes_per_rank(num_ranks, ITEM_BYTES) for layer in kinds}


def _page_bytes(layer: LayerCache, block_tokens: int, num_ranks: int, item_bytes: int) -> int:
    return layer.heads_per_rank(num_ranks) * block_tokens * layer.num_elements * item_bytes


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
    if group.is_recurrent and kv_layout.startswith("B"):
        # Neighbours are joined with the padding between them; that of the last is not copied.
        count, size = 1, group.block_bytes - group.page_bytes + group.state_bytes
    elif group.is_recurrent:
        count, size = group.num_layers, group.state_bytes
    elif kv_layout.startswith("B"):
        count, size = 1, group.block_bytes
    elif kv_layout.startswith("LH"):
        count, size = group.num_layers * group.num_heads, group.page_bytes // group.num_heads
    else:
        count, size = group.num_layers, group.page_bytes
    return tuple(Fragment(index * size, size, size) for index in range(count))

"""GPU tensors -> the fragments of a block; the byte format of a slot.

A fragment is a run of bytes that is contiguous in GPU memory for every block, at a constant
stride from block to block. Fragments stand in the order of their addresses, and neighbours are
merged: in a block-first layout all layers of a block are one fragment, in a layer-first one there
is one a layer.

A slot holds one chunk: block after block (``block_bytes`` each), and in a block its fragments back
to back, in table order. There is one slot size for all groups, the largest group's.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ..kernels.table import Fragment
from .types import GroupId

SLOT_ALIGNMENT_BYTES = 64
"""A cache line: neighbouring slots never share one, and 16-byte accesses stay aligned."""

CHECKSUM_BYTES = 8


@dataclass(frozen=True, slots=True)
class PageView:
    """One layer's cache: its first block's runs of bytes, and what a page of it takes.

    ``page_bytes`` includes padding at a page's end, which belongs to the layer and may be copied
    with it.
    """

    fragments: tuple[Fragment, ...]
    page_bytes: int


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """One KV cache group: where block ``b``'s bytes lie, and how many blocks make a chunk."""

    group: GroupId
    blocks_per_chunk: int
    fragments: tuple[Fragment, ...]
    num_blocks: int

    def __post_init__(self) -> None:
        if self.blocks_per_chunk < 1 or self.num_blocks < 1 or not self.fragments:
            raise ValueError(
                f"group {self.group}: {self.blocks_per_chunk} blocks a chunk, {self.num_blocks} "
                f"blocks, {len(self.fragments)} fragments; allowed: at least one of each"
            )

    @property
    def block_bytes(self) -> int:
        """Bytes of one block on this rank, over all layers of the group."""
        return sum(fragment.num_bytes for fragment in self.fragments)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one chunk."""
        return self.blocks_per_chunk * self.block_bytes

    @property
    def checksum_bytes(self) -> int:
        """Bytes of one chunk's checksums: one for each block and fragment."""
        return self.blocks_per_chunk * len(self.fragments) * CHECKSUM_BYTES


@dataclass(frozen=True, slots=True)
class Layout:
    """The groups of one rank that are offloaded. ``tensors`` are kept alive, nothing else."""

    groups: tuple[GroupLayout, ...]
    tensors: tuple[torch.Tensor, ...] = ()

    def __post_init__(self) -> None:
        ids = [group.group for group in self.groups]
        if not ids or len(set(ids)) != len(ids):
            raise ValueError(f"layout of groups {ids}; allowed: at least one, each once")

    def group(self, group: GroupId) -> GroupLayout:
        """The layout of one group; ValueError when it is not offloaded."""
        for layout in self.groups:
            if layout.group == group:
                return layout
        known = [layout.group for layout in self.groups]
        raise ValueError(f"no group {group} in this layout; allowed: {known}")

    @property
    def slot_stride_bytes(self) -> int:
        """The one slot size: the largest group's, rounded up to a cache line."""
        largest = max(group.slot_bytes for group in self.groups)
        return -(-largest // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES

    @property
    def checksum_stride_bytes(self) -> int:
        """Bytes of checksums beside each slot: the largest group's."""
        return max(group.checksum_bytes for group in self.groups)

    def bytes_per_slot(self, *, checksums: bool) -> int:
        """What one slot costs of the memory asked for."""
        return self.slot_stride_bytes + (self.checksum_stride_bytes if checksums else 0)

    def wasted_bytes(self) -> dict[GroupId, int]:
        """For each group, the bytes of a slot that a chunk of it leaves unused."""
        return {group.group: self.slot_stride_bytes - group.slot_bytes for group in self.groups}


def page_view(cache: torch.Tensor, page_bytes: int) -> PageView:
    """The runs of bytes of one layer's cache ``[num_blocks, ...]`` of any strides.

    Raises ValueError for an overlapping view, and when a block has more than ``page_bytes``.
    """
    if cache.dim() < 2 or cache.shape[0] < 1:
        raise ValueError(f"cache of shape {tuple(cache.shape)}; allowed: [num_blocks, ...]")
    item = cache.element_size()
    inner = [
        (stride * item, size)
        for stride, size in zip(cache.stride()[1:], cache.shape[1:], strict=True)
        if size != 1
    ]
    inner.sort()
    run = item
    while inner and inner[0][0] == run:
        run *= inner.pop(0)[1]
    block_stride = cache.stride(0) * item
    num_bytes = cache[0].numel() * item
    if any(stride < run for stride, _ in inner) or (cache.shape[0] > 1 and block_stride < run):
        raise ValueError(
            f"cache of shape {tuple(cache.shape)} and strides {cache.stride()} covers bytes twice"
        )
    if not 0 < num_bytes <= page_bytes:
        raise ValueError(f"a block of {num_bytes} bytes; allowed: 1 to a page of {page_bytes}")
    steps = [range(0, stride * size, stride) for stride, size in reversed(inner)]
    fragments = tuple(
        Fragment(cache.data_ptr() + sum(offsets), block_stride, run)
        for offsets in itertools.product(*steps)
    )
    return PageView(fragments, page_bytes)


def merge_fragments(pages: Iterable[PageView]) -> tuple[Fragment, ...]:
    """All layers' fragments in address order, neighbours merged, equal ones (shared caches) once.

    Where a page is one run and ends in padding, the padding is copied too when that joins it to
    the next page. Raises ValueError when two fragments of a block overlap.
    """
    reach: dict[Fragment, int] = {}
    for page in pages:
        for fragment in page.fragments:
            whole = len(page.fragments) == 1
            size = page.page_bytes if whole else fragment.num_bytes
            reach[fragment] = max(reach.get(fragment, 0), size)
    merged: list[Fragment] = []
    end = 0  # where the last merged fragment may be joined: its end, padding included
    for fragment in sorted(reach, key=lambda one: (one.base_address, one.num_bytes)):
        last = merged[-1] if merged else None
        base = fragment.base_address
        if last and base < last.base_address + last.num_bytes:
            raise ValueError(f"fragments {last} and {fragment} of one block overlap")
        alike = last and last.block_stride_bytes == fragment.block_stride_bytes
        if last and alike and last.base_address + last.num_bytes <= base <= end:
            size = base + fragment.num_bytes - last.base_address
            if size <= fragment.block_stride_bytes:
                merged[-1] = Fragment(last.base_address, last.block_stride_bytes, size)
                end = base + reach[fragment]
                continue
        merged.append(fragment)
        end = base + reach[fragment]
    return tuple(merged)


def group_layout(
    group: GroupId, blocks_per_chunk: int, caches: Sequence[tuple[torch.Tensor, int]]
) -> GroupLayout:
    """One group from its layers' caches ``[num_blocks, ...]``, each with its page's bytes."""
    counts = {cache.shape[0] for cache, _ in caches}
    if len(counts) != 1:
        raise ValueError(f"group {group}: caches of {sorted(counts)} blocks; allowed: one count")
    pages = [page_view(cache, page_bytes) for cache, page_bytes in caches]
    return GroupLayout(group, blocks_per_chunk, merge_fragments(pages), counts.pop())

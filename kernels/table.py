"""Where the bytes are: the fragments of a KV cache group, and the slots in host memory.

A block of a KV cache group is a list of fragments, always in the same order. Fragment ``f`` of
block ``b`` begins at ``base_address[f] + b * block_stride_bytes[f]``; in a slot the fragments of a
block lie back to back in that order, and the blocks of a chunk one after another. Both descriptions
are built once; a transfer names only block and slot ids, and the kernels compute every address.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

ACCESS_WIDTHS_BYTES = (16, 4, 1)
"""The widths the kernels load and store with; a table's alignment decides which."""

_MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Fragment:
    """One contiguous piece of every block: its address in block 0, and the step to the next."""

    base_address: int
    block_stride_bytes: int
    num_bytes: int


class FragmentTable:
    """The resident table of one KV cache group, which the kernels read.

    ``records`` is an int64 tensor ``[4, num_fragments]`` on ``device``: base addresses, block
    strides, sizes and offsets inside a block's part of a slot, all in bytes. The memory the
    addresses point to is kept alive only by what is passed as ``owned``.

    Raises ``ValueError`` for an empty table, a fragment without bytes, a negative address, blocks
    that overlap, or a table too large for 32-bit counts.
    """

    def __init__(
        self,
        fragments: Sequence[Fragment],
        *,
        num_blocks: int,
        device: torch.device | str,
        owned: Sequence[torch.Tensor] = (),
    ) -> None:
        _check_fragments(fragments, num_blocks)
        self.fragments = tuple(fragments)
        self.num_blocks = num_blocks
        self.num_fragments = len(self.fragments)
        self.fragment_bytes = tuple(f.num_bytes for f in self.fragments)
        self.offsets_bytes = (0, *accumulate(self.fragment_bytes))[:-1]
        self.block_bytes = sum(self.fragment_bytes)
        self.max_fragment_bytes = max(self.fragment_bytes)
        self.access_bytes = _access_bytes(self.fragments, num_blocks)
        self._owned = tuple(owned)
        self.records = torch.tensor(
            [
                [f.base_address for f in self.fragments],
                [f.block_stride_bytes for f in self.fragments],
                self.fragment_bytes,
                self.offsets_bytes,
            ],
            dtype=torch.int64,
            device=device,
        )
        self.device = self.records.device

    @classmethod
    def from_views(cls, views: Sequence[torch.Tensor]) -> "FragmentTable":
        """A table over uint8 views ``[num_blocks, num_bytes]``, one a fragment, which it keeps.

        A view's last dimension must be contiguous; its first stride is the block stride.
        """
        if not views:
            raise ValueError("a fragment table needs at least one fragment, got none")
        for index, view in enumerate(views):
            if view.dtype != torch.uint8 or view.dim() != 2 or view.stride(1) != 1:
                raise ValueError(
                    f"fragment {index} must be a uint8 view [num_blocks, num_bytes] with "
                    f"contiguous bytes, got {view.dtype} {tuple(view.shape)} with strides "
                    f"{view.stride()}"
                )
            if view.shape[0] != views[0].shape[0] or view.device != views[0].device:
                raise ValueError(
                    f"all fragments must have the blocks and device of the first "
                    f"({views[0].shape[0]} on {views[0].device}), fragment {index} has "
                    f"{view.shape[0]} on {view.device}"
                )
        fragments = [Fragment(v.data_ptr(), v.stride(0), v.shape[1]) for v in views]
        return cls(
            fragments, num_blocks=views[0].shape[0], device=views[0].device, owned=tuple(views)
        )

    def __repr__(self) -> str:
        return (
            f"FragmentTable({self.num_fragments} fragments, {self.num_blocks} blocks of "
            f"{self.block_bytes} bytes in accesses of {self.access_bytes}, on {self.device})"
        )


@dataclass(frozen=True, slots=True)
class HostSlots:
    """The slots of one KV cache group in host memory.

    ``memory`` is a contiguous uint8 tensor ``[at least num_slots * slot_stride_bytes]`` on the CPU,
    pinned where the pages are on a GPU. Slots are ``slot_stride_bytes`` apart, which may be more
    than a chunk of this group needs. Raises ``ValueError`` where these do not fit together.
    """

    memory: torch.Tensor
    slot_stride_bytes: int
    num_slots: int
    blocks_per_chunk: int

    def __post_init__(self) -> None:
        if self.slot_stride_bytes < 1 or self.num_slots < 1 or self.blocks_per_chunk < 1:
            raise ValueError(
                "slot_stride_bytes, num_slots and blocks_per_chunk must be at least 1, got "
                f"{self.slot_stride_bytes}, {self.num_slots} and {self.blocks_per_chunk}"
            )
        memory = self.memory
        if memory.dtype != torch.uint8 or memory.dim() != 1 or not memory.is_contiguous():
            raise ValueError(
                "slot memory must be a contiguous 1-D uint8 tensor, got "
                f"{memory.dtype} {tuple(memory.shape)} with strides {memory.stride()}"
            )
        if memory.device.type != "cpu":
            raise ValueError(f"slot memory must be on the cpu, got {memory.device}")
        if self.num_slots * self.slot_stride_bytes > memory.numel():
            raise ValueError(
                f"{self.num_slots} slots of {self.slot_stride_bytes} bytes need "
                f"{self.num_slots * self.slot_stride_bytes} bytes, the memory has {memory.numel()}"
            )


@dataclass(frozen=True, slots=True)
class ChecksumSlots:
    """The checksums beside the slots of one KV cache group.

    ``values`` is an int64 tensor ``[num_slots, row]``, on the CPU (pinned for a GPU) or on the GPU.
    A row holds at least ``blocks_per_chunk * num_fragments`` values: ``[position, fragment]``.
    """

    values: torch.Tensor
    blocks_per_chunk: int

    def __post_init__(self) -> None:
        values = self.values
        if values.dtype != torch.int64 or values.dim() != 2 or not values.is_contiguous():
            raise ValueError(
                "checksums must be a contiguous int64 tensor [num_slots, row], got "
                f"{values.dtype} {tuple(values.shape)} with strides {values.stride()}"
            )
        if self.blocks_per_chunk < 1:
            raise ValueError(f"blocks_per_chunk must be at least 1, got {self.blocks_per_chunk}")

    @property
    def num_slots(self) -> int:
        return self.values.shape[0]


def _access_bytes(fragments: Sequence[Fragment], num_blocks: int) -> int:
    """The widest access that divides every address and size the table can make."""
    alignment = 0
    for f in fragments:
        stride = f.block_stride_bytes if num_blocks > 1 else 0
        alignment = math.gcd(alignment, f.base_address, stride, f.num_bytes)
    return next(width for width in ACCESS_WIDTHS_BYTES if alignment % width == 0)


def _check_fragments(fragments: Sequence[Fragment], num_blocks: int) -> None:
    if not 0 < len(fragments) <= _MAX_INT32:
        raise ValueError(
            f"a fragment table needs 1 to {_MAX_INT32} fragments, got {len(fragments)}"
        )
    if not 0 < num_blocks <= _MAX_INT32:
        raise ValueError(f"num_blocks must be 1 to {_MAX_INT32}, got {num_blocks}")
    for index, f in enumerate(fragments):
        if f.num_bytes < 1 or f.base_address < 0:
            raise ValueError(
                f"fragment {index} needs at least one byte and an address of 0 or more, got {f}"
            )
        if num_blocks > 1 and f.block_stride_bytes < f.num_bytes:
            raise ValueError(
                f"fragment {index}: blocks overlap: the block stride of {f.block_stride_bytes} "
                f"bytes is less than the {f.num_bytes} bytes of the fragment"
            )

"""GPU tensors -> the fragments of a block; the byte format of a slot."""

from dataclasses import dataclass

from ..kernels.table import Fragment
from .types import GroupId


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """One KV cache group: where block ``b``'s bytes lie, and how many blocks make a chunk.

    In a slot the blocks of a chunk lie one after the other (``block_bytes`` each), in a block its
    fragments back to back, in table order.
    """

    group: GroupId
    blocks_per_chunk: int
    fragments: tuple[Fragment, ...]
    num_blocks: int

    @property
    def block_bytes(self) -> int:
        return sum(fragment.num_bytes for fragment in self.fragments)

    @property
    def slot_bytes(self) -> int:
        return self.blocks_per_chunk * self.block_bytes


@dataclass(frozen=True, slots=True)
class Layout:
    """All groups of one rank, in order of their ids."""

    groups: tuple[GroupLayout, ...]

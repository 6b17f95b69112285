"""Which GPU blocks hold only what was computed since the host cache was reset.

A reset of the host cache does not always empty vLLM's own: while blocks are in use vLLM keeps it,
and goes on serving from it. What it serves then is *old*, and so is whatever is computed from that.
Nothing old may be stored, or a lookup after the reset would find bytes from before it.
"""

from collections.abc import Iterable, Sequence

from .geometry import GroupGeometry
from .types import NO_BLOCK, BlockId


class FreshBlocks:
    """Keeps nothing until the first reset; from then on, at most the ids of the pool's blocks.

    A block is fresh from when it is given to a request that is fresh itself, until it is given to
    one that is not, or to somebody unknown.
    """

    def __init__(self) -> None:
        self._fresh: set[BlockId] | None = None

    @property
    def watching(self) -> bool:
        """Whether there was a reset, so that it matters who is given a block."""
        return self._fresh is not None

    def reset(self) -> None:
        """Every block is old."""
        self._fresh = set()

    def is_old(self, block: BlockId) -> bool:
        """Whether the block may hold what is from before the reset."""
        return self._fresh is not None and block not in self._fresh

    def begins_old(
        self,
        groups: Sequence[GroupGeometry],
        tables: Sequence[Sequence[BlockId]],
        num_local_tokens: int,
    ) -> bool:
        """Whether any of a request's first ``num_local_tokens``, from vLLM's cache, is old.

        ``tables`` are the request's block tables, ``[num_groups]``.
        """
        if self._fresh is None:
            return False
        for geometry, table in zip(groups, tables, strict=True):
            num_blocks, rest = divmod(num_local_tokens, geometry.block_tokens)
            # The last part of a block was copied from one that is not in the table.
            if rest or not self._fresh.issuperset(set(table[:num_blocks]) - {NO_BLOCK}):
                return True
        return False

    def given(self, blocks: Iterable[BlockId], *, fresh: bool) -> None:
        """These blocks are written anew, from what is ``fresh`` or not."""
        if self._fresh is None:
            return
        if fresh:
            self._fresh.update(blocks)
        else:
            self._fresh.difference_update(blocks)

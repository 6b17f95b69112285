"""Lazy stores: only what vLLM is about to evict, found by reading its free queue ahead of it.

vLLM gives out free blocks from the head of one queue, cached ones among them; what it gives out is
evicted. ``LazyStores`` reads that queue from its head and never changes it. What always holds:

- the first ``_num_safe`` blocks of the queue hold nothing that an eviction would lose: they are
  stored, being stored, or not worth it. Blocks leave the queue only when they are given to a
  request, so as many as were given are subtracted, whether they came from there or not; blocks that
  are put back in front have no content, and those that come to the end are behind it;
- the queue is read again when fewer blocks are safe than one step can take, and then twice as far,
  so that a step's blocks are on the host, or on their way, one step before it takes them. A reading
  is paid for by the blocks that were given out since the last one; no place in the queue is
  remembered, since a block may leave it and come back at its end;
- what was computed before a reset of the host cache, or from that, is not stored (see
  ``engine.freshness``).

A store belongs to no request: whatever vLLM may serve from its own cache is stored, and the limits
of the request that computed it (``max_offload_tokens``) are not asked for.
"""

from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id

from ...engine.core import SchedulingCore
from ...engine.planner import Part, PlannedStore
from ...engine.rules import boundary_of
from ...engine.types import BlockId, GroupId, Key

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class LazyStores:
    """Plans the stores of one scheduler in lazy mode. One thread."""

    def __init__(
        self, core: SchedulingCore, pool: "BlockPool", max_step_tokens: int, max_step_requests: int
    ) -> None:
        """``pool`` is vLLM's; the other two bound what a step computes. Chunks are blocks."""
        self._core = core
        self._pool = pool
        self._groups = {geometry.group: geometry for geometry in core.groups}
        self._boundary_tokens = boundary_of([geometry.rule for geometry in core.groups])
        # At worst each request but one begins a block with one token, and one takes all the rest.
        num_begun = min(max_step_requests, max_step_tokens)
        self._num_step_blocks = sum(
            num_begun + -(-(max_step_tokens - num_begun) // geometry.block_tokens)
            for geometry in core.groups
        )
        self._num_safe = 0

    def given(self, num_blocks: int) -> None:
        """Requests were given at most so many blocks of the queue."""
        self._num_safe -= num_blocks

    def plan(self) -> PlannedStore | None:
        """End of a step: store what the next steps could evict. None when that is nothing."""
        num_free = self._pool.get_num_free_blocks()
        if self._num_safe >= min(self._num_step_blocks, num_free):
            return None
        parts, self._num_safe = self._read(2 * self._num_step_blocks)
        if not parts:
            return None
        store = self._core.rescue(parts)
        ledger = self._core.ledger
        if any(ledger.absent(part.geometry.group, part.keys) for part in parts):
            self._num_safe = 0  # no slot for it now: look again in the next step
        return store

    def _read(self, num_blocks: int) -> tuple[list[Part], int]:
        """What the first ``num_blocks`` of the queue hold, in its order; how many there were."""
        found: dict[GroupId, dict[Key, BlockId]] = {}
        num_read = 0
        for block in self._pool.free_block_queue.iter_blocks_after(None):
            if num_read == num_blocks:
                break
            num_read += 1
            chunk = self._chunk_in(block)
            if chunk is not None:
                group, key = chunk
                # Of blocks with the same content one is enough, the one that goes first.
                found.setdefault(group, {}).setdefault(key, BlockId(block.block_id))
        parts = [
            Part(self._groups[group], tuple(blocks), tuple(blocks.values()))
            for group, blocks in found.items()
        ]
        return parts, num_read

    def _chunk_in(self, block: "KVCacheBlock") -> tuple[GroupId, Key] | None:
        """The chunk that a free block holds; None when it holds none that is worth storing."""
        name, num_tokens = block.block_hash, block.block_hash_num_tokens
        if name is None or not num_tokens or self._core.fresh.is_old(BlockId(block.block_id)):
            return None
        group = GroupId(get_group_id(name))
        geometry = self._groups.get(group)
        if geometry is None or num_tokens % geometry.block_tokens:
            return None  # not offloaded; or its hash covers only part of the block
        chunk = num_tokens // geometry.block_tokens - 1
        if not geometry.rule.worth_storing(chunk, self._boundary_tokens):
            return None
        return group, Key(get_block_hash(name))

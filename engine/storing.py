"""What is worth storing gets slots: of a request, or of blocks that are about to be given away."""

from collections.abc import Collection, Sequence
from itertools import chain

from .core_options import CoreOptions
from .geometry import GroupGeometry
from .ledger import Ledger, WriteLease
from .offers import OfferCounter
from .planner import Part, Tables, prefix_keys, sources
from .requests import NEVER, TrackedRequest
from .rules import boundary_of
from .types import BlockId, Key

Reserved = list[tuple[WriteLease, Part]]
"""Slots, and the chunks that are to be brought there, per group that has any."""


class StoreReserver:
    """Reserves slots in the ledger, which may evict. Keeps how often chunks were offered."""

    def __init__(
        self, groups: Sequence[GroupGeometry], ledger: Ledger, options: CoreOptions
    ) -> None:
        self._groups = groups
        self._ledger = ledger
        self._prompt_only = options.prompt_only
        self._offers = OfferCounter(options.store_threshold, options.max_tracked_offers)
        self._boundary = boundary_of([geometry.rule for geometry in groups])

    def of_request(
        self, request: TrackedRequest, num_computed: int, tables: Tables, *, finished: bool
    ) -> Reserved:
        """Slots for the request's full, hashed chunks that were not offered yet, as far as they
        go. Chunks that are there already are touched."""
        limit = request.limits.max_store_tokens
        if self._prompt_only:
            limit = min(limit, request.num_prompt_tokens)
        num_tokens = min(num_computed, limit)
        decoding = not finished and num_computed > request.num_prompt_tokens
        reserved = [
            self._of_group(i, request, num_tokens, tables[i], decoding=decoding)
            for i in range(len(self._groups))
        ]
        request.next_due_tokens = self._next_due(request, num_tokens, limit)
        return [one for one in reserved if one is not None]

    def _next_due(self, request: TrackedRequest, num_tokens: int, limit: int) -> int:
        """The least number of computed tokens that completes another chunk."""
        following = [
            (request.num_offered[i] + 1) * geometry.chunk_tokens
            for i, geometry in enumerate(self._groups)
        ]
        nearest = min(tokens if tokens <= limit else NEVER for tokens in following)
        # What found no slot, or has no hash yet, is offered again in the next step.
        return max(nearest, num_tokens) if nearest <= num_tokens else nearest

    def _of_group(
        self,
        index: int,
        request: TrackedRequest,
        num_tokens: int,
        table: Sequence[BlockId],
        *,
        decoding: bool,
    ) -> tuple[WriteLease, Part] | None:
        geometry = self._groups[index]
        group = geometry.group
        first = request.num_offered[index]
        last = min(
            geometry.rule.storable_chunks(num_tokens, decoding=decoding),
            geometry.num_hashed_chunks(request.hashes),
        )
        if last <= first:
            return None
        keys = geometry.keys(request.hashes, first, last)
        absent = self._ledger.absent(group, keys)
        if len(absent) < len(keys):
            self._ledger.touch(group, keys)
        wanted = sources(geometry, keys, absent, table, first, self._boundary)
        request.num_offered[index] = last
        new = self._offers.passing(group, wanted)
        if not new:
            return None
        near: Collection[Key] = ()
        if self._ledger.num_free < len(new):  # eviction is near
            near = prefix_keys(self._groups, request, last * geometry.chunk_tokens)
        lease = self._ledger.reserve(group, new, protect=near)
        taken = len(lease.keys) if lease is not None else 0
        if taken < len(new):
            # No slot for this chunk now: it is offered again, since those after it are of no use
            # without it.
            request.num_offered[index] = first + keys.index(new[taken])
        if lease is None:
            return None
        blocks = tuple(chain.from_iterable(map(wanted.__getitem__, lease.keys)))
        return lease, Part(geometry, lease.keys, blocks)

    def of_blocks(self, parts: Sequence[Part]) -> Reserved:
        """Slots for those of ``parts`` that are absent, as far as they go. What is there already
        is touched, and not evicted to make room for the others."""
        near = {key for part in parts for key in part.keys}
        reserved: Reserved = []
        for part in parts:
            group, size = part.geometry.group, part.geometry.blocks_per_chunk
            absent = self._ledger.absent(group, part.keys)
            self._ledger.touch(group, part.keys)
            keys = [part.keys[i] for i in absent]
            lease = self._ledger.reserve(group, keys, protect=near) if keys else None
            if lease is not None:
                firsts = [i * size for i in absent[: len(lease.keys)]]
                blocks = [block for at in firsts for block in part.blocks[at : at + size]]
                reserved.append((lease, Part(part.geometry, lease.keys, tuple(blocks))))
        return reserved

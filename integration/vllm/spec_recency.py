"""LRU as vLLM's own CPU cache does it: by request, not by transfer.

A chunk has a *rank*; the smallest leaves first. It gets one when its slot is taken, and a new one
when a request that used it ends or touches it. A store that completes, or a load that ends, changes
no rank: when a transfer happens to finish says nothing about who will want the chunk again.

Ranks belong to slots whether or not they can be chosen; the READY ones stand in a heap. An entry
whose slot left or got another rank is stale, and skipped when it comes up.
"""

import heapq
from collections.abc import Collection, Iterable, Sequence

from ...engine.types import SlotId

_Entry = tuple[int, SlotId]


class RequestRecency:
    """An ``engine.policy.EvictionPolicy`` whose ranks the manager sets with ``touch``."""

    def __init__(self) -> None:
        self._rank: dict[SlotId, int] = {}
        self._ready: set[SlotId] = set()
        self._heap: list[_Entry] = []
        self._last_rank = 0

    def take(self, slots: Iterable[SlotId]) -> None:
        """``slots`` were taken for stores, in this order of age."""
        for slot in slots:
            self._last_rank += 1
            self._rank[slot] = self._last_rank

    def touch(self, slots: Sequence[SlotId]) -> None:
        """``slots``, prefix first, were used: of these the last is the first to leave."""
        for slot in reversed(slots):
            self._last_rank += 1
            self._rank[slot] = self._last_rank
            if slot in self._ready:
                self._push(slot)

    def admit(self, slots: Sequence[SlotId], idents: Iterable[int]) -> None:
        self.unhold(slots)

    def hold(self, slots: Sequence[SlotId]) -> None:
        self._ready.difference_update(slots)

    def unhold(self, slots: Sequence[SlotId]) -> None:
        self._ready.update(slots)
        for slot in slots:
            self._push(slot)

    def drop(self, slots: Sequence[SlotId]) -> None:
        self._ready.difference_update(slots)

    def evict(self, count: int, spared: Collection[SlotId]) -> list[SlotId]:
        victims: list[SlotId] = []
        kept: list[_Entry] = []
        while self._heap and len(victims) < count:
            entry = heapq.heappop(self._heap)
            rank, slot = entry
            if slot not in self._ready or self._rank[slot] != rank:
                continue
            if slot in spared:
                kept.append(entry)
            else:
                self._ready.remove(slot)
                victims.append(slot)
        for entry in kept:
            heapq.heappush(self._heap, entry)
        return victims

    def evictable(self) -> Iterable[SlotId]:
        return iter(self._ready)

    def __len__(self) -> int:
        return len(self._ready)

    def _push(self, slot: SlotId) -> None:
        if len(self._heap) > 64 + 4 * len(self._ready):
            self._heap = [(self._rank[ready], ready) for ready in self._ready]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (self._rank[slot], slot))

"""ARC: adaptive replacement, balancing recency against frequency by what it evicted too early.

After Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache" (FAST 2003), for
batches: chunks used once are in ``ONCE``, chunks used again in ``AGAIN``, and both have a memory of
what was evicted from them. A chunk that is stored again soon after its eviction from one list makes
that list's share larger.
"""

from array import array
from collections.abc import Collection, Iterable, Sequence
from itertools import chain

from .ghosts import Ghosts
from .slot_lists import SlotLists
from .types import SlotId

ONCE, AGAIN = 0, 1


class ARC:
    """Two recency lists; ``_target`` is the size that ``ONCE`` may have when room is needed."""

    __slots__ = ("_evicted", "_ghosts", "_idents", "_lists", "_num_slots", "_reused", "_target")

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._lists = SlotLists(num_slots, num_lists=2)
        self._ghosts = Ghosts(num_slots), Ghosts(num_slots)
        self._evicted = [0, 0]  # how many were evicted from each list: the clocks of the ghosts
        self._idents = array("q", bytes(8 * num_slots))
        self._reused = bytearray(num_slots)
        self._target = 0.0

    def admit(self, slots: Sequence[SlotId], idents: Iterable[int]) -> None:
        for slot, ident in zip(slots, idents, strict=True):
            self._idents[slot] = ident
            self._reused[slot] = self._learn(ident)
        self._push(slots)

    def hold(self, slots: Sequence[SlotId]) -> None:
        self._lists.remove(slots)

    def unhold(self, slots: Sequence[SlotId]) -> None:
        self._push(slots)

    def touch(self, slots: Sequence[SlotId]) -> None:
        for slot in slots:
            self._reused[slot] = 1
        self._lists.move(AGAIN, self._lists.linked(slots))

    def drop(self, slots: Sequence[SlotId]) -> None:
        self._lists.remove(self._lists.linked(slots))

    def evict(self, count: int, spared: Collection[SlotId]) -> list[SlotId]:
        surplus = max(0, self._lists.size(ONCE) - int(self._target))
        victims: list[SlotId] = []
        for which, limit in ((ONCE, min(count, surplus)), (AGAIN, count), (ONCE, count)):
            chosen = self._lists.oldest(which, limit - len(victims), spared)
            self._lists.remove(chosen[::-1])
            for slot in chosen:
                self._evicted[which] += 1
                self._ghosts[which].put(self._idents[slot], self._evicted[which])
            victims += chosen
        return victims

    def evictable(self) -> Iterable[SlotId]:
        return chain(self._lists.walk(ONCE), self._lists.walk(AGAIN))

    def __len__(self) -> int:
        return len(self._lists)

    def _push(self, slots: Sequence[SlotId]) -> None:
        self._lists.push(ONCE, [slot for slot in slots if not self._reused[slot]])
        self._lists.push(AGAIN, [slot for slot in slots if self._reused[slot]])

    def _learn(self, ident: int) -> bool:
        """Move the target if ``ident`` was evicted lately; returns whether it was."""
        once, again = (self._num_slots - self._lists.size(which) for which in (ONCE, AGAIN))
        if self._returned(ONCE, ident, once):
            step = max(1.0, again / max(1, once))
            self._target = min(float(self._num_slots), self._target + step)
            return True
        if self._returned(AGAIN, ident, again):
            self._target = max(0.0, self._target - max(1.0, once / max(1, again)))
            return True
        return False

    def _returned(self, which: int, ident: int, within: int) -> bool:
        time = self._ghosts[which].take(ident)
        return time is not None and self._evicted[which] - time < within

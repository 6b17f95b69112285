"""Two-speed: LRU in which chunks that were used only once age faster. Resists scans.

Much of what is stored is never used again: the prompts of people who ask once. Under LRU they push
out the conversations that go on. But how strongly use predicts further use differs: in a cache that
is large enough to bridge the pause between two turns, plain LRU is close to the best there is, and
a policy that gives new chunks only a small share (S3-FIFO, and often ARC) falls behind it.

So there are two recency lists, ``ONCE`` and ``AGAIN``, and one number, the *speed* at which a chunk
of ONCE ages (1 to 32; a chunk of AGAIN ages at 1). The chunk of the greatest weighted age leaves.
At speed 1 that is LRU exactly; at a high speed only what was used again survives a scan. Because a
prefix is used whenever what follows it is, its age is never greater and its list never worse than
theirs, so tails still leave first.

The speed is learnt from what comes back. A chunk that is stored again before it is three times as
old as the chunks that its list evicts would have been a hit, had its list been given more room. How
much room that is differs, so each such return is weighted by the inverse of its list's part in the
evicted chunks that more room would have kept: returns to ONCE slow it down, returns to AGAIN speed
it up, and the speed settles where room is worth the same in both. A return that is younger than as
many chunks as there are slots always counts: LRU would have had it.

Ages are counted in chunks stored, so no clock is read. The constants were chosen on the traces of
``profiling/hit_rates.py``; hit rates differ by less than half a point around them.
"""

from array import array
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import Final

from .ghosts import Ghosts
from .slot_lists import SlotLists
from .types import SlotId

ONCE, AGAIN = 0, 1

MAX_SPEED_LOG2: Final = 5.0
FIRST_SPEED_LOG2: Final = 0.5
STEP: Final = 4.0
"""How far returns as many as there are slots move the speed, in powers of two."""
MAX_WEIGHT: Final = 16.0
RETURN_WITHIN: Final = 3.0
"""A return counts up to this multiple of the mean age at which its list is evicted."""
SMOOTHING: Final = 0.01
"""How much one eviction moves the mean age at eviction."""


class TwoSpeed:
    """Two recency lists and the speed between them."""

    __slots__ = (
        "_again",
        "_clock",
        "_ghosts",
        "_idents",
        "_lists",
        "_mean_age",
        "_num_slots",
        "_rate",
        "_speed_log2",
        "_used_at",
    )

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._lists = SlotLists(num_slots, num_lists=2)
        self._ghosts = Ghosts(2 * num_slots), Ghosts(-(-num_slots // 2))
        self._idents = array("q", bytes(8 * num_slots))
        self._used_at = array("q", bytes(8 * num_slots))
        self._again = bytearray(num_slots)
        self._clock = 1
        self._speed_log2 = FIRST_SPEED_LOG2
        self._mean_age = [float(num_slots), float(num_slots)]  # at eviction, of each list
        self._rate = [1.0, 1.0]  # evictions from each list, fading

    @property
    def speed(self) -> float:
        """How much faster a chunk used once ages than one used again."""
        return float(2.0**self._speed_log2)

    def admit(self, slots: Sequence[SlotId], idents: Iterable[int]) -> None:
        known = 0
        for i, (slot, ident) in enumerate(zip(slots, idents, strict=True)):
            self._idents[slot] = ident
            self._again[slot] = 0
            if self._learn(ident):
                known = i + 1
        # Whoever used a chunk used those before it; forgetting one must not tear a hole there.
        for slot in slots[:known]:
            self._again[slot] = 1
        self._clock += len(slots)
        self._push(slots)

    def hold(self, slots: Sequence[SlotId]) -> None:
        self._lists.remove(slots)

    def unhold(self, slots: Sequence[SlotId]) -> None:
        self._push(slots)

    def touch(self, slots: Sequence[SlotId]) -> None:
        now = self._clock
        for slot in slots:
            self._again[slot] = 1
            self._used_at[slot] = now
        self._lists.move(AGAIN, self._lists.linked(slots))

    def drop(self, slots: Sequence[SlotId]) -> None:
        self._lists.remove(self._lists.linked(slots))

    def evict(self, count: int, spared: Collection[SlotId]) -> list[SlotId]:
        once = self._lists.oldest(ONCE, count, spared)
        again = self._lists.oldest(AGAIN, count, spared)
        used_at, now, speed = self._used_at, self._clock, self.speed
        num_once = num_again = 0
        while num_once + num_again < min(count, len(once) + len(again)):
            if num_again == len(again) or (
                num_once < len(once)
                and (now - used_at[once[num_once]] + 1) * speed
                >= now - used_at[again[num_again]] + 1
            ):
                num_once += 1
            else:
                num_again += 1
        self._bury(ONCE, once[:num_once])
        self._bury(AGAIN, again[:num_again])
        return once[:num_once] + again[:num_again]

    def evictable(self) -> Iterable[SlotId]:
        return chain(self._lists.walk(ONCE), self._lists.walk(AGAIN))

    def __len__(self) -> int:
        return len(self._lists)

    def _push(self, slots: Sequence[SlotId]) -> None:
        for slot in slots:
            self._used_at[slot] = self._clock
        self._lists.push(ONCE, [slot for slot in slots if not self._again[slot]])
        self._lists.push(AGAIN, [slot for slot in slots if self._again[slot]])

    def _bury(self, which: int, victims: list[SlotId]) -> None:
        """Evict ``victims``, oldest first, and remember them."""
        self._lists.remove(victims[::-1])
        mean = self._mean_age[which]
        for slot in victims:
            mean += (self._clock - self._used_at[slot] - mean) * SMOOTHING
            self._ghosts[which].put(self._idents[slot], self._used_at[slot])
        self._mean_age[which] = mean
        fade = (1.0 - 1.0 / self._num_slots) ** len(victims)
        self._rate = [rate * fade for rate in self._rate]
        self._rate[which] += len(victims)

    def _learn(self, ident: int) -> bool:
        """Move the speed if ``ident`` was evicted a little early; returns whether it is known."""
        part = self._rate[ONCE] / (self._rate[ONCE] + self._rate[AGAIN] * self.speed)
        for which, share, sign in ((ONCE, part, -1.0), (AGAIN, 1.0 - part, 1.0)):
            used_at = self._ghosts[which].take(ident)
            if used_at is not None:
                reach = max(RETURN_WITHIN * self._mean_age[which], self._num_slots)
                if self._clock - used_at <= reach:
                    weight = min(MAX_WEIGHT, 1.0 / max(share, 1e-9))
                    moved = self._speed_log2 + sign * weight * STEP / self._num_slots
                    self._speed_log2 = min(MAX_SPEED_LOG2, max(0.0, moved))
                return True
        return False

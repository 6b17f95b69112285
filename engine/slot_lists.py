"""Recency lists over slots: several doubly linked lists in nine bytes a slot.

Every slot is in at most one list. A list runs from its most recent slot to its oldest. The links
of all lists share two arrays, indexed by slot; each list has one more node behind the slots as its
sentinel, so that no link is ever missing. Slots are given in prefix order (the first chunk of a
prompt first) and linked so that the last one is the oldest: tails leave before heads.

A prompt's chunks are mostly used together, so they are mostly linked one behind the other already.
The operations find such runs with a few passes in C and splice a whole run at once; the cost is
that of the slots given, and small for a long prompt. The order is exact.
"""

from array import array
from collections.abc import Container, Iterator, Sequence
from itertools import compress, islice
from operator import ne
from typing import cast

from .types import SlotId


class SlotLists:
    """``num_lists`` recency lists over the slots ``0 .. num_slots - 1``.

    Slots given to one call must differ from each other, and be in no list (``push``) or in some
    list (``remove``, ``move``). That is the caller's duty and not checked here, since checking
    would cost as much as the work itself.
    """

    __slots__ = ("_list_of", "_newer", "_num_slots", "_older", "_sizes")

    def __init__(self, num_slots: int, num_lists: int = 1) -> None:
        nodes = num_slots + num_lists
        self._num_slots = num_slots
        self._older = array("i", bytes(4 * nodes))
        self._newer = array("i", bytes(4 * nodes))
        self._list_of = bytearray(num_slots)  # 0: in no list; else the list's number plus one
        self._sizes = [0] * num_lists
        for sentinel in range(num_slots, nodes):
            self._older[sentinel] = self._newer[sentinel] = sentinel

    def push(self, which: int, slots: Sequence[SlotId]) -> None:
        """Link ``slots`` as the most recent ones of list ``which``, the first the most recent."""
        if not slots:
            return
        older, newer, list_of = self._older, self._newer, self._list_of
        sentinel = above = self._num_slots + which
        below = older[sentinel]
        mark = which + 1
        for slot in slots:
            older[above] = slot
            newer[slot] = above
            list_of[slot] = mark
            above = slot
        older[above] = below
        newer[below] = above
        self._sizes[which] += len(slots)

    def remove(self, slots: Sequence[SlotId]) -> None:
        """Unlink ``slots``, whatever lists they are in."""
        list_of, sizes = self._list_of, self._sizes
        for begin, end in self._runs(slots):
            sizes[list_of[slots[begin]] - 1] -= end - begin
            self._unlink(slots[begin], slots[end - 1])
        for slot in slots:
            list_of[slot] = 0

    def move(self, which: int, slots: Sequence[SlotId]) -> None:
        """Make ``slots`` the most recent of list ``which``, from whatever lists they are in."""
        if not slots:
            return
        older, newer, list_of, sizes = self._older, self._newer, self._list_of, self._sizes
        mark = which + 1
        sentinel = above = self._num_slots + which
        runs = self._runs(slots)
        for begin, end in runs:
            was = list_of[slots[begin]]
            sizes[was - 1] -= end - begin
            self._unlink(slots[begin], slots[end - 1])
            if was != mark:
                for slot in slots[begin:end]:
                    list_of[slot] = mark
        below = older[sentinel]
        for begin, end in runs:
            older[above] = slots[begin]
            newer[slots[begin]] = above
            above = slots[end - 1]
        older[above] = below
        newer[below] = above
        sizes[which] += len(slots)

    def oldest(self, which: int, count: int, spared: Container[SlotId]) -> list[SlotId]:
        """Up to ``count`` slots of list ``which`` but ``spared``, oldest first; removes none."""
        newer = self._newer
        sentinel = self._num_slots + which
        found: list[int] = []
        slot = newer[sentinel]
        while slot != sentinel and len(found) < count:
            if slot not in spared:
                found.append(slot)
            slot = newer[slot]
        return cast("list[SlotId]", found)

    def pop_oldest(self, which: int, count: int, spared: Container[SlotId]) -> list[SlotId]:
        """Unlink what ``oldest`` would give, and give it."""
        older, newer, list_of = self._older, self._newer, self._list_of
        found: list[int] = []
        below = sentinel = self._num_slots + which
        slot = newer[sentinel]
        while slot != sentinel and len(found) < count:
            above = newer[slot]
            if slot in spared:
                older[slot], newer[below] = below, slot
                below = slot
            else:
                found.append(slot)
                list_of[slot] = 0
            slot = above
        older[slot], newer[below] = below, slot
        self._sizes[which] -= len(found)
        return cast("list[SlotId]", found)

    def which(self, slot: SlotId) -> int:
        """The list that ``slot`` is in, or -1."""
        return self._list_of[slot] - 1

    def linked(self, slots: Sequence[SlotId]) -> Sequence[SlotId]:
        """Those of ``slots`` that are in a list, in order; ``slots`` itself when all are."""
        marks = bytes(map(self._list_of.__getitem__, slots))
        return slots if 0 not in marks else list(compress(slots, marks))

    def size(self, which: int) -> int:
        """How many slots list ``which`` has."""
        return self._sizes[which]

    def walk(self, which: int) -> Iterator[SlotId]:
        """The slots of list ``which`` from the most recent to the oldest."""
        sentinel = self._num_slots + which
        slot = self._older[sentinel]
        while slot != sentinel:
            yield SlotId(slot)
            slot = self._older[slot]

    def __len__(self) -> int:
        return sum(self._sizes)

    def _runs(self, slots: Sequence[SlotId]) -> list[tuple[int, int]]:
        """``slots`` cut into the longest ``(begin, end)`` runs linked one behind the other."""
        if not slots:
            return []
        behind = map(self._older.__getitem__, slots)
        differs = map(ne, behind, islice(slots, 1, None))
        cuts = list(compress(range(1, len(slots)), differs))
        return list(zip([0, *cuts], [*cuts, len(slots)], strict=True))

    def _unlink(self, first: int, last: int) -> None:
        """Take the run from ``first`` (newest) to ``last`` (oldest) out; its inner links stay."""
        above, below = self._newer[first], self._older[last]
        self._older[above] = below
        self._newer[below] = above

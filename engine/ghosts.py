"""What a policy remembers of chunks that it evicted: for each ident, one time.

A table of fixed size, two places for each ident, eight bytes a place: 40 bits of time above 24 bits
of fingerprint. Remembering takes the place whose entry has the older time. So a table never grows,
needs no deleting, and forgets first what is too old to matter. A chunk may be forgotten early or
confused with another by chance, which costs a policy a little skill and nobody any correctness.
"""

from array import array
from typing import Final

PRINT_BITS: Final = 24
PRINT_MASK: Final = (1 << PRINT_BITS) - 1


class Ghosts:
    """Room for ``capacity`` idents, of which few are forgotten early; 12 to 24 bytes each."""

    __slots__ = ("_mask", "_places")

    def __init__(self, capacity: int) -> None:
        num_places = 1 << (capacity + capacity // 2).bit_length()
        self._mask = num_places - 1
        self._places = array("Q", bytes(8 * num_places))  # 0: empty

    def put(self, ident: int, time: int) -> None:
        """Remember ``time``, at least 1, for ``ident``."""
        places = self._places
        first, second = ident & self._mask, (ident >> 20) & self._mask
        fingerprint = (ident >> 40) & PRINT_MASK
        place = second if places[second] < places[first] else first
        if places[first] & PRINT_MASK == fingerprint:
            place = first
        elif places[second] & PRINT_MASK == fingerprint:
            place = second
        places[place] = time << PRINT_BITS | fingerprint

    def take(self, ident: int) -> int | None:
        """The time remembered for ``ident``, which is then forgotten; None when there is none."""
        places = self._places
        fingerprint = (ident >> 40) & PRINT_MASK
        for place in (ident & self._mask, (ident >> 20) & self._mask):
            entry = places[place]
            if entry and entry & PRINT_MASK == fingerprint:
                places[place] = 0
                return entry >> PRINT_BITS
        return None

"""Bounded slices of a transfer: one launch each, so that a flush never waits behind a long one."""

from collections.abc import Iterator
from typing import NamedTuple

SLICE_BYTES = 32 << 20
MAX_SLICE_BYTES = 1 << 30
"""Keeps the number of tiles of a slice far inside 32 bits."""


class Slice(NamedTuple):
    """The entries ``first ... first + num_entries`` of a transfer."""

    first: int
    num_entries: int


def slices(num_entries: int, block_bytes: int, slice_bytes: int = SLICE_BYTES) -> Iterator[Slice]:
    """Cut ``num_entries`` into runs of at most ``slice_bytes``, but of one block at the least."""
    if not 1 <= slice_bytes <= MAX_SLICE_BYTES:
        raise ValueError(f"slice_bytes must be 1 to {MAX_SLICE_BYTES}, got {slice_bytes}")
    per_slice = max(1, slice_bytes // block_bytes)
    num_full, rest = divmod(num_entries, per_slice)
    for first in range(0, num_full * per_slice, per_slice):
        yield Slice(first, per_slice)
    if rest:
        yield Slice(num_entries - rest, rest)

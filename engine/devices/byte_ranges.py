"""Sets of byte addresses, as sorted disjoint ranges: what an operation reads or writes."""

from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class ByteRanges:
    """``starts`` and ``ends`` are int64 ``[num_ranges]``, ascending, ranges disjoint and not empty.

    Neighbours that touch are one range. Ends are exclusive.
    """

    starts: Ints
    ends: Ints

    @classmethod
    def of(cls, addresses: ArrayLike, sizes: ArrayLike) -> Self:
        """Any addresses and sizes (broadcast against each other); overlaps are merged."""
        starts, lengths = np.broadcast_arrays(
            np.asarray(addresses, np.int64), np.asarray(sizes, np.int64)
        )
        starts, lengths = starts.ravel(), lengths.ravel()
        if np.any(lengths < 0):
            raise ValueError(f"sizes are {lengths.min()} and more; allowed: 0 and more")
        starts, lengths = starts[lengths > 0], lengths[lengths > 0]
        if not len(starts):
            return cls(np.empty(0, np.int64), np.empty(0, np.int64))
        order = np.argsort(starts, kind="stable")
        starts = starts[order]
        ends = np.maximum.accumulate(starts + lengths[order])
        first = np.concatenate(([True], starts[1:] > ends[:-1]))
        last = np.concatenate((first[1:], [True]))
        return cls(starts[first], ends[last])

    @classmethod
    def of_tensor(cls, tensor: torch.Tensor) -> Self:
        """The bytes of a contiguous tensor."""
        if not tensor.is_contiguous():
            raise ValueError(f"strides are {tensor.stride()}; allowed: a contiguous tensor")
        return cls.of(tensor.data_ptr(), tensor.numel() * tensor.element_size())

    def __bool__(self) -> bool:
        return len(self.starts) > 0

    @property
    def num_bytes(self) -> int:
        return int((self.ends - self.starts).sum())

    def union(self, other: "ByteRanges") -> "ByteRanges":
        return ByteRanges.of(
            np.concatenate((self.starts, other.starts)),
            np.concatenate((self.ends - self.starts, other.ends - other.starts)),
        )

    def overlap(self, other: "ByteRanges") -> tuple[int, int] | None:
        """The first ``(start, end)`` that both hold, or None."""
        if not self or not other:
            return None
        if self.starts[0] >= other.ends[-1] or other.starts[0] >= self.ends[-1]:
            return None
        nearest = np.searchsorted(other.ends, self.starts, side="right")
        inside = np.minimum(nearest, len(other.ends) - 1)
        hits = (nearest < len(other.ends)) & (other.starts[inside] < self.ends)
        if not hits.any():
            return None
        mine = int(hits.argmax())
        theirs = int(inside[mine])
        start = max(self.starts[mine], other.starts[theirs])
        return int(start), int(min(self.ends[mine], other.ends[theirs]))

    def covers(self, other: "ByteRanges") -> bool:
        """True when every byte of ``other`` is in here."""
        if not other:
            return True
        if not self:
            return False
        nearest = np.searchsorted(self.ends, other.starts, side="right")
        inside = np.minimum(nearest, len(self.ends) - 1)
        held = (self.starts[inside] <= other.starts) & (other.ends <= self.ends[inside])
        return bool(((nearest < len(self.ends)) & held).all())


NOTHING: Final = ByteRanges.of([], [])

"""How a piece is moved, and what chooses it.

A strategy is chosen by direction, fragment bytes, number of fragments, and whether compute is busy.
Measured choices (``measure.py``) stand in a table; between its points the nearest one counts, and
where there is none a built-in rule does.
"""

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Self

from .types import Direction


class Method(enum.StrEnum):
    """One way to move a piece; which of them a device accepts is its ``strategies``."""

    ZERO_COPY = "zero_copy"  # a kernel reads or writes pinned host memory itself
    PACKED = "packed"  # a kernel packs into staging, then one DMA per run of slots
    COPY_ENGINE = "copy_engine"  # batched DMA, neighbours merged
    COMPILED = "compiled"  # CPU: one memcpy per merged fragment, from compiled code
    INTERPRETED = "interpreted"  # CPU: the same, from Python, where nothing is compiled


@dataclass(frozen=True, slots=True)
class Strategy:
    """A method and its width (a kernel's programs, or threads); 0 leaves it to the device."""

    method: Method
    width: int = 0

    def __str__(self) -> str:
        return f"{self.method}x{self.width}" if self.width else str(self.method)


@dataclass(frozen=True, slots=True)
class Situation:
    """What a choice depends on. Sizes are at least 1; ``situation_of`` makes them coarse."""

    direction: Direction
    fragment_bytes: int
    num_fragments: int
    busy: bool

    def distance(self, other: "Situation") -> float:
        """How far apart two situations are, in powers of two.

        Infinite for the other direction, and for a busy and an idle one: what is best on an idle
        device says nothing about what disturbs a busy one least.
        """
        if self.direction is not other.direction or self.busy is not other.busy:
            return math.inf
        return abs(math.log2(self.fragment_bytes / other.fragment_bytes)) + abs(
            math.log2(self.num_fragments / other.num_fragments)
        )


COPY_ENGINE_BYTES: Final = 28 << 10
"""From here on batched DMA reaches full speed (public figures for H100, 50k fragments)."""

FEW_FRAGMENTS: Final = 16


def built_in(candidates: Sequence[Strategy], situation: Situation) -> Strategy:
    """The choice without a measurement: by method for a GPU, else the device's first."""
    if situation.fragment_bytes >= COPY_ENGINE_BYTES or situation.num_fragments <= FEW_FRAGMENTS:
        wanted = Method.COPY_ENGINE
    elif situation.direction is Direction.STORE or situation.busy:
        wanted = Method.PACKED
    else:
        wanted = Method.ZERO_COPY
    return next((one for one in candidates if one.method is wanted), candidates[0])


@dataclass(frozen=True, slots=True)
class Chooser:
    """Chooses among what a device accepts. ``table`` may be empty, and is never changed."""

    candidates: Mapping[Direction, Sequence[Strategy]]
    table: Mapping[Situation, Strategy] = field(default_factory=dict)
    _known: dict[Situation, Strategy] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        candidates: Mapping[Direction, Sequence[Strategy]],
        table: Mapping[Situation, Strategy],
    ) -> Self:
        """A chooser with the entries of ``table`` that the device still accepts."""
        accepted = {
            situation: strategy
            for situation, strategy in table.items()
            if strategy in candidates[situation.direction]
        }
        return cls(candidates, accepted)

    def choose(self, situation: Situation) -> Strategy:
        """The strategy for a piece in this situation."""
        if (known := self._known.get(situation)) is None:
            known = self._known[situation] = self._look_up(situation)
        return known

    def _look_up(self, situation: Situation) -> Strategy:
        nearest = min(self.table, key=situation.distance, default=None)
        if nearest is None or situation.distance(nearest) == math.inf:
            return built_in(self.candidates[situation.direction], situation)
        return self.table[nearest]

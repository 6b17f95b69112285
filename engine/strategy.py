"""How a piece is moved, and the table that chooses it."""

import enum
from dataclasses import dataclass


class Method(enum.StrEnum):
    """One way to move a piece; which of them a device accepts is its ``strategies``."""

    ZERO_COPY = "zero_copy"  # a kernel reads or writes pinned host memory itself
    PACKED = "packed"  # a kernel packs into staging, then one DMA per run of slots
    COPY_ENGINE = "copy_engine"  # batched DMA, neighbours merged
    COMPILED = "compiled"  # CPU: one memmove per merged fragment, from compiled code
    INTERPRETED = "interpreted"  # CPU: the same, from Python, where nothing is compiled


@dataclass(frozen=True, slots=True)
class Strategy:
    """A method and its width (a kernel's programs, or threads); 0 leaves it to the device."""

    method: Method
    width: int = 0

    def __str__(self) -> str:
        return f"{self.method}x{self.width}" if self.width else str(self.method)

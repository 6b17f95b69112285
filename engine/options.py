"""How a transfer engine behaves."""

from dataclasses import dataclass

from .pieces import Integrity


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """The defaults are what a user gets.

    ``deadline_s`` counts from ``submit``. ``max_store_bytes`` bounds the bytes of stores in flight;
    a store beyond it is skipped. After ``max_failures`` failed jobs in a row offloading is off.
    ``measure_s`` bounds the time for measuring strategies at the start; 0 is not at all.
    """

    slice_bytes: int = 32 << 20
    deadline_s: float = 60.0
    max_store_bytes: int = 4 << 30
    max_failures: int = 8
    integrity: Integrity = "sample"
    measure_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("slice_bytes", "deadline_s", "max_store_bytes", "max_failures"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: more than 0")
        if self.measure_s < 0:
            raise ValueError(f"measure_s is {self.measure_s}; allowed: 0 or more")
        if self.integrity not in ("full", "sample", "off"):
            raise ValueError(f"integrity is {self.integrity!r}; allowed: full, sample, off")

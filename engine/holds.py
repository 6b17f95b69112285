"""How long forwards had to stand still for flushes."""

from collections import deque
from collections.abc import Sequence


class HoldTimes:
    """Counts all holds; percentiles are over the last ``window`` of them."""

    def __init__(self, window: int = 1024) -> None:
        self._recent_s: deque[float] = deque(maxlen=window)
        self._count = 0
        self._total_s = 0.0
        self._ordered_s: list[float] = []  # the recent ones, until the next is added

    def add_all(self, times_s: Sequence[float]) -> None:
        if times_s:
            self._recent_s.extend(times_s)
            self._count += len(times_s)
            self._total_s += sum(times_s)
            self._ordered_s = []

    def snapshot(self) -> dict[str, int | float]:
        """``flushes``, ``flush_s`` in all, ``flush_p50_s``, ``flush_p99_s``."""
        return {
            "flushes": self._count,
            "flush_s": self._total_s,
            "flush_p50_s": self._percentile(0.5),
            "flush_p99_s": self._percentile(0.99),
        }

    def _percentile(self, share: float) -> float:
        if not self._recent_s:
            return 0.0
        ordered = self._ordered_s = self._ordered_s or sorted(self._recent_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

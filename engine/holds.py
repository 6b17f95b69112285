"""How long forwards had to stand still for flushes."""

from collections import deque


class HoldTimes:
    """Counts all holds; percentiles are over the last ``window`` of them."""

    def __init__(self, window: int = 1024) -> None:
        self._recent_s: deque[float] = deque(maxlen=window)
        self._count = 0

    def add(self, seconds: float) -> None:
        self._recent_s.append(seconds)
        self._count += 1

    def snapshot(self) -> dict[str, int | float]:
        """``flushes``, ``flush_p50_s``, ``flush_p99_s``."""
        return {
            "flushes": self._count,
            "flush_p50_s": self._percentile(0.5),
            "flush_p99_s": self._percentile(0.99),
        }

    def _percentile(self, share: float) -> float:
        if not self._recent_s:
            return 0.0
        ordered = sorted(self._recent_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

"""Percentiles by nearest rank: one of the values, never something between two of them."""

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least ``percent`` of the values do not exceed."""
    if not values:
        raise ValueError("a percentile needs at least one value, got none")
    if not 0 < percent <= 100:
        raise ValueError(f"percent must be over 0 and at most 100, got {percent}")
    return sorted(values)[math.ceil(len(values) * percent / 100) - 1]

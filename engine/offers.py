"""Counts how often a chunk was offered for storing, so that one-off prompts can be left out."""

from collections import OrderedDict
from collections.abc import Iterable

from .types import GroupId, Key


class OfferCounter:
    """Lets a chunk pass when it is offered for the ``threshold``-th time.

    Remembers the ``max_keys`` chunks offered last. With a threshold of 1 it remembers nothing.
    """

    def __init__(self, threshold: int, max_keys: int) -> None:
        if threshold < 1 or max_keys < 1:
            raise ValueError(f"threshold {threshold}, max_keys {max_keys}; allowed: from 1")
        self._threshold = threshold
        self._max_keys = max_keys
        self._counts: OrderedDict[tuple[GroupId, Key], int] = OrderedDict()

    def passing(self, group: GroupId, keys: Iterable[Key]) -> list[Key]:
        """Count one offer of each of ``keys``; returns those offered often enough."""
        if self._threshold == 1:
            return list(keys)
        passed = []
        for key in keys:
            count = self._counts.pop((group, key), 0) + 1
            if count >= self._threshold:
                passed.append(key)
            self._counts[group, key] = count
        while len(self._counts) > self._max_keys:
            self._counts.popitem(last=False)
        return passed

    def __len__(self) -> int:
        return len(self._counts)

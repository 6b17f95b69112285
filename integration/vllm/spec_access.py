"""What the spec's manager remembers of keys: who was offered how often, and what a request used."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

from vllm.v1.kv_offload.base import OffloadKey, ReqContext, get_offload_group_idx


class OfferCounts:
    """How often each key was offered for storing, for the ``max_keys`` offered last.

    One offer never pushes out what it has just counted: of an offer with more new keys than room,
    the first ones are counted.
    """

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._counts: OrderedDict[OffloadKey, int] = OrderedDict()

    def __getitem__(self, key: OffloadKey) -> int:
        return self._counts.get(key, 0)

    def add(self, keys: Sequence[OffloadKey]) -> None:
        """Count one offer of ``keys``."""
        counts = self._counts
        known = {key for key in keys if key in counts}
        for key in keys:
            if key in known:
                counts[key] += 1
                counts.move_to_end(key)
        fresh = [key for key in dict.fromkeys(keys) if key not in known]
        for key in fresh[: max(0, self._max_keys - len(known))]:
            if len(counts) >= self._max_keys:
                counts.popitem(last=False)
            counts[key] = 1


@dataclass(slots=True)
class RequestAccess:
    """The chunks that one request used or stored, in the order in which it was first seen to.

    vLLM keeps it in the request's context. It counts only for the manager that made it (``owner``)
    and until that one's next reset (``generation``).
    """

    owner: object
    generation: int
    keys: dict[OffloadKey, None] = field(default_factory=dict)
    inserted: set[OffloadKey] = field(default_factory=set)
    reused: set[OffloadKey] = field(default_factory=set)
    finished: bool = False

    def record(self, keys: Iterable[OffloadKey], reused: Iterable[OffloadKey]) -> None:
        """``keys`` were seen; those of ``reused`` were in the cache before this request."""
        self.keys.update(dict.fromkeys(keys))
        self.reused.update(key for key in reused if key not in self.inserted)


def in_prefix_order(keys: Iterable[OffloadKey], req_context: ReqContext) -> list[OffloadKey]:
    """``keys`` by their position in the request's tokens where all are known, else by group."""
    by_group = sorted(keys, key=get_offload_group_idx)
    ordered: list[OffloadKey] = []
    for _, members in groupby(by_group, key=get_offload_group_idx):
        ordered += _by_position(list(members), req_context)
    return _by_position(ordered, req_context)


def _by_position(keys: list[OffloadKey], req_context: ReqContext) -> list[OffloadKey]:
    placed: list[tuple[int, OffloadKey]] = []
    for key in keys:
        position = req_context.get_offload_key_position(key)
        if position is None:
            return keys
        placed.append((position, key))
    return [key for _, key in sorted(placed, key=itemgetter(0))]

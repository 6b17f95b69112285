"""One request's chunks of one group, as the ledger has them: what the group rules ask."""

from collections.abc import Sequence

from .ledger import Ledger
from .types import GroupId, Key


class ChunkView:
    """A ``rules.GroupView`` over the ledger. ``keys`` is ``[num_chunks]``, the request's own list.

    Looks when asked and keeps nothing, so it stays right while the ledger changes.
    """

    __slots__ = ("_group", "_keys", "_ledger")

    def __init__(self, ledger: Ledger, group: GroupId, keys: Sequence[Key]) -> None:
        self._ledger = ledger
        self._group = group
        self._keys = keys

    @property
    def num_chunks(self) -> int:
        return len(self._keys)

    def leading(self, first: int, last: int, *, pending: bool) -> int:
        return self._run(self._keys[first:last], pending)

    def trailing(self, first: int, last: int, *, pending: bool) -> int:
        return self._run(self._keys[first:last][::-1], pending)

    def _run(self, keys: Sequence[Key], pending: bool) -> int:
        """How many leading ``keys`` are there: runs of readable ones in C, written ones by one."""
        count = self._ledger.readable(self._group, keys)
        while pending and count < len(keys):
            before = count
            while count < len(keys) and self._ledger.state_of(self._group, keys[count]) is not None:
                count += 1
            if count == before:
                break
            count += self._ledger.readable(self._group, keys, count)
        return count

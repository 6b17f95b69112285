"""What becomes readable in the ledger and stops being so, for those who publish it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .types import GroupId, Key


@dataclass(frozen=True, slots=True)
class Change:
    """``readable``: from now on ``keys`` of one group can be found; else they no longer can."""

    group: GroupId
    keys: tuple[Key, ...]
    readable: bool


class Journal:
    """Changes in the order in which they happened. They pile up until taken."""

    __slots__ = ("_changes",)

    def __init__(self) -> None:
        self._changes: list[Change] = []

    def found(self, group: GroupId, keys: Sequence[Key]) -> None:
        if keys:
            self._changes.append(Change(group, tuple(keys), readable=True))

    def lost(self, chunks: Iterable[tuple[GroupId, Key]]) -> None:
        by_group: dict[GroupId, list[Key]] = {}
        for group, key in chunks:
            by_group.setdefault(group, []).append(key)
        self._changes.extend(
            Change(group, tuple(keys), readable=False) for group, keys in by_group.items()
        )

    def take(self) -> list[Change]:
        """The changes since the last call."""
        taken, self._changes = self._changes, []
        return taken

"""Which READY slots leave first when room is needed: the protocol, LRU, choosing by name.

A policy knows slots, not states. The ledger tells it what happens, after its own bookkeeping:

    admit    WRITING -> READY    the chunk is stored
    hold     READY -> READING    somebody reads it: it must not be chosen
    unhold   READING -> READY    nobody reads it any more
    touch    (no change)         a request used it; it may be READY or READING
    drop     READY -> FREE, or READING -> DOOMED: gone, and not because room was needed
    evict    READY -> FREE       the policy chooses

So a policy can evict exactly the READY slots (``evictable``, checked by ``Ledger.check``). It keeps
what it knows of a held slot until the slot is unheld or dropped. Slots come in prefix order, the
first chunk of a prompt first; of chunks used together the last should leave first, because a chunk
is of no use without the ones before it.

``idents`` stand for chunks beyond their time in a slot, so that a policy can remember what it
evicted. Two chunks may share one by chance; a policy may only use them as a hint.
"""

import importlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol, runtime_checkable

from .policy_arc import ARC
from .policy_two_speed import TwoSpeed
from .slot_lists import SlotLists
from .types import SlotId


@runtime_checkable
class EvictionPolicy(Protocol):
    """What the ledger asks of an eviction order over READY slots. See the module's docstring.

    Slots of one call differ from each other. Nothing here may raise for what the ledger does.
    """

    def admit(self, slots: Sequence[SlotId], idents: Iterable[int]) -> None:
        """``slots`` have just become READY; ``idents`` are as many,
        to be gone through once."""

    def hold(self, slots: Sequence[SlotId]) -> None:
        """``slots`` were READY and are now read by somebody."""

    def unhold(self, slots: Sequence[SlotId]) -> None:
        """``slots`` were held and are READY again, as used just now."""

    def touch(self, slots: Sequence[SlotId]) -> None:
        """``slots``, held or not, were used by a request."""

    def drop(self, slots: Sequence[SlotId]) -> None:
        """``slots``, held or not, are no longer the policy's business."""

    def evict(self, count: int, spared: Collection[SlotId]) -> list[SlotId]:
        """Choose and forget up to ``count`` slots, never held or ``spared`` ones.

        Fewer only when there are no more.
        """

    def evictable(self) -> Iterable[SlotId]:
        """The slots that could be chosen now. For checks: may be slow."""

    def __len__(self) -> int:
        """The number of slots that could be chosen now."""


class LRU:
    """The slot whose last use is longest ago leaves first."""

    __slots__ = ("_lists",)

    def __init__(self, num_slots: int) -> None:
        self._lists = SlotLists(num_slots)

    def admit(self, slots: Sequence[SlotId], idents: Iterable[int]) -> None:
        self._lists.push(0, slots)

    def hold(self, slots: Sequence[SlotId]) -> None:
        self._lists.remove(slots)

    def unhold(self, slots: Sequence[SlotId]) -> None:
        self._lists.push(0, slots)

    def touch(self, slots: Sequence[SlotId]) -> None:
        self._lists.move(0, self._lists.linked(slots))

    def drop(self, slots: Sequence[SlotId]) -> None:
        self._lists.remove(self._lists.linked(slots))

    def evict(self, count: int, spared: Collection[SlotId]) -> list[SlotId]:
        return self._lists.pop_oldest(0, count, spared)

    def evictable(self) -> Iterable[SlotId]:
        return self._lists.walk(0)

    def __len__(self) -> int:
        return len(self._lists)


PolicyFactory = Callable[[int], EvictionPolicy]

POLICIES: Mapping[str, PolicyFactory] = MappingProxyType(
    {"lru": LRU, "arc": ARC, "two-speed": TwoSpeed}
)


def make_policy(name: str, num_slots: int) -> EvictionPolicy:
    """The policy called ``name``: one of ``POLICIES``, or an import path ``package.module:Name``.

    What the path leads to is called with the number of slots and must give an ``EvictionPolicy``.
    Raises ``ValueError`` for a name that leads nowhere.
    """
    factory = POLICIES.get(name)
    if factory is None:
        factory = _imported(name)
    policy = factory(num_slots)
    if not isinstance(policy, EvictionPolicy):
        raise ValueError(
            f"eviction policy {name!r} gave {policy!r}; allowed: an object with all methods of "
            "kvferry.engine.policy.EvictionPolicy"
        )
    return policy


def _imported(path: str) -> PolicyFactory:
    allowed = f"allowed: {', '.join(sorted(POLICIES))}, or an import path 'package.module:Name'"
    module_name, colon, attribute = path.partition(":")
    if not (module_name and colon and attribute):
        raise ValueError(f"eviction policy {path!r} is not known; {allowed}")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"eviction policy {path!r} cannot be imported ({error}); {allowed}"
        ) from error
    if not callable(factory):
        raise ValueError(f"eviction policy {path!r} is {factory!r}; {allowed}")
    made: PolicyFactory = factory
    return made

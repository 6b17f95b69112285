"""Claims on slots, given out by the ledger and closed exactly once.

A lease says who is responsible for a set of slots: while it is open, none of them is used for
anything else. It is compared by identity; only the ledger makes and closes one.
"""

from dataclasses import dataclass

from .types import GroupId, Key, SlotId


@dataclass(frozen=True, slots=True, eq=False)
class WriteLease:
    """The slots that one store writes; ``keys`` and ``slots`` are ``[num_chunks]``, prefix first.

    Closed by ``Ledger.commit`` or ``Ledger.abort``.
    """

    group: GroupId
    keys: tuple[Key, ...]
    slots: tuple[SlotId, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ReadLease:
    """The slots that somebody reads; ``keys`` and ``slots`` are ``[num_chunks]``.

    Closed by ``Ledger.release``.
    """

    group: GroupId
    keys: tuple[Key, ...]
    slots: tuple[SlotId, ...]


Lease = WriteLease | ReadLease

"""The leases that the spec's manager holds, found by vLLM's keys.

What vLLM opens in one call it may close in another cut. Every lease is kept until it is closed; a
call that closes part of one first has it cut into leases of one key each. vLLM's connector closes
what it opened, so that is the exception, and the rule costs one look-up.

To the ledger all keys are of one group: vLLM's keys carry theirs, and slots are of one size.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from vllm.v1.kv_offload.base import OffloadKey

from ...engine.ledger import Ledger, ReadLease, WriteLease
from ...engine.types import GroupId, Key, SlotId

GROUP: Final = GroupId(0)


def ledger_keys(keys: Iterable[OffloadKey]) -> list[Key]:
    return [Key(key) for key in keys]


class OpenLeases:
    """See the module docstring."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._writes: dict[OffloadKey, tuple[WriteLease, SlotId]] = {}
        self._reads: dict[frozenset[OffloadKey], list[ReadLease]] = {}

    # Stores.

    def writing(self, key: OffloadKey) -> bool:
        return key in self._writes

    def slots_of_written(self, keys: Iterable[OffloadKey]) -> list[SlotId]:
        """Where ``keys`` are being written; all must be."""
        return [self._writes[key][1] for key in keys]

    def reserve(
        self, keys: Sequence[OffloadKey], protect: Sequence[OffloadKey]
    ) -> Sequence[SlotId]:
        """Take a slot for each of ``keys``, which must fit. May evict, but not ``protect``."""
        lease = self._ledger.reserve(GROUP, ledger_keys(keys), ledger_keys(protect))
        assert lease is not None
        for key, slot in zip(keys, lease.slots, strict=True):
            self._writes[key] = lease, slot
        return lease.slots

    def close_writes(self, keys: Collection[OffloadKey], *, good: bool) -> list[OffloadKey]:
        """Commit or abort those of ``keys`` that are being written; returns them."""
        written = [key for key in dict.fromkeys(keys) if key in self._writes]
        for lease in self._leases_of(written):
            if good:
                self._ledger.commit(lease)
            else:
                self._ledger.abort(lease)
        for key in written:
            del self._writes[key]
        return written

    def _leases_of(self, keys: list[OffloadKey]) -> list[WriteLease]:
        """The leases of ``keys``, cut where they hold others as well."""
        asked: dict[WriteLease, int] = {}
        for key in keys:
            lease = self._writes[key][0]
            asked[lease] = asked.get(lease, 0) + 1
        for lease, number in asked.items():
            if number < len(lease.keys):
                self._cut_write(lease)
        return list(dict.fromkeys(self._writes[key][0] for key in keys))

    def _cut_write(self, lease: WriteLease) -> None:
        """Hold the same slots by one lease a key: the ledger gives what was freed last first."""
        self._ledger.abort(lease)
        for key, slot in zip(lease.keys, lease.slots, strict=True):
            single = self._ledger.reserve(GROUP, [key])
            assert single is not None
            assert single.slots == (slot,)
            self._writes[OffloadKey(key)] = single, slot

    # Loads.

    def pin(self, keys: Collection[OffloadKey]) -> Sequence[SlotId]:
        """Hold ``keys``, at least one, for reading. Raises ValueError when one is not readable."""
        lease = self._ledger.pin(GROUP, ledger_keys(keys))
        self._reads.setdefault(frozenset(keys), []).append(lease)
        return lease.slots

    def release(self, keys: Collection[OffloadKey]) -> None:
        """Let go of one hold on each of ``keys``.

        Raises ValueError, and lets go of none, when one of them is not held.
        """
        wanted = frozenset(keys)
        if wanted in self._reads:
            self._ledger.release(self._take_read(wanted))
            return
        self._cut_reads(wanted)
        missing = [key for key in wanted if frozenset((key,)) not in self._reads]
        if missing:
            raise ValueError(
                f"a load of {len(wanted)} keys is complete, {len(missing)} of which nobody loads; "
                "allowed: keys given to prepare_load and not completed since"
            )
        for key in wanted:
            self._ledger.release(self._take_read(frozenset((key,))))

    def _cut_reads(self, keys: frozenset[OffloadKey]) -> None:
        """Hold by one lease a key what was pinned together with any of ``keys``."""
        for pinned in [held for held in self._reads if len(held) > 1 and held & keys]:
            for lease in self._reads.pop(pinned):
                for key in lease.keys:
                    single = self._ledger.pin(GROUP, [key])
                    self._reads.setdefault(frozenset((OffloadKey(key),)), []).append(single)
                self._ledger.release(lease)

    def _take_read(self, keys: frozenset[OffloadKey]) -> ReadLease:
        leases = self._reads[keys]
        lease = leases.pop()
        if not leases:
            del self._reads[keys]
        return lease

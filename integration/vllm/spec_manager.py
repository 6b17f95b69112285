"""``KVFerryOffloadingManager``: our ledger as the manager of vLLM's own offloading connector.

It answers as vLLM's ``CPUOffloadingManager`` does; with LRU it also evicts the same chunks. All
calls come from the scheduler's thread, so ``lock`` is none.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from itertools import groupby
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec, CPUOffloadingMetrics
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from ...engine.ledger import Ledger
from ...engine.policy import POLICIES, EvictionPolicy, make_policy
from ...engine.state import SlotState
from ...engine.types import Key
from .spec_access import OfferCounts, RequestAccess, in_prefix_order
from .spec_leases import GROUP, OpenLeases, ledger_keys
from .spec_recency import RequestRecency

_ANNOUNCES_FAILURES: Final = "metadata_only" in {field.name for field in fields(OffloadingEvent)}
"""From 0.33 on vLLM wants to hear of failed stores, to drop what it noted for their events."""


class KVFerryOffloadingManager(OffloadingManager):
    """Stands where vLLM's ``CPUOffloadingManager`` stands, with its arguments."""

    def __init__(
        self,
        num_chunks: int,
        cache_policy: str = "lru",
        cache_policy_module_path: str | None = None,
        enable_events: bool = False,
        store_threshold: int = 1,
        max_tracker_size: int = 64_000,
        info: Any = None,
    ) -> None:
        """``num_chunks`` may be 0: then nothing is stored. ``store_threshold`` counts offers.

        ``cache_policy`` is a name of ``engine.policy.POLICIES``; with ``cache_policy_module_path``
        also a class there that makes an ``EvictionPolicy`` from the number of slots. Raises
        ValueError for a policy that is not known or not one of ours.
        """
        if num_chunks < 0:
            raise ValueError(f"num_chunks is {num_chunks}; allowed: 0 or more")
        self.medium = Medium.CPU
        self._num_chunks = num_chunks
        self._new_policy = _policy_factory(cache_policy, cache_policy_module_path)
        self._generation = 0
        self._config_info = info.as_config_info() if info is not None else {}
        self._events: list[OffloadingEvent] | None = [] if enable_events else None
        self._counts_offers = store_threshold >= 2
        self._store_threshold = store_threshold
        self._offers = OfferCounts(max_tracker_size)
        self._num_skipped = 0
        self._allocation_sizes: list[int] = []
        self._start_empty()

    def _start_empty(self) -> None:
        num_slots = max(1, self._num_chunks)  # a ledger has a slot; with no chunks it is not used
        self._policy = self._new_policy(num_slots)
        self._ledger = Ledger(num_slots, policy=self._policy)
        self._leases = OpenLeases(self._ledger)

    # Looking.

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        state = self._ledger.state_of(GROUP, Key(key))
        if state is None:
            return LookupResult.MISS
        return LookupResult.HIT_PENDING if state is SlotState.WRITING else LookupResult.HIT

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        return CacheHitSource.HOST

    # Loading.

    def prepare_load(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> CPULoadStoreSpec:
        """Raises ValueError when a key is not readable."""
        if not keys:
            return CPULoadStoreSpec([])
        slots = self._leases.pin(keys)
        self._access(req_context).record(keys, keys)
        return CPULoadStoreSpec([int(slot) for slot in slots])

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Raises ValueError, and changes nothing, when one of ``keys`` is not being loaded."""
        if keys:
            self._leases.release(keys)

    # Storing.

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        offered = list(keys)
        if self._counts_offers:
            self._offers.add(offered)
        absent, readable = self._wanted(offered)
        access = self._access(req_context)
        seen = {*absent, *readable}
        access.record((key for key in offered if key in seen), readable)
        if not absent:
            return PrepareStoreOutput([], CPULoadStoreSpec([]), [])
        self._allocation_sizes.append(len(absent))
        if not self._fits(absent, readable):
            return None
        slots = self._leases.reserve(absent, offered)
        if isinstance(self._policy, RequestRecency):
            self._policy.take(slots)
        access.inserted.update(absent)
        evicted = [OffloadKey(key) for _, key in self._ledger.take_evicted()]
        self._announce(evicted, removed=True)
        spec = CPULoadStoreSpec([int(slot) for slot in slots])
        return PrepareStoreOutput(absent, spec, evicted)

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """Keys that are not being written are passed over."""
        written = self._leases.close_writes(keys, good=success)
        if success:
            self._announce(written, removed=False)
        elif _ANNOUNCES_FAILURES:
            self._announce(written, removed=True, metadata_only=True)

    # Recency.

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._use(list(keys))

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._access(req_context)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        access = req_context.get_state(RequestAccess)
        if access is None or not self._is_current(access) or access.finished:
            return
        access.finished = True
        # LRU goes by requests alone. Other policies have counted a new chunk when it was stored.
        by_request = isinstance(self._policy, RequestRecency)
        self._use(in_prefix_order(access.keys if by_request else access.reused, req_context))

    # The rest of vLLM's interface.

    def reset_cache(self) -> None:
        """Forget everything, what is being loaded or stored too.

        Its slots may be given away at once: vLLM sends every job of before to be flushed, and
        its workers do that before they begin a job of afterwards; nor does it complete those jobs
        here.
        """
        self._generation += 1
        self._start_empty()

    def on_reset_flushed(self) -> None:
        """Nothing waits for it: see ``reset_cache``."""

    def take_events(self) -> Iterator[OffloadingEvent]:
        events, self._events = self._events, None if self._events is None else []
        for event in events or ():
            if getattr(event, "metadata_only", False):
                # A store of the same key that began since must keep what vLLM has noted for it.
                event.keys = [
                    key for key in event.keys if self._ledger.state_of(GROUP, Key(key)) is None
                ]
            if event.keys:
                yield event

    def get_stats(self) -> OffloadingConnectorStats:
        """vLLM's gauges of its CPU cache, and what was offered since the last call."""
        stats, names = OffloadingConnectorStats(), CPUOffloadingMetrics
        counts = self._ledger.counts()
        total = max(1, self._num_chunks)
        write, read = counts[SlotState.WRITING] / total, counts[SlotState.READING] / total
        stats.set_gauge(names.CPU_CACHE_USAGE_PERC, write + read)
        stats.set_gauge(names.CPU_CACHE_WRITE_USAGE_PERC, write)
        stats.set_gauge(names.CPU_CACHE_READ_USAGE_PERC, read)
        sizes, self._allocation_sizes = self._allocation_sizes, []
        for size in sizes:
            stats.observe_histogram(names.CPU_ALLOCATION_SIZE, size)
        if self._counts_offers:
            stats.increase_counter(names.STORES_SKIPPED, self._num_skipped)
            self._num_skipped = 0
        return stats

    @property
    def lock(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def config_info(self) -> Sequence[Any]:
        return [self._config_info]

    def __repr__(self) -> str:
        return f"KVFerryOffloadingManager({self._ledger!r})"

    # The parts of the above.

    def _wanted(self, offered: list[OffloadKey]) -> tuple[list[OffloadKey], list[OffloadKey]]:
        """Of an offer, the keys to store and those that are readable already."""
        states = [self._ledger.state_of(GROUP, Key(key)) for key in offered]
        pairs = list(zip(offered, states, strict=True))
        absent = [key for key, state in pairs if state is None]
        readable = [key for key, state in pairs if state not in (None, SlotState.WRITING)]
        if self._counts_offers:
            often = [key for key in absent if self._offers[key] >= self._store_threshold]
            self._num_skipped += len(absent) - len(often)
            absent = often
        return absent, readable

    def _fits(self, absent: list[OffloadKey], readable: Iterable[OffloadKey]) -> bool:
        """Whether all of ``absent`` find slots without an eviction of ``readable`` ones."""
        counts = self._ledger.counts()
        protected = sum(
            self._ledger.state_of(GROUP, Key(key)) is SlotState.READY for key in set(readable)
        )
        room = counts[SlotState.FREE] + counts[SlotState.READY] - protected
        return len(absent) <= min(room, self._num_chunks)

    def _use(self, keys: list[OffloadKey]) -> None:
        """A request used ``keys``, prefix first. Runs go from the last to the first one, as the
        policy gives its ranks."""
        for writing, run in groupby(reversed(keys), key=self._leases.writing):
            part = list(run)[::-1]
            if not writing:
                self._ledger.touch(GROUP, ledger_keys(part))
            elif isinstance(self._policy, RequestRecency):
                self._policy.touch(self._leases.slots_of_written(part))

    def _access(self, req_context: ReqContext) -> RequestAccess:
        access = req_context.get_state(RequestAccess)
        if access is None or not self._is_current(access):
            access = RequestAccess(self, self._generation)
            req_context.set_state(access)
        return access

    def _is_current(self, access: RequestAccess) -> bool:
        return access.owner is self and access.generation == self._generation

    def _announce(self, keys: list[OffloadKey], **more: Any) -> None:
        if keys and self._events is not None:
            self._events.append(OffloadingEvent(keys=keys, medium=self.medium, **more))


def _policy_factory(name: str, module_path: str | None) -> Callable[[int], EvictionPolicy]:
    """What makes the policy for a number of slots; made once here, so that it fails at start."""
    if name == "lru":
        return lambda num_slots: RequestRecency()
    path = f"{module_path}:{name}" if module_path and name not in POLICIES else name
    make_policy(path, 1)
    return lambda num_slots: make_policy(path, num_slots)

"""What both offload managers do on the scheduler's side, between vLLM's hooks and the core.

A manager decides three things and no more: ``prepare``, ``match`` and ``record`` (design, section
6). Everything else (loads, stores, flushes, reports, resets) is the same for both and stands here.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...engine.core import GroupGeometry, SchedulingCore
from ...engine.ledger import ReadLease
from ...engine.messages import StepOrders, StepReports
from ...engine.types import BlockId, RequestId
from . import views

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class OffloadManager(ABC):
    """The scheduler half behind a connector. One thread.

    Pins (hits that wait for their allocation) are kept by request id: vLLM may ask again for the
    same id with a new request object.
    """

    def __init__(self, geometry: GroupGeometry, num_slots: int, num_ranks: int) -> None:
        self.core = SchedulingCore(geometry, num_slots, num_ranks)
        self._pins: dict[RequestId, ReadLease] = {}
        self._num_local: dict[RequestId, int] = {}
        """Tokens that vLLM's own cache served when the request was last asked about: their blocks
        are read, not written."""

    # -- matching: the three steps that a manager fills in, called by the guard -------------------

    @abstractmethod
    def prepare(self, request: "Request", num_computed_tokens: int) -> None:
        """What every request needs, bypassing or not. Reads no cache."""

    @abstractmethod
    def match(self, request: "Request", num_computed_tokens: int) -> int | None:
        """The lookup: tokens that can be loaded; None to be asked again."""

    @abstractmethod
    def record(self, request: "Request", num_hit_tokens: int) -> None:
        """What follows from the hit, from a hit of zero too."""

    def is_loading(self, request: "Request") -> bool:
        return self.core.jobs.loading(views.request_id_of(request))

    # -- the shared parts of those steps ----------------------------------------------------------

    def _start_over(self, request: "Request", num_computed_tokens: int) -> None:
        request_id = views.request_id_of(request)
        self._drop_pin(request_id)
        self._num_local[request_id] = num_computed_tokens
        self.core.start_over(request_id, request.block_hashes)

    def _drop_pin(self, request_id: RequestId) -> None:
        lease = self._pins.pop(request_id, None)
        if lease is not None:
            self.core.ledger.release(lease)

    # -- the rest of a step -----------------------------------------------------------------------

    def allocated(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        """vLLM gave the request its blocks; ``num_external_tokens`` of our hit were taken."""
        request_id = views.request_id_of(request)
        table = views.allocated_table(blocks)
        geometry = self.core.geometry
        first = self._num_local.get(request_id, 0) // geometry.block_tokens
        self.core.allocated(table[first:])
        if num_external_tokens == 0:
            self._drop_pin(request_id)
            self.core.resume(request_id)
            return
        num_chunks = -(-num_external_tokens // geometry.chunk_tokens)
        lease = self._take_pin(request_id, num_chunks)
        target = table[first : first + num_chunks * geometry.blocks_per_chunk]
        self.core.load(request_id, lease, target)

    def _take_pin(self, request_id: RequestId, num_chunks: int) -> ReadLease:
        """The pinned hit, cut to the chunks that were taken. The caller owns the lease."""
        lease = self._pins.pop(request_id)
        if num_chunks == len(lease.keys):
            return lease
        ledger = self.core.ledger
        shorter = ledger.pin(lease.group, lease.keys[:num_chunks])
        ledger.release(lease)
        return shorter

    def build_orders(self, scheduler_output: "SchedulerOutput") -> StepOrders:
        """End of the scheduler's step: plan stores, collect the flush list."""
        self.core.allocated(views.newly_written(scheduler_output))
        for request_id, num_computed in views.progress(scheduler_output):
            if self.core.due(request_id, num_computed):
                table = views.current_table(scheduler_output, request_id)
                self.core.offer(request_id, num_computed, table)
        return self.core.build()

    def finished(self, request: "Request", block_ids: Sequence[int]) -> None:
        """The request ends: its last full blocks are stored before they can be overwritten."""
        request_id = views.request_id_of(request)
        self._drop_pin(request_id)
        self._num_local.pop(request_id, None)
        table: list[BlockId] = views.block_table(block_ids)
        num_computed = min(
            request.num_computed_tokens, len(table) * self.core.geometry.block_tokens
        )
        self.core.offer(request_id, num_computed, table, prior=True)
        self.core.forget(request_id)

    def take(self, reports: StepReports) -> None:
        self.core.take(reports)

    def reset(self) -> None:
        for request_id in list(self._pins):
            self._drop_pin(request_id)
        self.core.reset()

    @property
    def busy(self) -> bool:
        return self.core.busy

    def snapshot(self) -> dict[str, int | float]:
        return self.core.snapshot()

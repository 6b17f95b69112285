"""``KVFerrySimpleConnector``: full blocks, stored eagerly or lazily, hits pinned until taken.

Eager: a block is stored as soon as it is full. Lazy (``lazy_offload``): it is stored when vLLM is
about to evict it (see ``lazy``), and nothing else is. Everything behind that is the same for both.
"""

from typing import TYPE_CHECKING

from ...engine.planner import Tables
from ...engine.types import RequestId
from . import views
from .config import SimpleOptions
from .connector import OffloadConnectorBase
from .lazy import LazyStores
from .manager import OffloadManager

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class SimpleManager(OffloadManager):
    """Chunks are single blocks; a hit is pinned by ``match`` until it is allocated or dropped."""

    lazy: LazyStores | None = None
    """In lazy mode, where stores come from; requests then offer nothing."""

    def store_lazily(self, pool: "BlockPool", max_step_tokens: int, max_step_requests: int) -> None:
        """Lazy mode from now on, reading vLLM's ``pool`` ahead of steps of at most this size."""
        self.lazy = LazyStores(self.core, pool, max_step_tokens, max_step_requests)

    def match(self, request: "Request", num_computed_tokens: int) -> int | None:
        request_id = views.request_id_of(request)
        num_hit_tokens = self.core.match(request_id, request.num_tokens, wait=False)
        if num_hit_tokens:
            self.core.pin(request_id)
        return num_hit_tokens

    def record(self, request: "Request", num_hit_tokens: int) -> None:
        """Nothing: the pin refreshes recency, and storing starts at the first chunk."""

    def allocated(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        super().allocated(request, blocks, num_external_tokens)
        if self.lazy is not None:
            self.lazy.given(sum(map(len, blocks.get_block_ids())))

    def _plan_stores(self, scheduler_output: "SchedulerOutput") -> None:
        if self.lazy is None:
            super()._plan_stores(scheduler_output)
            return
        self.lazy.given(sum(len(blocks) for _, blocks in views.grown(scheduler_output)))
        store = self.lazy.plan()
        if self.events is not None and store is not None:
            self.events.planned_without_request(store)

    def _offer(
        self, request_id: RequestId, num_computed: int, tables: Tables, *, finished: bool = False
    ) -> None:
        # In lazy mode a request has nothing to offer: what it leaves in the pool is stored in time.
        if self.lazy is None:
            super()._offer(request_id, num_computed, tables, finished=finished)


class KVFerrySimpleConnector(OffloadConnectorBase):
    """Stores full blocks, as they fill or before they are evicted; pins hits until taken."""

    manager_type = SimpleManager
    options_type = SimpleOptions
    _gpu_block_pool: "BlockPool | None" = None

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        """Lazy mode reads vLLM's pool; it takes no references in it and moves nothing."""
        self._gpu_block_pool = gpu_block_pool
        self._begin_lazy_mode()

    def _set_num_slots(self, num_slots: int) -> None:
        super()._set_num_slots(num_slots)
        self._begin_lazy_mode()

    def _begin_lazy_mode(self) -> None:
        manager, pool = self._manager, self._gpu_block_pool
        if not isinstance(self._options, SimpleOptions) or not self._options.lazy_offload:
            return
        if isinstance(manager, SimpleManager) and pool is not None:
            limits = self._vllm_config.scheduler_config
            manager.store_lazily(pool, limits.max_num_batched_tokens, limits.max_num_seqs)

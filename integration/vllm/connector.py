"""``OffloadConnectorBase``: vLLM's hooks for both connectors, and **the guard**.

The class stands in two processes: with the scheduler's role it holds an ``OffloadManager``, with
the worker's an ``OffloadWorker``. ``get_num_new_matched_tokens`` is final: a request that must not
read the cache (``skip_reading_prefix_cache``) is turned away there, before any lookup, and no
manager has another way to one.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, final

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from ...engine.capacity import read_limits
from ...engine.core import SchedulingCore
from ...engine.geometry import GroupGeometry
from ...engine.messages import StepOrders, StepReports
from ...engine.rules import GroupKind
from ...engine.types import Rank
from . import support
from .caches import layout_from
from .config import Options
from .events import KVEvents
from .manager import OffloadManager
from .metadata import OrdersMetadata, RankCapacity, ReportsMetadata
from .metrics import (
    OF_RANKS,
    OF_SCHEDULER,
    SCHEDULER,
    OffloadStats,
    PromMetrics,
    Reporter,
    rank_name,
)
from .worker import OffloadWorker

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)


class OffloadConnectorBase(KVConnectorBase_V1, SupportsHMA):
    """One connector class for both roles; a subclass names its manager."""

    manager_type: ClassVar[type[OffloadManager]]
    options_type: ClassVar[type[Options]]
    _cache_hit_source = CacheHitSource.HOST

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raises TypeError for a subclass that replaces the guard: ``final`` at run time too."""
        super().__init_subclass__(**kwargs)
        if "get_num_new_matched_tokens" in vars(cls):
            raise TypeError(f"{cls.__name__} must not replace get_num_new_matched_tokens")

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        """Raises ValueError for options, settings or models that are not supported."""
        support.check_vllm()
        support.check_config(vllm_config)
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        self._options = self.options_type.parse(transfer.kv_connector_extra_config or {})
        self._num_ranks = vllm_config.parallel_config.world_size
        self._groups: tuple[GroupGeometry, ...] = ()
        self._limits_at_start = read_limits()
        self._manager: OffloadManager | None = None
        self._worker: OffloadWorker | None = None
        self._reporter: Reporter | None = None
        if not vllm_config.cache_config.enable_prefix_caching:
            logger.warning_once(
                "kvferry does nothing: prefix caching is off (enable_prefix_caching=False)."
            )
            return
        self._groups = support.groups_from(kv_cache_config, vllm_config, self._options)
        if role is KVConnectorRole.SCHEDULER:
            if transfer.kv_load_failure_policy != "recompute":
                logger.warning_once(
                    "kv_load_failure_policy is %r: a load that fails ends its request with an "
                    "error. Set kv_load_failure_policy to 'recompute' to compute it instead.",
                    transfer.kv_load_failure_policy,
                )
            extra_config = transfer.kv_connector_extra_config or {}
            self._options.warn_of_two_sizes(extra_config, self._num_ranks)
            # A guess from rank 0's view, until the ranks have said how many slots they hold.
            slot_bytes = support.estimated_slot_bytes(kv_cache_config, self._groups)
            self._set_num_slots(self._options.num_slots(slot_bytes, self._num_ranks))

    @property
    def requires_kv_delivery(self) -> bool:
        """False: this is a cache, a store that is dropped is only a later miss."""
        return False

    def snapshot(self) -> dict[str, int | float]:
        """Live counts of this role's side; empty when prefix caching is off."""
        side = self._manager or self._worker
        return side.snapshot() if side is not None else {}

    def __repr__(self) -> str:
        counts = ", ".join(f"{name}={value}" for name, value in self.snapshot().items())
        return f"<{type(self).__name__} {self.role.name.lower()} {counts}>"

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str | None:
        """The layout that the option ``kv_cache_layout`` prefers; None leaves it to vLLM."""
        transfer = vllm_config.kv_transfer_config
        extra_config = transfer.kv_connector_extra_config if transfer is not None else {}
        layout = cls.options_type.parse(extra_config or {}).kv_cache_layout
        return None if layout == "auto" else layout

    # -- stats, of either role --------------------------------------------------------------------

    def get_kv_connector_stats(self) -> OffloadStats | None:
        """What this role's side has to report since the last call; None when that is nothing."""
        return self._reporter.take(self.snapshot()) if self._reporter is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> OffloadStats:
        return OffloadStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics:
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- scheduler: start -------------------------------------------------------------------------

    def _set_num_slots(self, num_slots: int) -> None:
        heard = self._vllm_config.kv_events_config
        events = None
        if heard is not None and heard.enable_kv_cache_events:
            describe = self._options.describes_events
            events = KVEvents(self._groups, self._kv_cache_config, describe=describe)
        options = replace(self._options.core_options(), journal=events is not None)
        core = SchedulingCore(
            self._groups,
            num_slots,
            self._num_ranks,
            options,
            gpu_pool=support.gpu_pool_of(self._kv_cache_config, self._vllm_config),
        )
        self._manager = self.manager_type(core, events)
        self._reporter = Reporter(SCHEDULER, OF_SCHEDULER)

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): m for rank, m in metadata.items()})

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Every rank has said how many slots it holds: all use the smallest number."""
        capacities = [m.num_slots for m in metadata.values() if isinstance(m, RankCapacity)]
        if self._manager is None or not capacities:
            return
        num_slots = min(capacities)
        if max(capacities) > num_slots:
            logger.info("kvferry: ranks hold %s slots, all use %d", sorted(capacities), num_slots)
        self._set_num_slots(num_slots)

    # -- scheduler: one step ----------------------------------------------------------------------

    @final
    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be loaded behind the first ``num_computed_tokens``, and whether they are.

        The guard: a request that must not read a cache gets ``(0, False)`` before any lookup. Only
        the lookup is replaced; the bookkeeping on both sides of it is every request's.
        """
        manager = self._manager
        if manager is None:
            return 0, False
        manager.prepare(request, num_computed_tokens)
        num_hit_tokens: int | None
        if request.skip_reading_prefix_cache:
            num_hit_tokens = 0
        elif manager.is_loading(request):
            num_hit_tokens = None
        else:
            num_hit_tokens = manager.match(request, num_computed_tokens)
        if num_hit_tokens is None:
            return None, False
        manager.record(request, num_hit_tokens)
        return num_hit_tokens, num_hit_tokens > 0

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        if self._manager is not None:
            self._manager.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> OrdersMetadata:
        if self._manager is None:
            return OrdersMetadata(StepOrders())
        return OrdersMetadata(self._manager.build_orders(scheduler_output))

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        if self._manager is not None:
            metadata = connector_output.kv_connector_worker_meta
            if isinstance(metadata, ReportsMetadata):
                self._manager.take(metadata.reports)
            else:
                self._manager.take(StepReports())

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Never delays the freeing of blocks: those that are still to be read are fenced."""
        if self._manager is not None:
            self._manager.finished(request, block_ids)
        return False, None

    def take_events(self) -> "Iterable[KVCacheEvent]":
        """What became findable in the host cache, and what no longer is, since the last call."""
        return self._manager.take_events() if self._manager is not None else ()

    def has_pending_push_work(self) -> bool:
        """True while an idle engine must go on stepping for a transfer to end."""
        return self._manager is not None and self._manager.busy

    def reset_cache(self) -> bool:
        if self._manager is not None:
            self._manager.reset()
        return True

    # -- worker: start and end --------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, "torch.Tensor"]) -> None:
        if not self._vllm_config.cache_config.enable_prefix_caching:
            return
        if self._worker is not None:
            self._worker.close()
        tp, pp = get_tp_group(), get_pp_group()
        rank = Rank(pp.rank_in_group * tp.world_size + tp.rank_in_group)
        blocks_per_chunk = {group.group: group.blocks_per_chunk for group in self._groups}
        layout = layout_from(kv_caches, self._kv_cache_config, blocks_per_chunk)
        self._worker = OffloadWorker(
            layout,
            self._options,
            rank,
            self._num_ranks,
            num_host_ranks=self._vllm_config.parallel_config.local_world_size,
            limits_at_start=self._limits_at_start,
            writes_before_flush=support.writes_before_flush(
                self._kv_cache_config, self._vllm_config
            ),
        )
        self._reporter = Reporter(rank_name(rank), OF_RANKS)
        layout_name = self._vllm_config.cache_config.kv_cache_layout or "without a name"
        logger.info(self._worker.startup_line(layout_name))

    def unregister_kv_caches(self) -> None:
        """Sleep (vLLM 0.33): the KV cache is about to be unmapped, so what moves is finished."""
        if self._worker is not None:
            self._worker.drain()

    def restore_kv_caches(self) -> None:
        """Wake-up (vLLM 0.33): nothing, the cache is mapped where it was."""

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return RankCapacity(self._worker.num_slots) if self._worker is not None else None

    def shutdown(self) -> None:
        """Drain, unpin and free; can be repeated."""
        if self._worker is not None:
            self._worker.close()

    # -- worker: one step -------------------------------------------------------------------------

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """The step begins: what is to be read before it is overwritten is read first."""
        if self._worker is not None and isinstance(kv_connector_metadata, OrdersMetadata):
            self._worker.begin(kv_connector_metadata.orders)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.mark_loads()

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.start_loads(self._orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads are complete before their request is scheduled."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: "torch.Tensor",
        attn_metadata: "AttentionMetadata",
        **kwargs: Any,
    ) -> None:
        """Nothing: blocks are stored whole, after the forward."""

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.start_stores(self._orders)

    @property
    def _orders(self) -> StepOrders:
        metadata = self._connector_metadata
        return metadata.orders if isinstance(metadata, OrdersMetadata) else StepOrders()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """No request waits for a store; those whose load has ended, well or not.

        With one group vLLM takes the blocks that failed (``get_block_ids_with_load_errors``) and
        computes only those; with several their ids would be ambiguous, so the request is named. So
        it is with a recurrent group or a window: what computing would go on from in front of the
        block that failed, a state or the window before it, was not loaded.
        """
        if self._worker is None:
            return KVConnectorTransferResults()
        self._worker.poll(self._orders)
        finished, failed = self._worker.take_finished_loads()
        return KVConnectorTransferResults(
            finished_recving=finished, failed_recving=set() if self._names_blocks else failed
        )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return None, results.finished_recving or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed = self._worker.take_failed_blocks() if self._worker is not None else set()
        return failed if self._names_blocks else set()

    @property
    def _names_blocks(self) -> bool:
        return [geometry.rule.kind for geometry in self._groups] == [GroupKind.FULL]

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        if self._worker is None:
            return None
        reports = self._worker.take_reports()
        return ReportsMetadata(reports) if reports.reports else None

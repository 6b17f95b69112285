"""What both offload managers do on the scheduler's side, between vLLM's hooks and the core.

A manager decides two things and no more: ``match`` and ``record`` (design, section 6). Everything
else (``prepare``, loads, stores, flushes, reports, resets) is the same for both and stands here.
It keeps nothing of its own: what there is to know of a request is the core's.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...engine.core import SchedulingCore
from ...engine.messages import StepOrders, StepReports
from ...engine.planner import Tables
from ...engine.types import RequestId
from . import views
from .events import KVEvents

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class OffloadManager(ABC):
    """The scheduler half behind a connector. One thread."""

    def __init__(self, core: SchedulingCore, events: KVEvents | None = None) -> None:
        """``events`` is told what is stored, where anybody listens."""
        self.core = core
        self.events = events
        self._group_ids = tuple(int(geometry.group) for geometry in core.groups)

    # -- matching: three steps, called by the guard; a manager fills in the last two --------------

    def prepare(self, request: "Request", num_computed_tokens: int) -> None:
        """What every request needs, bypassing or not. Reads no cache."""
        if self.events is not None:
            self.events.follow(request)
        self.core.start_over(
            views.request_id_of(request),
            request.block_hashes,
            num_prompt_tokens=request.num_prompt_tokens,
            num_local_tokens=num_computed_tokens,
            limits=views.limits_of(request),
        )

    @abstractmethod
    def match(self, request: "Request", num_computed_tokens: int) -> int | None:
        """The lookup: tokens that can be loaded; None to be asked again."""

    @abstractmethod
    def record(self, request: "Request", num_hit_tokens: int) -> None:
        """What follows from the hit, from a hit of zero too."""

    def is_loading(self, request: "Request") -> bool:
        return self.core.jobs.loading(views.request_id_of(request))

    # -- the rest of a step -----------------------------------------------------------------------

    def allocated(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        """vLLM gave the request its blocks; ``num_external_tokens`` of our hit were taken."""
        tables = views.block_tables(blocks.get_block_ids(), self._group_ids)
        self.core.given(views.request_id_of(request), tables, num_external_tokens)

    def build_orders(self, scheduler_output: "SchedulerOutput") -> StepOrders:
        """End of the scheduler's step: plan stores, collect the flush list."""
        core = self.core
        core.allocated(views.newly_written(scheduler_output))
        if core.fresh.watching:
            for request_id, blocks in views.grown(scheduler_output):
                core.grew(request_id, blocks)
        self._plan_stores(scheduler_output)
        return core.build(scheduler_output.total_num_scheduled_tokens)

    def _plan_stores(self, scheduler_output: "SchedulerOutput") -> None:
        groups = self.core.groups
        for request_id, num_computed in views.progress(scheduler_output):
            if self.core.due(request_id, num_computed):
                tables = views.current_tables(scheduler_output, request_id, self._group_ids)
                if tables is not None:
                    final = views.states_handed_over(scheduler_output, request_id, groups, tables)
                    self._offer(request_id, num_computed, final)

    def finished(self, request: "Request", block_ids: Sequence[Sequence[int]]) -> None:
        """The request ends: its last full blocks are stored before they can be overwritten."""
        request_id = views.request_id_of(request)
        tables = views.block_tables(block_ids, self._group_ids)
        final = views.states_handed_over(None, request_id, self.core.groups, tables)
        self._offer(request_id, views.num_final_tokens(request), final, finished=True)
        self.core.forget(request_id)
        if self.events is not None:
            self.events.forget(request_id)

    def _offer(
        self, request_id: RequestId, num_computed: int, tables: Tables, *, finished: bool = False
    ) -> None:
        store = self.core.offer(request_id, num_computed, tables, finished=finished)
        if self.events is not None:
            self.events.planned(request_id, store)

    def take(self, reports: StepReports) -> None:
        """A step has run on every rank; what they report of their jobs."""
        self.core.step_ended()
        ended = self.core.take(reports)
        if self.events is not None:
            self.events.happened(self.core.take_changes(), ended)

    def reset(self) -> None:
        self.core.reset()

    def take_events(self) -> "list[KVCacheEvent]":
        """What became findable in the host cache, and what no longer is, since the last call."""
        if self.events is None:
            return []
        self.events.happened(self.core.take_changes())
        return self.events.take()

    @property
    def busy(self) -> bool:
        return self.core.busy

    def snapshot(self) -> dict[str, int | float]:
        return self.core.snapshot()

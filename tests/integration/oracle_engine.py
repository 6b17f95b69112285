"""vLLM's own general connector under vLLM's scheduler, and ours beside it: one way to drive both.

Its worker side is replaced like ours (``real_scheduler``): a job is complete when the test says so.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvferry.engine.types import Direction
from real_scheduler import Engine
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import get_offload_block_hash, get_offload_group_idx
from vllm.v1.outputs import KVConnectorOutput

Chunk = tuple[int, bytes]
"""A KV cache group and a block hash."""

PAGE_BYTES = 4096
"""vLLM rounds its chunks up to this."""


@dataclass
class Record:
    """What a connector did for each request."""

    hits: dict[str, int] = field(default_factory=dict)
    """Tokens that were to be loaded, as the scheduler took them."""
    num_tokens: dict[str, int] = field(default_factory=dict)
    """The length of each request when it was given its blocks."""
    stored: dict[str, set[Chunk]] = field(default_factory=lambda: defaultdict(set))
    loaded: dict[str, set[Chunk]] = field(default_factory=lambda: defaultdict(set))


def _record_hits(engine: Engine, record: Record) -> None:
    told = engine.connector.update_state_after_alloc

    def update(request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens or request.request_id not in record.hits:
            record.hits[request.request_id] = num_external_tokens
            record.num_tokens[request.request_id] = request.num_tokens
        told(request, blocks, num_external_tokens)

    engine.connector.update_state_after_alloc = update


class OurEngine(Engine):
    """``KVFerryOffloadingConnector``, recorded."""

    def __init__(self, model: Path, **kwargs: Any) -> None:
        extra = {"min_load_tokens": 0, **kwargs.pop("extra_config", {})}
        connector = "KVFerryOffloadingConnector"
        super().__init__(model, connector=connector, extra_config=extra, **kwargs)
        self.record = Record()
        _record_hits(self, self.record)

    def step(self) -> SchedulerOutput:
        jobs = self.manager.core.jobs
        output = super().step()
        orders = output.kv_connector_metadata.orders  # type: ignore[union-attr]
        for order in (*orders.prior_stores, *orders.stores, *orders.loads):
            is_store = order.direction is Direction.STORE
            table = self.record.stored if is_store else self.record.loaded
            job = jobs._jobs.get(order.job_id) or self._flushed_job(order.job_id)
            table[order.request_id].update(
                (lease.group, bytes(key)) for lease in job.leases for key in lease.keys
            )
        return output

    def _flushed_job(self, job_id: int) -> Any:
        raise AssertionError(f"job {job_id} ended within its step")

    @property
    def num_open(self) -> int:
        return len(self.ranks.open)

    def complete_all(self) -> None:
        self.ranks.complete_all()


class _OracleRanks:
    """Open jobs, and those whose report is due."""

    def __init__(self) -> None:
        self.open: dict[int, tuple[str, bool]] = {}
        self.due: list[int] = []
        self.finished: set[str] = set()

    def complete(self, job_id: int) -> None:
        req_id, is_store = self.open.pop(job_id)
        self.due.append(job_id)
        if not is_store:
            self.finished.add(req_id)

    def output(self) -> KVConnectorOutput:
        due, self.due = self.due, []
        finished, self.finished = self.finished, set()
        worker = OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(due, 1)) if due else None
        return KVConnectorOutput(finished_recving=finished or None, kv_connector_worker_meta=worker)


class OracleEngine(Engine):
    """vLLM's ``OffloadingConnector`` with its CPU manager, recorded."""

    def __init__(
        self,
        model: Path,
        *,
        num_slots: int,
        extra_config: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        extra = dict(extra_config or {})
        self._core = SimpleNamespace(core=SimpleNamespace(_matcher=SimpleNamespace()))
        extra["cpu_bytes_to_use"] = num_slots * PAGE_BYTES
        super().__init__(model, connector="OffloadingConnector", extra_config=extra, **kwargs)
        self.host = self.connector.scheduler
        self.host.manager._num_chunks = num_slots  # whatever a chunk's bytes round up to
        self.record = Record()
        self.oracle_ranks = _OracleRanks()
        self.ranks = self.oracle_ranks  # type: ignore[assignment]
        _record_hits(self, self.record)

    @property
    def manager(self) -> Any:
        return self._core

    def step(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        metadata = output.kv_connector_metadata
        assert isinstance(metadata, OffloadingConnectorMetadata)
        for jobs, is_store in ((metadata.load_jobs, False), (metadata.store_jobs, True)):
            for job_id, job in jobs.items():
                self.oracle_ranks.open[job_id] = (job.req_id, is_store)
                table = self.record.stored if is_store else self.record.loaded
                table[job.req_id].update(
                    (get_offload_group_idx(key), bytes(get_offload_block_hash(key)))
                    for key in self.host._jobs[job_id].keys
                )
        for job_id in metadata.jobs_to_flush or ():
            if job_id in self.oracle_ranks.open:
                self.oracle_ranks.complete(job_id)
        samples = {
            req_id: not self.scheduler.requests[req_id].is_prefill_chunk
            for req_id in output.num_scheduled_tokens
        }
        self._in_flight.append((output, samples))
        if not self.async_scheduling or len(self._in_flight) > 1 or not samples:
            self._update(*self._in_flight.pop(0))
        return output

    @property
    def num_open(self) -> int:
        return len(self.oracle_ranks.open)

    def complete_all(self) -> None:
        for job_id in list(self.oracle_ranks.open):
            self.oracle_ranks.complete(job_id)

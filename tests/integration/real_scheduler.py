"""vLLM's real scheduler and block pool under our connector, with a worker that is told what to do.

The worker half is the only thing replaced: ``FakeRanks`` takes the orders of each step and reports
a job when, and as, the test says. Everything else is vLLM's.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from kvferry.engine.messages import JobOrder, JobReport, StepOrders, StepReports
from kvferry.engine.types import Direction, JobId, Rank
from kvferry.integration.vllm.metadata import OrdersMetadata, RankCapacity, ReportsMetadata
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.plugins import load_general_plugins
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

SAMPLED_TOKEN = 7


def write_model_config(folder: Path) -> Path:
    """A Llama config that is enough for a scheduler: no weights, no tokenizer."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 2048,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def full_attention_config(num_blocks: int, block_tokens: int) -> KVCacheConfig:
    spec = FullAttentionSpec(
        block_size=block_tokens, num_kv_heads=2, head_size=16, dtype=torch.float32
    )
    layers = ["layer.0", "layer.1"]
    page = spec.page_size_bytes
    tensor = KVCacheTensor(
        size=page * num_blocks * len(layers),
        layers=layers,
        layer_stride=page * num_blocks,
        block_stride=page,
    )
    return KVCacheConfig(num_blocks, [tensor], [KVCacheGroupSpec(layers, spec)])


@dataclass
class FakeRanks:
    """What the ranks would do: open jobs by id, and the reports that the next step carries."""

    num_ranks: int = 1
    open: dict[JobId, JobOrder] = field(default_factory=dict)
    flushed: list[JobId] = field(default_factory=list)
    _due: list[JobReport] = field(default_factory=list)
    _failed_blocks: set[int] = field(default_factory=set)
    _finished: set[str] = field(default_factory=set)

    def take(self, orders: StepOrders) -> None:
        for order in (*orders.prior_stores, *orders.stores, *orders.loads):
            self.open[order.job_id] = order
        for job_id in orders.flush:
            self.flushed.append(job_id)
            if job_id in self.open and self.open[job_id].direction is Direction.STORE:
                self.complete(job_id)

    def complete(
        self, job_id: JobId, *, error: str | None = None, off: bool = False, seconds: float = 0.0
    ) -> None:
        """Every rank reports the job; it is settled. It took rank ``n`` ``seconds / (n + 1)``."""
        order = self.open.pop(job_id)
        for rank in range(self.num_ranks):
            took_s = seconds / (rank + 1)
            report = JobReport(job_id, Rank(rank), order.direction, error, off=off, seconds=took_s)
            self._due.append(report)
        if order.direction is Direction.LOAD:
            assert order.request_id is not None
            self._finished.add(order.request_id)
            if error is not None:
                for segment in order.segments:
                    self._failed_blocks.update(segment.blocks)

    def give_up(self, job_id: JobId) -> None:
        """A load misses its deadline on every rank: failed, and not settled."""
        order = self.open.pop(job_id)
        assert order.request_id is not None
        for rank in range(self.num_ranks):
            report = JobReport(job_id, Rank(rank), order.direction, "deadline", settled=False)
            self._due.append(report)
        self._finished.add(order.request_id)
        for segment in order.segments:
            self._failed_blocks.update(segment.blocks)

    def settle(self, order: JobOrder) -> None:
        """The device lets go of a job that was given up."""
        for rank in range(self.num_ranks):
            self._due.append(JobReport(order.job_id, Rank(rank), order.direction, "deadline"))

    def complete_all(self) -> None:
        for job_id in list(self.open):
            self.complete(job_id)

    def of(self, direction: Direction) -> list[JobOrder]:
        return [order for order in self.open.values() if order.direction is direction]

    def output(self) -> KVConnectorOutput:
        due, self._due = self._due, []
        failed, self._failed_blocks = self._failed_blocks, set()
        finished, self._finished = self._finished, set()
        return KVConnectorOutput(
            finished_recving=finished or None,
            invalid_block_ids=failed,
            kv_connector_worker_meta=ReportsMetadata(StepReports(tuple(due))) if due else None,
        )


class Engine:
    """The scheduler and its fake ranks, stepped by hand."""

    def __init__(
        self,
        model: Path,
        *,
        connector: str = "KVFerrySimpleConnector",
        block_tokens: int = 4,
        num_blocks: int = 100,
        num_slots: int = 32,
        num_ranks: int = 1,
        max_batched_tokens: int = 1024,
        async_scheduling: bool = False,
        policy: str = "recompute",
        kv_role: str = "kv_both",
        extra_config: dict[str, Any] | None = None,
        kv_cache_config: KVCacheConfig | None = None,
        kv_events: bool = False,
    ) -> None:
        load_general_plugins()
        self.block_tokens = block_tokens
        model_config = ModelConfig(model=str(model), skip_tokenizer_init=True, seed=0)
        cache_config = CacheConfig(block_size=block_tokens, enable_prefix_caching=True)
        cache_config.num_gpu_blocks = num_blocks
        self.config = VllmConfig(
            model_config=model_config,
            cache_config=cache_config,
            scheduler_config=SchedulerConfig(
                max_num_seqs=min(16, max_batched_tokens),
                max_num_batched_tokens=max_batched_tokens,
                max_model_len=1024,
                is_encoder_decoder=False,
                enable_chunked_prefill=True,
                async_scheduling=async_scheduling,
            ),
            parallel_config=ParallelConfig(),
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=KVTransferConfig(
                kv_connector=connector,
                kv_role=kv_role,
                kv_load_failure_policy=policy,
                kv_connector_extra_config=extra_config or {},
            ),
            kv_events_config=KVEventsConfig(kv_events, publisher="null") if kv_events else None,
        )
        cache_config.block_size = block_tokens  # the CPU platform sets its own
        self.async_scheduling = async_scheduling
        self.config.parallel_config.world_size = num_ranks
        self.kv_cache_config = kv_cache_config or full_attention_config(num_blocks, block_tokens)
        if self.kv_cache_config.has_mamba_layers:
            cache_config.mamba_cache_mode = "align"
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(block_tokens, sha256)
        kind = AsyncScheduler if async_scheduling else Scheduler
        self.scheduler = kind(
            vllm_config=self.config,
            kv_cache_config=self.kv_cache_config,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=block_tokens,
            hash_block_size=block_tokens,
            log_stats=True,
        )
        self.connector = self.scheduler.connector
        capacities = {(0, rank): RankCapacity(num_slots) for rank in range(num_ranks)}
        self.connector.set_xfer_handshake_metadata_pp_aware(capacities)
        self.now_s = 0.0
        for timed in (self.manager.core, self.manager.core._matcher):
            timed._clock = lambda: self.now_s
        self.ranks = FakeRanks(num_ranks)
        self.sampled_token = SAMPLED_TOKEN
        self._in_flight: list[tuple[SchedulerOutput, dict[str, bool]]] = []

    # -- requests ---------------------------------------------------------------------------

    def request(
        self, request_id: str, tokens: Sequence[int], *, max_tokens: int = 1, **sampling: Any
    ) -> Request:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling)
        params.update_from_generation_config({}, eos_token_id=63)
        return Request(
            request_id=request_id,
            prompt_token_ids=list(tokens),
            sampling_params=params,
            pooling_params=None,
            block_hasher=self._hasher,
        )

    def add(self, request_id: str, tokens: Sequence[int], **kwargs: Any) -> Request:
        request = self.request(request_id, tokens, **kwargs)
        self.scheduler.add_request(request)
        return request

    def blocks_of(self, request_id: str) -> list[int]:
        return list(self.scheduler.kv_cache_manager.get_block_ids(request_id)[0])

    # -- steps ------------------------------------------------------------------------------

    def step(self) -> SchedulerOutput:
        """One step: schedule, "run", report. Under async scheduling output comes a step late."""
        output = self.scheduler.schedule()
        metadata = output.kv_connector_metadata
        assert isinstance(metadata, OrdersMetadata)
        self.ranks.take(metadata.orders)
        samples = {
            req_id: not self.scheduler.requests[req_id].is_prefill_chunk
            for req_id in output.num_scheduled_tokens
        }
        self._in_flight.append((output, samples))
        if not self.async_scheduling or len(self._in_flight) > 1 or not samples:
            self._update(*self._in_flight.pop(0))
        return output

    def _update(self, output: SchedulerOutput, samples: dict[str, bool]) -> None:
        req_ids = list(samples)
        sampled = [[self.sampled_token] if samples[req_id] else [] for req_id in req_ids]
        runner_output = ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={req_id: i for i, req_id in enumerate(req_ids)},
            sampled_token_ids=sampled,
            kv_connector_output=self.ranks.output(),
        )
        self.scheduler.update_from_output(output, runner_output)

    def run(self, *, complete: bool = True, max_steps: int = 200) -> None:
        """Step until the scheduler has nothing left (bounded), completing every job on the way."""
        for _ in range(max_steps):
            if not self.scheduler.has_requests():
                return
            self.step()
            if complete:
                self.ranks.complete_all()
        raise AssertionError(f"not done after {max_steps} steps: {self.connector!r}")

    def reset_gpu_cache(self) -> None:
        assert self.scheduler.reset_prefix_cache()

    # -- what the tests look at -------------------------------------------------------------

    @property
    def manager(self) -> Any:
        return self.connector._manager

    def snapshot(self) -> dict[str, int | float]:
        return self.connector.snapshot()

    def check_idle(self) -> None:
        """Nothing is left over when nothing is going on."""
        self.manager.core.check()
        snapshot = self.snapshot()
        left = {
            name: snapshot[name]
            for name in ("writing", "reading", "doomed", "leases", "jobs", "fences", "requests")
        }
        assert not any(left.values()), left


def tokens(seed: int, count: int) -> list[int]:
    """Prompt tokens that differ between seeds and never equal the sampled token."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(8, 60, (count,), generator=generator)).tolist()


def changed(before: dict[str, Any], after: dict[str, Any], but: Iterable[str] = ()) -> set[str]:
    """The snapshot keys that differ."""
    return {name for name in before if before[name] != after[name]} - set(but)


CONNECTORS: dict[str, dict[str, Any]] = {
    "simple": {"connector": "KVFerrySimpleConnector"},
    "offloading": {
        "connector": "KVFerryOffloadingConnector",
        "extra_config": {"offload_prompt_only": False},
    },
}

MakeEngine = Callable[..., Engine]


def stored_tokens(engine: Engine, prompt: list[int]) -> int:
    """How many of the prompt's tokens the host would serve now, asked without a trace."""
    core = engine.manager.core
    hashes = engine.request("peek", prompt).block_hashes
    (group,) = core.groups
    keys = group.keys(hashes, 0, group.num_hashed_chunks(hashes))
    return int(core.ledger.readable(group.group, keys)) * int(group.chunk_tokens)

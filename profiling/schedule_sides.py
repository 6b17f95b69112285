"""The scheduler halves of two connectors, kvferry's and vLLM's own general one, driven by hand.

A ``Side`` is a real connector behind vLLM's real hooks, with vLLM's own requests, blocks and
scheduler outputs; only the scheduler that would call the hooks and the workers that would move
bytes are missing. Both sides are given the same block hashes, so what they find and store can be
compared. One KV cache group with full attention, a chunk is one block, LRU, decoded tokens are
stored as well.
"""

import json
import tempfile
from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import (
    CachedRequestData,
    KVConnectorBlockState,
    NewRequestData,
    SchedulerOutput,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from ..engine.messages import JobReport, StepReports
from ..engine.types import Rank
from ..integration.vllm.metadata import ReportsMetadata
from ..integration.vllm.offloading import KVFerryOffloadingConnector
from ..integration.vllm.plugin import register

BLOCK_TOKENS: Final = 16
NUM_BLOCKS: Final = 16384
"""GPU blocks that the requests share out; only their ids are ever looked at."""

Hashes = Sequence[bytes]

_MODEL: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 1 << 18,
    "torch_dtype": "float32",
}


class Side(Protocol):
    """One connector's scheduler half, and what its workers would answer."""

    name: str
    connector: Any

    def done(self, metadata: Any) -> KVConnectorOutput:
        """The step's output when every transfer of ``metadata`` has gone well."""

    def num_stored(self, metadata: Any) -> int:
        """How many chunks ``metadata`` orders to be stored."""


class KVFerrySide:
    """``KVFerryOffloadingConnector`` with room for ``num_slots`` chunks, on one rank."""

    name = "kvferry"

    def __init__(self, num_slots: int) -> None:
        register()
        options = {
            "num_cpu_blocks": num_slots,
            "min_load_tokens": 0,
            "offload_prompt_only": False,
        }
        config = _vllm_config(KVFerryOffloadingConnector.__name__, options)
        self.connector: Any = KVFerryOffloadingConnector(
            config, KVConnectorRole.SCHEDULER, _kv_cache_config()
        )

    def done(self, metadata: Any) -> KVConnectorOutput:
        orders = metadata.orders
        reports = tuple(
            JobReport(order.job_id, Rank(0), order.direction)
            for order in (*orders.prior_stores, *orders.stores, *orders.loads)
        )
        meta = ReportsMetadata(StepReports(reports)) if reports else None
        return KVConnectorOutput(kv_connector_worker_meta=meta)

    def num_stored(self, metadata: Any) -> int:
        orders = (*metadata.orders.prior_stores, *metadata.orders.stores)
        return sum(len(segment.slots) for order in orders for segment in order.segments)


class VllmSide:
    """vLLM's ``OffloadingConnector`` and its CPU manager, with the same room."""

    name = "vllm"

    def __init__(self, num_slots: int) -> None:
        probe = self._connector(1 << 30)
        chunk_bytes = (1 << 30) // _manager_of(probe)._num_chunks
        self.connector: Any = self._connector(num_slots * chunk_bytes)
        if (given := _manager_of(self.connector)._num_chunks) != num_slots:
            raise RuntimeError(f"vLLM's manager has {given} chunks, {num_slots} were wanted")

    def _connector(self, num_bytes: int) -> OffloadingConnector:
        options = {"cpu_bytes_to_use": num_bytes, "offload_prompt_only": False}
        config = _vllm_config("OffloadingConnector", options)
        return OffloadingConnector(config, KVConnectorRole.SCHEDULER, _kv_cache_config())

    def done(self, metadata: Any) -> KVConnectorOutput:
        completed = dict.fromkeys((*metadata.store_jobs, *metadata.load_jobs), 1)
        meta = OffloadingWorkerMetadata(completed_jobs=completed) if completed else None
        return KVConnectorOutput(kv_connector_worker_meta=meta)

    def num_stored(self, metadata: Any) -> int:
        return sum(len(job.src_spec.block_ids) for job in metadata.store_jobs.values())


def _manager_of(connector: OffloadingConnector) -> Any:
    return connector.scheduler.manager


def _vllm_config(connector: str, options: dict[str, Any]) -> VllmConfig:
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/config.json", "w", encoding="utf-8") as file:
            json.dump(_MODEL, file)
        model = ModelConfig(model=folder, skip_tokenizer_init=True, seed=0)
        config = VllmConfig(
            model_config=model,
            cache_config=CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True),
            scheduler_config=SchedulerConfig(
                max_model_len=1 << 18,
                max_num_batched_tokens=1 << 18,
                max_num_seqs=1024,
                is_encoder_decoder=False,
            ),
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=KVTransferConfig(
                kv_connector=connector,
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config=options,
            ),
        )
    config.cache_config.block_size = BLOCK_TOKENS  # the CPU platform sets its own
    return config


def _kv_cache_config() -> KVCacheConfig:
    spec = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=16, dtype=torch.float32
    )
    size = spec.page_size_bytes * NUM_BLOCKS
    tensor = KVCacheTensor(
        size=size, layers=["layer.0"], layer_stride=size, block_stride=spec.page_size_bytes
    )
    return KVCacheConfig(NUM_BLOCKS, [tensor], [KVCacheGroupSpec(["layer.0"], spec)])


def request_with(request_id: str, hashes: Hashes, *, max_tokens: int = 1) -> Request:
    """A request whose prompt has one whole block for each of ``hashes``, and one token more."""
    num_tokens = len(hashes) * BLOCK_TOKENS + 1
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    request = Request(request_id, [0] * num_tokens, params, pooling_params=None)
    request.block_hashes = list(hashes)  # type: ignore[arg-type]
    return request


def new_step(request: Request, block_ids: list[int]) -> SchedulerOutput:
    """The step that computes the whole prompt of ``request``, which has these blocks."""
    num_tokens = request.num_prompt_tokens
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [NewRequestData.from_request(request, (block_ids,))]
    output.num_scheduled_tokens = {request.request_id: num_tokens}
    output.total_num_scheduled_tokens = num_tokens
    output.kv_connector_block_state = _block_state({request.request_id: block_ids})
    return output


def decode_step(requests: Sequence[Request], tables: dict[str, list[int]]) -> SchedulerOutput:
    """A step that computes one token of each request, none of which needs a new block."""
    req_ids = [request.request_id for request in requests]
    output = SchedulerOutput.make_empty()
    output.scheduled_cached_reqs = CachedRequestData(
        req_ids=req_ids,
        resumed_req_ids=set(),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[None] * len(req_ids),
        num_computed_tokens=[request.num_computed_tokens for request in requests],
        num_output_tokens=[1] * len(req_ids),
    )
    output.num_scheduled_tokens = dict.fromkeys(req_ids, 1)
    output.total_num_scheduled_tokens = len(req_ids)
    output.kv_connector_block_state = _block_state(tables)
    return output


def _block_state(tables: dict[str, list[int]]) -> KVConnectorBlockState:
    return KVConnectorBlockState(set(tables), lambda req_id: (tables[req_id],), {})


def begin(side: Side, request: Request, block_ids: list[int]) -> None:
    """The request comes, is not found, and is given its blocks."""
    side.connector.on_new_request(request)
    found, _ = side.connector.get_num_new_matched_tokens(request, 0)
    if found:
        raise RuntimeError(f"{side.name}: {found} tokens of a new request were found")
    blocks = KVCacheBlocks(([KVCacheBlock(block_id) for block_id in block_ids],))
    side.connector.update_state_after_alloc(request, blocks, 0)


def end(side: Side, request: Request, block_ids: list[int]) -> None:
    """The request ends, and the step after that has run."""
    request.num_computed_tokens = request.num_tokens
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    side.connector.request_finished_all_groups(request, (block_ids,))
    output = SchedulerOutput.make_empty()
    output.finished_req_ids = {request.request_id}
    metadata = side.connector.build_connector_meta(output)
    if side.num_stored(metadata):
        raise RuntimeError(f"{side.name}: stored something of a request that was stored before")
    side.connector.update_connector_output(side.done(metadata))


def store(side: Side, request_id: str, hashes: Hashes) -> None:
    """A request with these new chunks comes, is computed and stored, and ends."""
    request = request_with(request_id, hashes)
    block_ids = blocks_for(request)
    begin(side, request, block_ids)
    metadata = side.connector.build_connector_meta(new_step(request, block_ids))
    if (stored := side.num_stored(metadata)) != len(hashes):
        raise RuntimeError(f"{side.name}: {stored} chunks stored, {len(hashes)} were given")
    side.connector.update_connector_output(side.done(metadata))
    end(side, request, block_ids)


def blocks_for(request: Request, first: int = 1) -> list[int]:
    """The ids of as many blocks as the request's prompt takes, from ``first`` on."""
    return list(range(first, first - (-request.num_prompt_tokens // BLOCK_TOKENS)))

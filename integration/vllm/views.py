"""vLLM's objects -> the engine's plain data. Nothing outside this module reads their fields."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ...engine.types import NO_BLOCK, BlockId, RequestId

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_NULL_BLOCK = 0
"""vLLM's block pool keeps block 0 as the null block: it stands for "no block here"."""


def request_id_of(request: "Request") -> RequestId:
    return RequestId(request.request_id)


def block_table(block_ids: Iterable[int]) -> list[BlockId]:
    """One group's block ids, the null block as ``NO_BLOCK``."""
    return [BlockId(block) if block != _NULL_BLOCK else NO_BLOCK for block in block_ids]


def allocated_table(blocks: "KVCacheBlocks") -> list[BlockId]:
    """The block table of a request in its (only) group."""
    return block_table(blocks.get_block_ids()[0])


def newly_written(scheduler_output: "SchedulerOutput") -> Iterator[BlockId]:
    """Blocks that running requests were given in this step, and targets of block copies.

    New and resumed requests, and those that start to load, were seen in
    ``update_state_after_alloc`` already.
    """
    for groups in scheduler_output.scheduled_cached_reqs.new_block_ids:
        for group in groups or ():
            yield from map(BlockId, group)
    for copy in scheduler_output.kv_cache_block_copies or ():
        yield BlockId(copy[1])


def progress(scheduler_output: "SchedulerOutput") -> Iterator[tuple[RequestId, int]]:
    """(request, tokens computed once this step's forward has run), for what is scheduled."""
    num_scheduled = scheduler_output.num_scheduled_tokens
    for new in scheduler_output.scheduled_new_reqs:
        yield RequestId(new.req_id), new.num_computed_tokens + num_scheduled[new.req_id]
    cached = scheduler_output.scheduled_cached_reqs
    for req_id, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield RequestId(req_id), num_computed + num_scheduled[req_id]


def current_table(scheduler_output: "SchedulerOutput", request_id: RequestId) -> Sequence[BlockId]:
    """The whole block table, as of this step, of a request that is scheduled in it."""
    state = scheduler_output.kv_connector_block_state
    groups = state.get_block_ids(request_id) if state is not None else None
    return block_table(groups[0]) if groups is not None else ()

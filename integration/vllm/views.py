"""vLLM's objects -> the engine's plain data. Nothing outside this module reads their fields."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from vllm.logger import init_logger

from ...engine.geometry import GroupGeometry
from ...engine.requests import NEVER, NO_LIMITS, Limits
from ...engine.rules import GroupKind
from ...engine.types import NO_BLOCK, BlockId, RequestId

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)

_NULL_BLOCK = 0
"""vLLM's block pool keeps block 0 as the null block: it stands for "no block here"."""


def request_id_of(request: "Request") -> RequestId:
    return RequestId(request.request_id)


def block_tables(
    block_ids: Sequence[Sequence[int]], group_ids: Sequence[int]
) -> list[list[BlockId]]:
    """The block tables of these groups, the null block as ``NO_BLOCK``."""
    return [_block_table(block_ids[group]) for group in group_ids]


def _block_table(block_ids: Sequence[int]) -> list[BlockId]:
    if _NULL_BLOCK not in block_ids:
        return cast("list[BlockId]", list(block_ids))
    return [BlockId(block) if block != _NULL_BLOCK else NO_BLOCK for block in block_ids]


def limits_of(request: "Request") -> Limits:
    """What the request asks for in its ``kv_transfer_params``; a bad value is ignored."""
    params = request.kv_transfer_params
    if not params:
        return NO_LIMITS
    return Limits(
        _limit(params.get("max_load_tokens"), "max_load_tokens"),
        _limit(params.get("max_offload_tokens"), "max_offload_tokens"),
    )


def _limit(value: Any, name: str) -> int:
    if value is None:
        return NEVER
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        # A request's own bad parameter must not stop the engine: it is ignored, and said once.
        logger.warning_once("kv_transfer_params: %s=%r; allowed: 0 or more tokens", name, value)
        return NEVER
    return value


def num_final_tokens(request: "Request") -> int:
    """Tokens of an ended request whose KV is final.

    The last sampled token is left out: its KV is not computed, or (speculative decoding) what
    stands in its place is that of a guess.
    """
    return min(request.num_computed_tokens, max(request.num_prompt_tokens, request.num_tokens - 1))


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


def grown(scheduler_output: "SchedulerOutput") -> Iterator[tuple[RequestId, list[BlockId]]]:
    """Running requests and the blocks that they were given in this step, those given any."""
    cached = scheduler_output.scheduled_cached_reqs
    for req_id, groups in zip(cached.req_ids, cached.new_block_ids, strict=True):
        if groups is not None and req_id not in cached.resumed_req_ids:
            fresh = [BlockId(block) for group in groups for block in group]
            if fresh:
                yield RequestId(req_id), fresh


def progress(scheduler_output: "SchedulerOutput") -> Iterator[tuple[RequestId, int]]:
    """(request, tokens computed once this step's forward has run), for what is scheduled."""
    num_scheduled = scheduler_output.num_scheduled_tokens
    for new in scheduler_output.scheduled_new_reqs:
        yield RequestId(new.req_id), new.num_computed_tokens + num_scheduled[new.req_id]
    cached = scheduler_output.scheduled_cached_reqs
    for req_id, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield RequestId(req_id), num_computed + num_scheduled[req_id]


def current_tables(
    scheduler_output: "SchedulerOutput", request_id: RequestId, group_ids: Sequence[int]
) -> list[list[BlockId]] | None:
    """The block tables, as of this step, of a request that is scheduled in it."""
    state = scheduler_output.kv_connector_block_state
    tables = state.get_block_ids(request_id) if state is not None else None
    return block_tables(tables, group_ids) if tables is not None else None


def states_handed_over(
    scheduler_output: "SchedulerOutput | None",
    request_id: RequestId,
    groups: Sequence[GroupGeometry],
    tables: list[list[BlockId]],
) -> list[list[BlockId]]:
    """``tables`` with nothing in recurrent groups but the states that are final with this step.

    In align mode the place in a table does not tell what a state's block holds: it is advanced in
    place, and a checkpoint that is not kept is overwritten. vLLM names the blocks that hold the
    state after exactly so many tokens in the step that computes it, once, and registers those in
    its own prefix cache; what it does not name is as good as absent. Without ``scheduler_output``
    (a request that has ended) none is named.
    """
    if all(geometry.rule.kind is not GroupKind.RECURRENT for geometry in groups):
        return tables
    state = scheduler_output.kv_connector_block_state if scheduler_output is not None else None
    named = state.boundary_state_offloads.get(request_id, ()) if state is not None else ()
    left = []
    for geometry, table in zip(groups, tables, strict=True):
        if geometry.rule.kind is GroupKind.RECURRENT:
            table = [NO_BLOCK] * len(table)
            for group, block, num_tokens in named:
                index, rest = divmod(num_tokens, geometry.block_tokens)
                if group == geometry.group and block != _NULL_BLOCK and not rest:
                    table[index - 1] = BlockId(block)
        left.append(table)
    return left

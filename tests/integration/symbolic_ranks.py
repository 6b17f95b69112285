"""Ranks that move meanings instead of bytes: every block and slot says whose tokens it holds.

The content of a token's place in a block is a ``Content``: the KV cache group, the *node* of the
token (which stands for it and everything before it, see ``Prefixes``), and the generation of the
cache. Computing writes it, a store copies it to a slot, a load back to a block. A device may do
what it was told at any time until it reports, so the latest time is taken for what is copied, and
what is being written is ``None`` from the first moment on: a block or slot that is touched while
somebody else uses it then shows, as a wrong content or as a ``BrokenInvariant`` at once.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from kvferry.engine.geometry import GroupGeometry
from kvferry.engine.messages import JobOrder, JobReport, StepOrders, StepReports
from kvferry.engine.rules import GroupKind
from kvferry.engine.types import NO_BLOCK, NO_JOB, Direction, JobId, Rank
from kvferry.integration.vllm.metadata import OrdersMetadata, ReportsMetadata
from real_scheduler import Engine
from recurrent_states import RecurrentStates
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

Content = tuple[int, int, int] | None


class BrokenInvariant(AssertionError):
    """One of the design's invariants does not hold; the message begins with its number."""


class Prefixes:
    """Numbers what a token means: the same number only for the same token after the same tokens."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int], int] = {}
        self._parents: list[int] = []
        self._roots: dict[str | None, int] = {}

    def nodes(self, salt: str | None, tokens: Sequence[int]) -> list[int]:
        """The node of each of ``tokens``; tenants with different salts share none."""
        node = self._roots.setdefault(salt, -1 - len(self._roots))
        found = []
        for token in tokens:
            node = self._nodes.setdefault((node, token), len(self._nodes))
            if node == len(self._parents):
                self._parents.append(node)
            found.append(node)
        return found


class SymbolicRanks:
    """Takes the place of ``FakeRanks``: each rank has its own memory and reports for itself."""

    def __init__(self, num_ranks: int, block_tokens: int, *, names_blocks: bool) -> None:
        """``names_blocks``: of a load that failed vLLM is told the blocks, not the request."""
        self.num_ranks = num_ranks
        self.generation = 0
        self.open: dict[JobId, JobOrder] = {}
        """Jobs that some rank has not settled."""
        self.unanswered: dict[JobId, set[int]] = {}
        self.unsettled: dict[JobId, set[int]] = {}
        self.stale_jobs: set[JobId] = set()
        """Jobs that were ordered before the last reset."""
        self.stale_requests: set[str] = set()
        """Requests that were live at the last reset and have not started over."""
        self.writer: dict[int, JobId] = {}
        """The store that last wrote to a slot."""
        self.gpu: list[dict[int, list[Content]]] = [{} for _ in range(num_ranks)]
        self.host: list[dict[int, list[Content]]] = [{} for _ in range(num_ranks)]
        self._block_tokens = block_tokens
        self._names_blocks = names_blocks
        self._due: list[JobReport] = []
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._sealed: deque[KVConnectorOutput] = deque()

    # -- orders -----------------------------------------------------------------------------

    def begin(self, orders: StepOrders) -> None:
        """Before the forward: finish what is to be flushed, begin the loads."""
        for order in orders.prior_stores:
            self._submit(order)
        for job_id in orders.flush:
            for rank in sorted(self.unanswered.get(job_id, ())):
                self.report(job_id, rank)
        for order in orders.loads:
            if order.job_id == NO_JOB:
                self._end_load(order)
            else:
                self._submit(order)

    def end(self, orders: StepOrders) -> None:
        """After the forward: begin the stores, and hand over what has become due."""
        for order in orders.stores:
            self._submit(order)
        due, self._due = self._due, []
        blocks, self._failed_blocks = self._failed_blocks, set()
        finished, self._finished = self._finished, set()
        failed, self._failed = self._failed, set()
        self._sealed.append(
            KVConnectorOutput(
                finished_recving=finished or None,
                invalid_block_ids=blocks if self._names_blocks else set(),
                failed_recving=set() if self._names_blocks else failed,
                kv_connector_worker_meta=ReportsMetadata(StepReports(tuple(due))) if due else None,
            )
        )

    def output(self) -> KVConnectorOutput:
        """What the oldest step handed over."""
        return self._sealed.popleft()

    def _submit(self, order: JobOrder) -> None:
        if order.direction is Direction.STORE and order.request_id in self.stale_requests:
            raise BrokenInvariant(f"I6: {order} stores what was computed before a reset")
        for other in self.open.values():
            both_read = order.direction is other.direction is Direction.LOAD
            if not both_read and _slots(order) & _slots(other):
                raise BrokenInvariant(f"I2: {order} uses slots of {other}")
        if order.direction is Direction.LOAD:
            self.about_to_write(_blocks(order), by=order.job_id)
        self.open[order.job_id] = order
        ranks = range(self.num_ranks)
        self.unanswered[order.job_id] = set(ranks)
        self.unsettled[order.job_id] = set(ranks)
        for rank in ranks:
            if order.direction is Direction.STORE:
                for slot in _slots(order):
                    self.host[rank][slot] = []
                    self.writer[slot] = order.job_id
            else:
                self._spoil(rank, order)

    # -- what a rank does, when told ----------------------------------------------------------

    def report(self, job_id: JobId, rank: int, error: str | None = None) -> None:
        """A rank ends a job, well or not."""
        order = self.open[job_id]
        if error is None:
            self._move(order, rank)
        self._answer(order, rank, error, settled=True)

    def give_up(self, job_id: JobId, rank: int) -> None:
        """A rank reports that a job is past its deadline; its device is not done with it."""
        self._answer(self.open[job_id], rank, "deadline", settled=False)

    def settle(self, job_id: JobId, rank: int) -> None:
        """The device of a rank is done with a job that was given up."""
        self._answer(self.open[job_id], rank, "deadline", settled=True)

    def _answer(self, order: JobOrder, rank: int, error: str | None, *, settled: bool) -> None:
        job_id = order.job_id
        self._due.append(JobReport(job_id, Rank(rank), order.direction, error, settled))
        first = rank in self.unanswered[job_id]
        self.unanswered[job_id].discard(rank)
        if first and order.direction is Direction.LOAD:
            self._end_load(order, error=error, last=not self.unanswered[job_id])
        if settled:
            self.unsettled[job_id].discard(rank)
            if not self.unsettled[job_id]:
                del self.open[job_id], self.unanswered[job_id], self.unsettled[job_id]

    def _end_load(self, order: JobOrder, error: str | None = "refused", last: bool = True) -> None:
        assert order.request_id is not None
        if error is not None:
            self._failed_blocks.update(_blocks(order))
            self._failed.add(order.request_id)
        if last:
            self._finished.add(order.request_id)

    def _move(self, order: JobOrder, rank: int) -> None:
        gpu, host, size = self.gpu[rank], self.host[rank], self._block_tokens
        for segment in order.segments:
            width = len(segment.blocks) // len(segment.slots)
            for i, slot in enumerate(segment.slots):
                blocks = segment.blocks[i * width : (i + 1) * width]
                if order.direction is Direction.STORE:
                    empty: list[Content] = [None] * size
                    pages = [empty if b == NO_BLOCK else gpu[b] for b in blocks]
                    host[slot] = [content for page in pages for content in page]
                    continue
                if not host[slot]:
                    raise BrokenInvariant(f"I3: {order} loads slot {slot}, never stored")
                for j, block in enumerate(blocks):
                    if block != NO_BLOCK:
                        gpu[block] = host[slot][j * size : (j + 1) * size]

    def _spoil(self, rank: int, order: JobOrder) -> None:
        for block in _blocks(order):
            self.gpu[rank][block] = [None] * self._block_tokens

    # -- the forward --------------------------------------------------------------------------

    def about_to_write(self, blocks: Iterable[int], by: object) -> None:
        """Nothing that is in flight may read or write ``blocks``."""
        written = set(blocks)
        for job_id, order in self.open.items():
            # What was given up is not waited for by anyone (see ``TransferEngine.flush``).
            if self.unanswered[job_id] and written & _blocks(order):
                number = "I1" if order.direction is Direction.STORE else "I4"
                raise BrokenInvariant(f"{number}: {by} writes to blocks of {order}")

    def write(self, group: int, block: int, offset: int, node: int) -> None:
        for gpu in self.gpu:
            page = gpu.setdefault(block, [None] * self._block_tokens)
            page[offset] = (group, node, self.generation)

    def read(self, group: int, block: int, offset: int, node: int, by: object) -> None:
        """A token computed for ``by`` looks back at this place."""
        for rank, gpu in enumerate(self.gpu):
            found = gpu.get(block, [None] * self._block_tokens)[offset]
            if found != (group, node, self.generation):
                raise BrokenInvariant(
                    f"I7, I10: {by} reads {found} on rank {rank} in block {block} at {offset}; "
                    f"right: {(group, node, self.generation)}"
                )


def _slots(order: JobOrder) -> set[int]:
    return {slot for segment in order.segments for slot in segment.slots}


def _blocks(order: JobOrder) -> set[int]:
    return {b for segment in order.segments for b in segment.blocks if b != NO_BLOCK}


class SymbolicEngine(Engine):
    """vLLM's scheduler over symbolic ranks: every step is computed, and held to the invariants."""

    ranks: SymbolicRanks  # type: ignore[assignment]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.groups: tuple[GroupGeometry, ...] = self.manager.core.groups
        self.ranks = SymbolicRanks(
            self.ranks.num_ranks, self.block_tokens, names_blocks=self.connector._names_blocks
        )
        self.prefixes = Prefixes()
        self._states = RecurrentStates(self)
        self._hashing: list[Request] = []
        """Requests whose block hashes may still grow."""
        self.chunk_nodes: dict[bytes, list[int]] = {}
        """The nodes of all tokens up to the end of what a block hash stands for."""

    def request(
        self,
        request_id: str,
        tokens: Sequence[int],
        *,
        max_tokens: int = 1,
        cache_salt: str | None = None,
        **sampling: Any,
    ) -> Request:
        plain = super().request(request_id, tokens, max_tokens=max_tokens, **sampling)
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(tokens),
            sampling_params=plain.sampling_params,
            pooling_params=None,
            cache_salt=cache_salt,
            block_hasher=self._hasher,
        )
        self._hashing.append(request)
        return request

    def step(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        metadata = output.kv_connector_metadata
        assert isinstance(metadata, OrdersMetadata)
        self.ranks.begin(metadata.orders)
        self._forward(output)
        self.ranks.end(metadata.orders)
        samples = {
            req_id: not self.scheduler.requests[req_id].is_prefill_chunk
            for req_id in output.num_scheduled_tokens
        }
        self._in_flight.append((output, samples))
        if not self.async_scheduling or len(self._in_flight) > 1 or not samples:
            self._update(*self._in_flight.pop(0))
        return output

    def _forward(self, output: SchedulerOutput) -> None:
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        self._states.forget(output)
        rows = []
        for req_id, num_scheduled in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[req_id]
            nodes = self.nodes_of(request, starts[req_id] + num_scheduled)
            tables = self.scheduler.kv_cache_manager.get_block_ids(req_id)
            rows.append((req_id, starts[req_id], nodes, tables))
        self._states.advance(rows)
        for req_id, start, nodes, tables in rows:  # all write before any attends
            for geometry in self._with_tokens:
                table, size = tables[geometry.group], geometry.block_tokens
                self.ranks.about_to_write(table[start // size : -(-len(nodes) // size)], by=req_id)
                for p in range(start, len(nodes)):
                    self.ranks.write(geometry.group, table[p // size], p % size, nodes[p])
        for req_id, start, nodes, tables in rows:
            for geometry in self._with_tokens:
                table, size = tables[geometry.group], geometry.block_tokens
                for p in range(geometry.rule.needed_from(start), start):
                    self.ranks.read(geometry.group, table[p // size], p % size, nodes[p], req_id)

    @property
    def _with_tokens(self) -> list[GroupGeometry]:
        """The groups whose blocks hold something of each of their tokens."""
        return [one for one in self.groups if one.rule.kind is not GroupKind.RECURRENT]

    def nodes_of(self, request: Request, num_tokens: int) -> list[int]:
        """The nodes of a request's first tokens; what is not sampled yet is known all the same."""
        known = list(request.all_token_ids[:num_tokens])
        known += [self.sampled_token] * (num_tokens - len(known))
        return self.prefixes.nodes(request.cache_salt, known)

    def check_content(self) -> None:
        """I1, I3, I6: what can be found is, on every rank, what its key says."""
        for request in self._hashing:
            size = self.groups[0].hash_tokens
            nodes = self.nodes_of(request, len(request.block_hashes) * size)
            for i, key in enumerate(request.block_hashes):
                self.chunk_nodes.setdefault(key, nodes[: (i + 1) * size])
        self._hashing = [request for request in self._hashing if not request.is_finished()]
        for geometry in self.groups:
            group = geometry.group
            for key, slot in self.manager.core.ledger._readable[group].items():
                if self.ranks.writer.get(slot) in self.ranks.stale_jobs:
                    raise BrokenInvariant(f"I6: slot {slot} was stored before a reset")
                right = self.chunk_nodes[key][-geometry.chunk_tokens :]
                if geometry not in self._with_tokens:
                    right = right[-1:]  # one state, of all that came before
                for rank, host in enumerate(self.ranks.host):
                    found = (host.get(slot) or [(-1, -1, -1)])[-len(right) :]
                    if [content and content[:2] for content in found] != [
                        (group, node) for node in right
                    ]:
                        raise BrokenInvariant(
                            f"I1, I3: rank {rank} has {found} in slot {slot} of group {group}; "
                            f"its key says {right}"
                        )

"""A transfer engine on the simulator, with a KV cache, host memory and a worker beside it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from kvferry.engine.arena import Arena
from kvferry.engine.devices.cuda import StreamDevice
from kvferry.engine.devices.runtime import Runtime
from kvferry.engine.devices.simulated import Cache, SimulatedRuntime
from kvferry.engine.devices.simulated_worker import RunnerOrder, SimulatedWorker
from kvferry.engine.devices.simulation import Simulation
from kvferry.engine.layout import GroupLayout, Layout
from kvferry.engine.messages import JobOrder, JobReport, Segment
from kvferry.engine.strategy import Chooser, Method, Strategy
from kvferry.engine.transfer import TransferEngine, TransferOptions
from kvferry.engine.types import BlockId, Direction, GroupId, JobId, Rank, RequestId, SlotId
from kvferry.kernels.table import Fragment


@dataclass
class Rig:
    """One simulated rank. ``mutate`` wraps the runtime that the device sees.

    The cache has two layers of ``page_bytes`` a block. A chunk is two blocks.
    """

    simulation: Simulation
    method: Method = Method.ZERO_COPY
    num_blocks: int = 16
    num_slots: int = 8
    page_bytes: int = 48
    staging_blocks: int = 2
    give_way_s: float = 0.0
    order: RunnerOrder = RunnerOrder.FIRST
    options: TransferOptions = field(default_factory=lambda: TransferOptions(integrity="full"))
    mutate: type | None = None
    pinned: bool = True
    blocks_per_chunk: int = 2
    strategies: object | None = None
    max_pin_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        self.runtime = SimulatedRuntime(self.simulation)
        self.cache = Cache(2, self.num_blocks, self.page_bytes)
        self.worker = SimulatedWorker(self.runtime, self.cache, self.order)
        seen: Runtime = self.mutate(self.runtime) if self.mutate else self.runtime
        self.mutant = seen
        block_bytes = 2 * self.page_bytes
        self.device = StreamDevice(
            seen, staging_bytes=self.staging_blocks * block_bytes, give_way_s=self.give_way_s
        )
        fragments = tuple(
            Fragment(layer.data_ptr(), self.page_bytes, self.page_bytes)
            for layer in self.cache.layers
        )
        group = GroupLayout(GroupId(0), self.blocks_per_chunk, fragments, self.num_blocks)
        layout = Layout((group,), tuple(self.cache.layers))
        if not self.pinned:
            self.runtime.refuse_when(
                lambda name: name == "register", lambda: RuntimeError("not permitted"), times=10**9
            )
        self.arena = Arena.reserve(
            self.num_slots,
            layout.slot_stride_bytes,
            layout.checksum_stride_bytes,
            self.device,
            max_pin_bytes=self.max_pin_bytes,
        )
        assert self.arena.wait_pinned(30)
        candidates = {way: [Strategy(self.method)] for way in Direction}
        self.engine = TransferEngine(
            self.device,
            layout,
            self.arena,
            Rank(0),
            self.options,
            clock=self.runtime.now_s,
            chooser=self.strategies or Chooser(candidates),
        )
        self.reports: list[JobReport] = []

    def store(self, job_id: int, blocks: Sequence[int], slots: Sequence[int], **flags) -> None:
        self.engine.submit(self._job(job_id, Direction.STORE, blocks, slots), **flags)

    def load(self, job_id: int, blocks: Sequence[int], slots: Sequence[int], **flags) -> None:
        self.engine.submit(self._job(job_id, Direction.LOAD, blocks, slots), **flags)

    def flush(self, *job_ids: int) -> None:
        self.engine.flush([JobId(job_id) for job_id in job_ids])

    def poll(self) -> list[JobReport]:
        reports = self.engine.poll()
        self.reports += reports
        return reports

    def finish(self) -> dict[int, str | None]:
        """Run everything, take all reports; each job's error."""
        self.simulation.run_all()
        self.poll()
        return self.errors()

    def errors(self) -> dict[int, str | None]:
        settled = [report for report in self.reports if report.settled]
        assert len({report.job_id for report in settled}) == len(settled), "reported twice"
        return {int(report.job_id): report.error for report in settled}

    def slot(self, slot: int) -> torch.Tensor:
        """The chunk in a slot: ``[blocks_per_chunk, block_bytes]``."""
        start = slot * self.arena.slot_stride_bytes
        num_bytes = self.blocks_per_chunk * 2 * self.page_bytes
        return self.arena.slots[start : start + num_bytes].view(self.blocks_per_chunk, -1).clone()

    def fill(self, blocks: Iterable[int], values: Iterable[int]) -> None:
        """Write blocks at once, with nothing in flight."""
        for block, value in zip(blocks, values, strict=True):
            for layer in self.cache.layers:
                layer[block] = value

    def values(self, blocks: Iterable[int]) -> list[int]:
        """The one byte each block is filled with; -1 where it is not one."""
        found = [self.cache.block(block).unique().tolist() for block in blocks]
        return [value[0] if len(value) == 1 else -1 for value in found]

    def _job(
        self, job_id: int, direction: Direction, blocks: Sequence[int], slots: Sequence[int]
    ) -> JobOrder:
        segment = Segment(
            GroupId(0),
            tuple(SlotId(slot) for slot in slots),
            tuple(BlockId(block) for block in blocks),
            tuple(1000 + slot for slot in slots),
        )
        return JobOrder(JobId(job_id), direction, (segment,), RequestId(f"r{job_id}"))


@dataclass
class StepHooks:
    """What a connector does in the hooks of one step, with what the step's orders say.

    ``mark_in_bind`` and ``deferred`` are what kvferry does; a test may switch them off.
    """

    rig: Rig
    flush: Sequence[int] = ()
    stores: Sequence[tuple[int, Sequence[int], Sequence[int]]] = ()
    loads: Sequence[tuple[int, Sequence[int], Sequence[int]]] = ()
    deferred: bool = True
    mark_in_bind: bool = True

    def handle_preemptions(self) -> None:
        self.rig.engine.begin_step()
        self.rig.flush(*self.flush)

    def bind_connector_metadata(self) -> None:
        if self.mark_in_bind:
            self.rig.engine.mark_loads()

    def start_load_kv(self) -> None:
        for job_id, blocks, slots in self.loads:
            self.rig.load(job_id, blocks, slots)

    def wait_for_save(self) -> None:
        for job_id, blocks, slots in self.stores:
            self.rig.store(job_id, blocks, slots, deferred=self.deferred)

    def get_finished(self) -> None:
        self.rig.poll()

"""The worker's side of a connector: vLLM's worker hooks -> the transfer engine of one rank."""

import torch

from ...engine.arena import Arena
from ...engine.capacity import MemoryLimits
from ...engine.devices.base import Device
from ...engine.devices.cpu import CpuDevice
from ...engine.devices.cuda import open_cuda
from ...engine.layout import Layout
from ...engine.messages import JobOrder, JobReport, StepOrders, StepReports
from ...engine.ranges import Stretch
from ...engine.transfer import TransferEngine, TransferOptions
from ...engine.types import NO_BLOCK, NO_JOB, BlockId, Direction, JobId, Rank, RequestId
from .config import Options
from .startup import HostMemoryFacts, startup_line

IDLE_WAIT_S = 0.002
"""How long a step that computes nothing waits for a transfer; a new request waits no longer."""


class OffloadWorker:
    """One rank's engine, and what its reports mean to vLLM.

    ``take_finished_loads`` and ``take_failed_blocks`` empty what they return, as vLLM's hooks do.
    """

    def __init__(
        self,
        layout: Layout,
        options: Options,
        rank: Rank,
        num_ranks: int,
        *,
        num_host_ranks: int = 1,
        limits_at_start: MemoryLimits | None = None,
        writes_before_flush: bool = False,
    ) -> None:
        """``limits_at_start`` are the host's before any of its ``num_host_ranks`` ranks reserved.
        ``writes_before_flush``: vLLM writes to fresh blocks before ``begin`` (see ``support``).

        Raises ValueError for a device that is not supported or memory too small for a slot, and
        ``CapacityError`` for more memory than there is.
        """
        device = device_of(layout.tensors[0])
        on_gpu = layout.tensors[0].is_cuda
        integrity = options.integrity or ("full" if on_gpu else "sample")
        checksums = integrity != "off"
        self.num_slots = options.num_slots(layout.bytes_per_slot(checksums=checksums), num_ranks)
        arena = Arena.reserve(
            self.num_slots,
            layout.slot_stride_bytes,
            layout.checksum_stride_bytes if checksums else 0,
            device,
            num_ranks=num_host_ranks,
            limits_at_start=limits_at_start,
        )
        self._engine = TransferEngine(
            device,
            layout,
            arena,
            rank,
            TransferOptions(
                deadline_s=options.transfer_deadline_s,
                integrity=integrity,
                measure_s=options.measure_s,
            ),
        )
        self._layout = layout
        self._memory = HostMemoryFacts(self.num_slots, arena.slot_stride_bytes, arena.num_bytes)
        # On the CPU compute is in program order, so a store can start as soon as its forward has
        # returned; on a GPU it starts a step later, behind the sampled tokens' way out.
        self._defer_stores = on_gpu and not writes_before_flush
        self._writes_before_flush = writes_before_flush
        self._rank = rank
        self._deadline_s = options.transfer_deadline_s
        self._seconds = dict.fromkeys(Direction, 0.0)
        self._loads: dict[JobId, tuple[RequestId, tuple[BlockId, ...]]] = {}
        self._reports: list[JobReport] = []
        self._finished_loads: set[RequestId] = set()
        self._failed_loads: set[RequestId] = set()
        self._failed_blocks: set[BlockId] = set()
        self._computes = False
        self._compute = Stretch("compute")

    def begin(self, orders: StepOrders) -> None:
        """Before anything of the step is written: submit what was computed before, then flush."""
        self._engine.begin_step()
        self._computes = not orders.idle
        for order in orders.prior_stores:
            if self._writes_before_flush and order.job_id in orders.flush:
                self._miss(order)
            else:
                self._engine.submit(order)
        self._engine.flush(orders.flush)

    def _miss(self, order: JobOrder) -> None:
        """The blocks were given away and written to before they could be stored."""
        error = "its blocks were overwritten before the store could begin"
        self._reports.append(JobReport(order.job_id, self._rank, order.direction, error))

    def mark_loads(self) -> None:
        """Fresh blocks have been zeroed: loads of this step come after that."""
        self._engine.mark_loads()
        if self._computes:
            self._compute.begin()

    def start_loads(self, orders: StepOrders) -> None:
        for order in orders.loads:
            blocks = tuple(
                block for part in order.segments for block in part.blocks if block != NO_BLOCK
            )
            if order.job_id == NO_JOB and order.request_id is not None:
                self._end_load(order.request_id, blocks, failed=True)
                continue
            if order.request_id is not None:
                self._loads[order.job_id] = (order.request_id, blocks)
            self._engine.submit(order)

    def start_stores(self, orders: StepOrders) -> None:
        """After the forward was launched."""
        self._compute.end()
        for order in orders.stores:
            self._engine.submit(order, deferred=self._defer_stores)
        if self._writes_before_flush:
            # The next step's first writes come before its flush list does: nothing of this step may
            # still be reading then.
            self._engine.flush(order.job_id for order in (*orders.prior_stores, *orders.stores))

    def poll(self, orders: StepOrders) -> None:
        """Take what the engine has to report."""
        if orders.idle:
            # vLLM goes on stepping at once: its loop would only take the processor from transfers.
            self._engine.wait_for_one(IDLE_WAIT_S)
        self._take(self._engine.poll())

    def drain(self) -> None:
        """Finish what was submitted; what it reports is passed on in the next step."""
        self._take(self._engine.drain(self._deadline_s))

    def _take(self, reports: list[JobReport]) -> None:
        for report in reports:
            self._reports.append(report)
            if report.error is None:
                self._seconds[report.direction] += report.seconds
            if report.direction is Direction.LOAD and report.job_id in self._loads:
                # A job's first report is its answer; one after a missed deadline only settles it.
                request_id, blocks = self._loads.pop(report.job_id)
                self._end_load(request_id, blocks, failed=report.error is not None)

    def _end_load(
        self, request_id: RequestId, blocks: tuple[BlockId, ...], *, failed: bool
    ) -> None:
        self._finished_loads.add(request_id)
        if failed:
            self._failed_loads.add(request_id)
            self._failed_blocks.update(blocks)

    def take_finished_loads(self) -> tuple[set[str], set[str]]:
        """Requests whose load has ended, and those of them whose load failed."""
        finished, failed = self._finished_loads, self._failed_loads
        self._finished_loads, self._failed_loads = set(), set()
        return set(finished), set(failed)

    def take_failed_blocks(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return set(failed)

    def take_reports(self) -> StepReports:
        reports, self._reports = self._reports, []
        return StepReports(tuple(reports))

    def startup_line(self, layout_name: str) -> str:
        """What the layout, called ``layout_name`` in vLLM, leads to on this rank."""
        strategy_for = self._engine.strategy_for
        return startup_line(self._rank, layout_name, self._layout, self._memory, strategy_for)

    def snapshot(self) -> dict[str, int | float]:
        """The engine's, and ``store_s`` and ``load_s``: what transfers that succeeded took."""
        seconds = {f"{way}_s": seconds for way, seconds in self._seconds.items()}
        return {**self._engine.snapshot(), **seconds}

    def close(self) -> None:
        self._engine.close()


def device_of(cache: torch.Tensor) -> Device:
    """The engine's device for a KV cache that lives there. Raises ValueError for another kind."""
    if cache.is_cuda:
        return open_cuda(cache.device)
    if cache.device.type == "cpu":
        return CpuDevice()
    raise ValueError(f"KV cache on device {cache.device.type!r}; supported: 'cpu', 'cuda'")

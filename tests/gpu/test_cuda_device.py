"""The tests of ``suite_device`` on a GPU, with slow kernels that make a missing wait show."""

import pytest
import torch
from kvferry.engine.arena import Arena
from kvferry.engine.devices.cuda import open_cuda
from kvferry.engine.devices.cuda_runtime import CudaRuntime
from kvferry.engine.devices.runtime import Priority
from kvferry.engine.errors import TransferError
from kvferry.engine.layout import GroupLayout, Layout
from kvferry.engine.messages import JobOrder, Segment
from kvferry.engine.strategy import Chooser, Method, Strategy
from kvferry.engine.transfer import TransferEngine, TransferOptions
from kvferry.engine.types import BlockId, Direction, GroupId, JobId, Rank, SlotId
from kvferry.kernels.table import Fragment

pytest.register_assert_rewrite("suite_device")

from suite_device import *  # noqa: E402, F403

SLOW_CYCLES = 20_000_000  # about 10 ms at 2 GHz
DRAIN_S = 60.0


class CudaWorld:
    """Everything real. The compute stream is one of its own, current while work is queued."""

    def __init__(self, method, page_bytes, num_blocks, num_slots, pinned, slice_bytes):
        self.gpu = torch.device("cuda:0")
        self.block_bytes = 2 * page_bytes
        self.compute = torch.cuda.Stream(self.gpu)
        self.layers = [
            torch.zeros(num_blocks, page_bytes, dtype=torch.uint8, device=self.gpu)
            for _ in range(2)
        ]
        torch.cuda.synchronize(self.gpu)
        fragments = tuple(
            Fragment(layer.data_ptr(), page_bytes, page_bytes) for layer in self.layers
        )
        layout = Layout((GroupLayout(GroupId(0), 2, fragments, num_blocks),), tuple(self.layers))
        self.device = open_cuda(self.gpu)
        registrar = self.device if pinned else Unpinnable()
        self.arena = Arena.reserve(
            num_slots, layout.slot_stride_bytes, layout.checksum_stride_bytes, registrar
        )
        assert self.arena.wait_pinned(60)
        self.engine = TransferEngine(
            self.device,
            layout,
            self.arena,
            Rank(0),
            TransferOptions(integrity="full", slice_bytes=slice_bytes),
            chooser=Chooser({way: [Strategy(method)] for way in Direction}),
        )
        self.errors = {}

    def write(self, blocks, values, *, slow=False):
        with torch.cuda.stream(self.compute):
            if slow:
                torch.cuda._sleep(SLOW_CYCLES)
            index = torch.tensor(list(blocks)).to(self.gpu, non_blocking=True)
            rows = torch.tensor(list(values), dtype=torch.uint8).to(self.gpu, non_blocking=True)
            for layer in self.layers:
                layer[index] = rows[:, None]

    def read(self, blocks, *, slow=False):
        with torch.cuda.stream(self.compute):
            if slow:
                torch.cuda._sleep(SLOW_CYCLES)
            index = torch.tensor(list(blocks)).to(self.gpu, non_blocking=True)
            rows = torch.cat([layer[index] for layer in self.layers], dim=1)
        return rows.cpu

    def begin_step(self):
        with torch.cuda.stream(self.compute):
            self.engine.begin_step()

    def mark_loads(self):
        with torch.cuda.stream(self.compute):
            self.engine.mark_loads()

    def store(self, job_id, blocks, slots, **flags):
        with torch.cuda.stream(self.compute):
            self.engine.submit(order(job_id, Direction.STORE, blocks, slots), **flags)

    def load(self, job_id, blocks, slots, **flags):
        with torch.cuda.stream(self.compute):
            self.engine.submit(order(job_id, Direction.LOAD, blocks, slots), **flags)

    def flush(self, *job_ids):
        with torch.cuda.stream(self.compute):
            self.engine.flush([JobId(job_id) for job_id in job_ids])

    def finish(self):
        with torch.cuda.stream(self.compute):
            reports = self.engine.drain(DRAIN_S)
        self.errors.update((int(report.job_id), report.error) for report in reports)
        self.settle_compute()
        return dict(self.errors)

    def settle_compute(self):
        self.compute.synchronize()

    def set_blocks(self, blocks, rows):
        with torch.cuda.stream(self.compute):
            index = torch.tensor(list(blocks)).to(self.gpu)
            for layer, part in zip(self.layers, rows.to(self.gpu).chunk(2, dim=1), strict=True):
                layer[index] = part
        self.settle_compute()

    def get_blocks(self, blocks):
        index = torch.tensor(list(blocks)).to(self.gpu)
        rows = torch.cat([layer[index] for layer in self.layers], dim=1).cpu()
        torch.cuda.synchronize(self.gpu)
        return rows

    def slot_bytes(self, slot):
        start = slot * self.arena.slot_stride_bytes
        return self.arena.slots[start : start + 2 * self.block_bytes]


class Unpinnable:
    """Lets an arena stay pageable."""

    can_pin = False
    numa_node = None

    def register(self, address, num_bytes):
        raise TransferError("not here")

    def unregister(self, address):
        raise TransferError("not here")


def order(job_id, direction, blocks, slots):
    slots = tuple(SlotId(slot) for slot in slots)
    blocks = tuple(BlockId(block) for block in blocks)
    seeds = tuple(1000 + slot for slot in slots)
    return JobOrder(JobId(job_id), direction, (Segment(GroupId(0), slots, blocks, seeds),))


@pytest.fixture
def make_world():
    worlds = []

    def make(
        method, *, page_bytes=48, num_blocks=16, num_slots=8, pinned=True, slice_bytes=32 << 20
    ):
        world = CudaWorld(method, page_bytes, num_blocks, num_slots, pinned, slice_bytes)
        worlds.append(world)
        return world

    yield make
    for world in worlds:
        world.engine.close()


def test_a_hold_is_as_long_as_compute_stood_still(make_world):
    world = make_world(Method.PACKED)
    world.write([0, 1], [1, 2], slow=True)
    world.store(1, [0, 1], [0])
    world.flush(1)
    world.finish()
    snapshot = world.engine.snapshot()
    assert snapshot["flushes"] == 1
    assert snapshot["flush_p50_s"] > 0


def test_what_a_failed_registration_leaves_behind():
    """S17: nothing. The address is no memory at all."""
    runtime = CudaRuntime(torch.device("cuda:0"))
    with pytest.raises(RuntimeError, match="cudaHostRegister"):
        runtime.register(1 << 46, 4096)
    torch.zeros(1, device="cuda:0").add_(1)
    torch.cuda.synchronize()


def test_a_wait_of_the_host_has_a_timeout():
    runtime = CudaRuntime(torch.device("cuda:0"))
    stream, event = runtime.create_stream("test", Priority.LOW), runtime.create_event()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50 * SLOW_CYCLES)
    runtime.record(event, stream)
    assert not runtime.is_done(event)
    assert not runtime.wait_on_host(event, 0.0)
    assert runtime.wait_on_host(event, DRAIN_S)
    assert runtime.is_done(event)

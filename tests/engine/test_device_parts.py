"""The parts of the stream device: merged copies, pools, two groups in one arena, the CUDA calls."""

import ctypes
import types

import numpy as np
import pytest
import torch
from kvferry.engine.arena import Arena
from kvferry.engine.devices import cuda_runtime
from kvferry.engine.devices.byte_ranges import ByteRanges
from kvferry.engine.devices.cuda import StreamDevice, open_cuda
from kvferry.engine.devices.cuda_runtime import CudaRuntime
from kvferry.engine.devices.group import MovedGroup, Places, merge_neighbours
from kvferry.engine.devices.pools import BufferPool, EventPool
from kvferry.engine.devices.runtime import Copies
from kvferry.engine.devices.simulated import SimulatedRuntime
from kvferry.engine.devices.simulation import RandomChooser, Simulation
from kvferry.engine.layout import GroupLayout, Layout
from kvferry.engine.messages import JobOrder, Segment
from kvferry.engine.strategy import Chooser, Method, Strategy
from kvferry.engine.transfer import TransferEngine, TransferOptions
from kvferry.engine.types import Direction, GroupId, JobId, Rank
from kvferry.kernels.table import Fragment

METHODS = [Method.ZERO_COPY, Method.PACKED, Method.COPY_ENGINE]


def ints(*values):
    return np.array(values, np.int64)


def test_neighbours_are_merged_only_where_both_sides_touch():
    devices, hosts = ints(0, 10, 20, 40, 50), ints(100, 110, 130, 140, 150)
    merged = merge_neighbours(devices, hosts, ints(10, 10, 10, 10, 10))
    assert [part.tolist() for part in merged] == [[0, 20, 40], [100, 130, 140], [20, 10, 20]]


@pytest.mark.parametrize("seed", range(5))
def test_merged_copies_move_the_same_bytes(seed):
    print(f"seed {seed}")
    generator = np.random.default_rng(seed)
    sizes = generator.integers(1, 4, 60)
    devices = np.cumsum(np.concatenate(([0], (sizes + generator.integers(0, 2, 60))[:-1])))
    hosts = np.cumsum(np.concatenate(([500], (sizes + generator.integers(0, 2, 60))[:-1])))
    pairs = {
        (d + i, h + i) for d, h, n in zip(devices, hosts, sizes, strict=True) for i in range(n)
    }
    merged = merge_neighbours(devices, hosts, sizes)
    assert pairs == {(d + i, h + i) for d, h, n in zip(*merged, strict=True) for i in range(n)}
    assert len(merged[0]) < 60


def group_of(num_layers, block_stride_bytes):
    """Pages of 64 bytes, two blocks a chunk, slots without gaps."""
    fragments = tuple(Fragment(4096 * layer, block_stride_bytes, 64) for layer in range(num_layers))
    slot_bytes = 2 * 64 * num_layers
    memory = types.SimpleNamespace(
        slots=torch.zeros(8 * slot_bytes, dtype=torch.uint8),
        slot_stride_bytes=slot_bytes,
        num_slots=8,
        checksum_stride_bytes=0,
    )
    return MovedGroup(GroupLayout(GroupId(0), 2, fragments, 16), memory, torch.device("cpu"))


def test_blocks_and_slots_in_a_row_are_one_copy_where_a_block_is_one_fragment():
    places = Places(ints(3, 4, 5, 6), ints(2, 2, 3, 3), ints(0, 1, 0, 1))
    for group, num_copies in ((group_of(1, 64), 1), (group_of(1, 128), 4), (group_of(2, 64), 8)):
        copies = group.page_copies("copy", places, to_host=True, pinned=True)
        assert len(copies.sizes) == num_copies
        assert copies.sizes.sum() == 4 * group.block_bytes
        staging = torch.zeros(1024, dtype=torch.uint8)
        staged = group.staged_copies("copy", staging, places, to_host=False, pinned=True)
        assert len(staged.sizes) == 1
        assert staged.targets[0] == staging.data_ptr()


def test_pools_give_back_what_they_were_given_up_to_their_bound():
    runtime = SimulatedRuntime(Simulation(RandomChooser(0)))
    events = EventPool(runtime, max_events=2)
    taken = [events.take() for _ in range(4)]
    assert events.num_taken == 4
    for event in taken:
        events.give_back(event)
    assert events.num_taken == 0
    assert {id(events.take()) for _ in range(2)} == {id(event) for event in taken[:2]}
    buffers = BufferPool(runtime, max_bytes=10_000)
    large = [buffers.take(5000) for _ in range(2)]
    assert {buffer.numel() for buffer in large} == {8192}
    for buffer in large:
        buffers.give_back(buffer)
    assert buffers.pooled_bytes == 8192
    assert buffers.take(8192) is large[0]
    assert buffers.take(1).numel() == 4096


@pytest.mark.parametrize("method", METHODS)
def test_two_groups_share_an_arena(method):
    """Other page sizes, other chunk lengths, other numbers of layers; one job over both."""
    simulation = Simulation(RandomChooser(1))
    runtime = SimulatedRuntime(simulation)
    generator = torch.Generator().manual_seed(1)
    shapes = ((3, 12, 40, 2), (1, 20, 256, 1))  # layers, blocks, page bytes, blocks a chunk
    caches, groups = [], []
    for index, (num_layers, num_blocks, page_bytes, chunk) in enumerate(shapes):
        cache = [
            torch.randint(256, (num_blocks, page_bytes), generator=generator, dtype=torch.uint8)
            for _ in range(num_layers)
        ]
        runtime.expose(*cache)
        fragments = tuple(Fragment(layer.data_ptr(), page_bytes, page_bytes) for layer in cache)
        groups.append(GroupLayout(GroupId(index), chunk, fragments, num_blocks))
        caches.append(cache)
    before = [[layer.clone() for layer in cache] for cache in caches]
    layout = Layout(tuple(groups))
    device = StreamDevice(runtime, staging_bytes=600)
    arena = Arena.reserve(6, layout.slot_stride_bytes, layout.checksum_stride_bytes, device)
    assert arena.wait_pinned(30)
    chooser = Chooser({way: [Strategy(method)] for way in Direction})
    options = TransferOptions(integrity="full")
    engine = TransferEngine(device, layout, arena, Rank(0), options, chooser=chooser)

    def order(job_id, direction, first, second):
        return JobOrder(
            JobId(job_id),
            direction,
            (
                Segment(GroupId(0), (0, 2), first, (-7, 9)),
                Segment(GroupId(1), (1, 4, 5), second, (1, 2, 3)),
            ),
        )

    engine.submit(order(1, Direction.STORE, (0, 1, 2, 3), (0, 1, 2)))
    simulation.run_all()
    assert [report.error for report in engine.poll()] == [None]
    engine.mark_loads()
    engine.submit(order(2, Direction.LOAD, (8, 9, 10, 11), (17, 18, 19)))
    simulation.run_all()
    assert [report.error for report in engine.poll()] == [None]
    for cache, old, moved in zip(caches, before, ((8, 0, 4), (17, 0, 3)), strict=True):
        target, source, count = moved
        for layer, was in zip(cache, old, strict=True):
            assert torch.equal(layer[target : target + count], was[source : source + count])
            assert torch.equal(layer[:target], was[:target])
    simulation.check()
    engine.close()


def test_there_is_no_cuda_device_without_cuda():
    with pytest.raises(ValueError, match="allowed: a CUDA device with its index"):
        open_cuda(torch.device("cpu"))
    with pytest.raises(ValueError, match="allowed: a CUDA device with its index"):
        open_cuda(torch.device("cuda"))


class FakeDriver:
    """``cuda.bindings.driver`` as far as batched copies go."""

    CUdeviceptr = staticmethod(lambda address: ("device pointer", address))
    CUstream = staticmethod(lambda handle: ("stream", handle))

    def __init__(self, result):
        self.calls = []
        self._result = result

    def cuMemcpyBatchAsync(self, *arguments):  # noqa: N802
        self.calls.append(arguments)
        return self._result


def fake_runtime(driver):
    runtime = CudaRuntime.__new__(CudaRuntime)
    runtime._driver, runtime._attributes = driver, "attributes"
    return runtime


def some_copies():
    return Copies("copy", ints(10, 20), ints(30, 40), ints(5, 6), to_host=True, pinned=True)


@pytest.mark.parametrize("result", [(0,), (0, 2**64 - 1)], ids=["CUDA 13", "CUDA 12"])
def test_a_batch_is_one_call(result):
    driver = FakeDriver(result)
    fake_runtime(driver)._copy_batch(7, some_copies())
    pointers = [[("device pointer", a) for a in pair] for pair in ((10, 20), (30, 40))]
    assert driver.calls == [(*pointers, [5, 6], 2, ["attributes"], [0], 1, ("stream", 7))]


def test_a_batch_that_fails_raises():
    with pytest.raises(RuntimeError, match="cuMemcpyBatchAsync of 2 copies"):
        fake_runtime(FakeDriver((1, 0)))._copy_batch(7, some_copies())


def test_single_copies_raise_at_the_first_that_fails():
    runtime = fake_runtime(None)
    calls = []

    def copy(*arguments):
        calls.append(arguments)
        return 1 if len(calls) == 2 else 0

    runtime._libcuda = types.SimpleNamespace(cuMemcpyAsync=copy)
    with pytest.raises(RuntimeError, match="cuMemcpyAsync of 6 bytes: error 1"):
        runtime._copy_singly(7, some_copies())
    assert calls == [(10, 30, 5, 7), (20, 40, 6, 7)]


def test_the_loaded_cuda_runtime_is_looked_for_where_it_is(monkeypatch):
    assert cuda_runtime._loaded_cudart() is None, "torch for CPUs has none"
    maps = "7f00-7f01 r-xp 00000000 08:01 123   /opt/some dir/libcudart.so.13\n"
    monkeypatch.setattr(cuda_runtime.Path, "read_text", lambda self: maps)
    found = []
    monkeypatch.setattr(ctypes, "CDLL", found.append)
    cuda_runtime._loaded_cudart()
    assert found == ["/opt/some dir/libcudart.so.13"]


def test_ranges_of_a_piece_cover_its_blocks(make_rig):
    rig = make_rig()
    group = rig.device._carrier._groups[GroupId(0)]
    places = Places(ints(3, 5), ints(1, 2), ints(0, 1))
    assert group.page_ranges(places).num_bytes == 2 * group.block_bytes
    assert rig.cache.ranges([3, 5]).covers(group.page_ranges(places))
    first = rig.arena.slots.data_ptr() + rig.arena.slot_stride_bytes
    second = first + rig.arena.slot_stride_bytes + group.block_bytes
    expected = ByteRanges.of([first, second], group.block_bytes)
    assert group.host_ranges(places).covers(expected)

"""The CPU device on its own: both copy loops, tickets, threads."""

import os
import subprocess
import sys
import threading
from types import ModuleType

import numpy as np
import pytest
import torch
from cache_shapes import layer_views
from kvferry.engine.arena import Arena
from kvferry.engine.devices.base import Lane, Piece
from kvferry.engine.devices.copying import GroupCopier, load_compiled
from kvferry.engine.devices.cpu import RANGE_BYTES, CpuDevice
from kvferry.engine.errors import EngineClosed, TransferError
from kvferry.engine.layout import Layout, group_layout
from kvferry.engine.strategy import Method, Strategy
from kvferry.engine.types import Direction, GroupId, JobId
from worker_rig import WAIT_S, HeldDevice

COMPILED = load_compiled()


def piece_of(
    direction: Direction, blocks: list[int], slots: list[int], positions: list[int], size: int
) -> Piece:
    def ints(values: list[int]) -> np.ndarray:
        return np.array(values, dtype=np.int64)

    return Piece(
        JobId(1),
        direction,
        GroupId(0),
        ints(blocks),
        ints(slots),
        ints(positions),
        ints([0] * len(blocks)),
        np.zeros(len(blocks), dtype=bool),
        False,
        size * len(blocks),
    )


WITHOUT = """
import sys
if {blocked}:
    sys.modules["numba"] = None
from kvferry.engine.devices.copying import load_compiled
from kvferry.engine.devices.cpu import CpuDevice
from kvferry.engine.types import Direction
print(load_compiled(), CpuDevice(1).strategies(Direction.LOAD)[0])
"""


@pytest.mark.parametrize("blocked", [True, False], ids=["missing", "turned off"])
def test_without_numba_it_copies_from_python(blocked: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(blocked=blocked)],
        env=os.environ | {"NUMBA_DISABLE_JIT": "0" if blocked else "1", "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=WAIT_S * 4,
        check=True,
    )
    assert done.stdout.strip() == "None interpretedx1"
    assert "numba is not usable" in done.stderr


def test_numba_is_there_in_the_test_environment() -> None:
    assert COMPILED is not None


@pytest.mark.parametrize("compiled", [COMPILED, None], ids=["compiled", "interpreted"])
@pytest.mark.parametrize("order", ["LBHNC", "LHBNC", "BLHNC"])
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("page", [(2, 5, 7), (1, 1, 5003), (2, 64, 64), (1, 3, 1000)], ids=str)
def test_both_loops_move_the_same_bytes(
    compiled: ModuleType | None, order: str, direction: Direction, page: tuple[int, int, int]
) -> None:
    """Odd sizes and addresses, and runs long enough to go past the cache."""
    seed = 20260301
    print("seed", seed)
    random = np.random.default_rng(seed)
    caches = layer_views(order, (3, 12, *page))
    pages = torch.tensor([], dtype=torch.uint8).set_(caches[0].untyped_storage()).numpy()
    pages[:] = random.integers(0, 256, pages.shape, dtype=np.uint8)
    layout = group_layout(GroupId(0), 2, [(cache, cache[0].numel()) for cache in caches])
    with Arena.reserve(6, Layout((layout,)).slot_stride_bytes, 0, NoPinning()) as arena:
        host = arena.slots.numpy()
        host[:] = random.integers(0, 256, host.shape, dtype=np.uint8)
        # Runs of neighbours in both memories, in one only, and none: merging must not run over.
        blocks, slots, positions = (
            [3, 4, 5, 6, 0, 8, 2],
            [0, 0, 1, 1, 4, 4, 3],
            [0, 1, 0, 1, 0, 1, 1],
        )
        wanted_host, wanted_pages = host.copy(), pages.copy()
        for block, slot, position in zip(blocks, slots, positions, strict=True):
            at = slot * arena.slot_stride_bytes + position * layout.block_bytes
            for fragment in layout.fragments:
                begin = fragment.base_address + block * fragment.block_stride_bytes
                begin -= pages.ctypes.data
                there, here = (
                    slice(at, at + fragment.num_bytes),
                    slice(begin, begin + fragment.num_bytes),
                )
                if direction is Direction.STORE:
                    wanted_host[there] = pages[here]
                else:
                    wanted_pages[here] = host[there]
                at += fragment.num_bytes
        copier = GroupCopier(layout, arena, compiled)
        method = Method.COMPILED if compiled else Method.INTERPRETED
        piece = piece_of(direction, blocks, slots, positions, layout.block_bytes)
        copier.move(piece, 0, 4, method)
        copier.move(piece, 4, 7, method)
        assert np.array_equal(host, wanted_host)
        assert np.array_equal(pages, wanted_pages)


def test_a_look_through_all_modules_does_not_stumble() -> None:
    """vLLM's CPU build reads ``vars`` of every value in every module when an engine starts."""
    assert COMPILED is not None
    ours = ("llvmlite", "numba", "kvferry")
    for module in [sys.modules[name] for name in list(sys.modules) if name.startswith(ours)]:
        for value in list(getattr(module, "__dict__", {}).values()):
            if hasattr(value, "__dict__"):
                vars(value).get("kernel")


@pytest.mark.timeout(20)  # less than WAIT_S: who is not woken looks again when that is over
def test_a_waiting_caller_is_woken_by_the_end_of_a_transfer() -> None:
    with Attached(HeldDevice(1)) as attached:
        device = attached.device
        device.hold(JobId(1))
        ticket = device.launch(attached.piece, Lane.LOADS, (), Strategy(Method.COMPILED))
        waiting = threading.Thread(target=device.wait, args=([ticket], WAIT_S))
        waiting.start()
        assert device.started.wait(WAIT_S)
        device.release(JobId(1))
        waiting.join()
        assert ticket.done()


class NoPinning:
    can_pin = False
    numa_node = None

    def register(self, address: int, num_bytes: int) -> None: ...

    def unregister(self, address: int) -> None: ...


class Attached:
    """A held device over one large block's worth of entries."""

    def __init__(self, device: HeldDevice, num_entries: int = 64) -> None:
        self.device = device
        cache = torch.zeros(num_entries, RANGE_BYTES // 8, dtype=torch.uint8)
        self.group = group_layout(GroupId(0), 1, [(cache, RANGE_BYTES // 8)])
        layout = Layout((self.group,), (cache,))
        self.arena = Arena.reserve(num_entries, layout.slot_stride_bytes, 0, self.device)
        self.device.attach(layout, self.arena)
        ids = list(range(num_entries))
        self.piece = piece_of(Direction.STORE, ids, ids, [0] * num_entries, self.group.block_bytes)

    def __enter__(self) -> "Attached":
        return self

    def __exit__(self, *exception: object) -> None:
        self.device.open_all()
        assert self.device.close(WAIT_S)
        self.arena.close()


class Together(HeldDevice):
    """A device whose moves wait until ``width`` of them run at once, and count how many ever do."""

    def __init__(self, num_threads: int, width: int) -> None:
        self.width = width
        self.inside = self.most = 0
        self.lock = threading.Lock()
        self.all_in = threading.Event()
        super().__init__(num_threads)

    def _move(self, piece: Piece, begin: int, end: int, strategy: Strategy) -> list[int]:
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
            if self.inside >= self.width:
                self.all_in.set()
        assert self.all_in.wait(WAIT_S)
        corrupt = super()._move(piece, begin, end, strategy)
        with self.lock:
            self.inside -= 1
        return corrupt


@pytest.mark.parametrize("width", [1, 3])
def test_a_piece_is_moved_in_ranges_by_as_many_threads_as_asked(width: int) -> None:
    device = Together(4, width)
    with Attached(device) as attached:
        ticket = device.launch(attached.piece, Lane.STORES, (), Strategy(Method.COMPILED, width))
        assert device.wait([ticket], WAIT_S)
        assert device.most == width
        assert len(device.moved) >= 8


def test_cancelling_stops_between_two_ranges() -> None:
    with Attached(HeldDevice(1)) as attached:
        device = attached.device
        device.hold(JobId(1))
        ticket = device.launch(attached.piece, Lane.LOADS, (), Strategy(Method.COMPILED))
        assert device.started.wait(WAIT_S)
        ticket.cancel()
        assert not ticket.done()
        device.release(JobId(1))
        assert device.wait([ticket], WAIT_S)
        assert isinstance(ticket.error(), TransferError)
        assert len(device.moved) == 1
        ticket.cancel()


def test_waiting_has_an_end() -> None:
    with Attached(HeldDevice(1)) as attached:
        device = attached.device
        device.hold(JobId(1))
        ticket = device.launch(attached.piece, Lane.LOADS, (), Strategy(Method.COMPILED))
        assert not device.wait([ticket], 0.0)
        assert not device.hold_compute([ticket], 0.0)
        assert len(device.take_hold_times_s()) == 1
        assert device.take_hold_times_s() == []


def test_seconds_are_those_of_the_move() -> None:
    with Attached(HeldDevice(2)) as attached:
        ticket = attached.device.launch(attached.piece, Lane.LOADS, (), Strategy(Method.COMPILED))
        assert attached.device.wait([ticket], WAIT_S)
        assert ticket.seconds() > 0
        assert ticket.num_bytes == attached.piece.num_bytes
        assert ticket.corrupt_slots() == ()


def test_closing_joins_the_threads_and_refuses_more() -> None:
    threads = threading.active_count()
    attached = Attached(HeldDevice(3))
    assert threading.active_count() == threads + 3
    attached.device.hold(JobId(1))
    ticket = attached.device.launch(attached.piece, Lane.LOADS, (), Strategy(Method.COMPILED))
    assert attached.device.started.wait(WAIT_S)
    assert not attached.device.close(0.0)
    attached.device.open_all()
    assert attached.device.close(WAIT_S)
    assert attached.device.close(WAIT_S)
    assert ticket.done()
    assert threading.active_count() == threads
    with pytest.raises(EngineClosed):
        attached.device.launch(attached.piece, Lane.LOADS, (), Strategy(Method.COMPILED))
    attached.arena.close()


def test_bad_use_is_refused() -> None:
    with pytest.raises(ValueError, match="num_threads is 0; allowed: 1 to 64"):
        CpuDevice(0)
    with Attached(HeldDevice(1)) as attached:
        with pytest.raises(ValueError, match="attached already"):
            attached.device.attach(Layout((attached.group,)), attached.arena)
        with pytest.raises(TransferError):
            attached.device.register(0, 1)


def test_loads_take_all_threads_first_and_stores_one() -> None:
    device = CpuDevice(3)
    widths = {way: [one.width for one in device.strategies(way)] for way in Direction}
    assert widths == {Direction.LOAD: [3, 2, 1], Direction.STORE: [1, 2, 3]}
    assert "3" in device.identity
    device.close(WAIT_S)

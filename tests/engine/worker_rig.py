"""A transfer engine on the CPU device over small caches, and a device that tests hold in hand."""

import threading
from collections.abc import Callable

import numpy as np
import torch
from cache_shapes import layer_views
from kvferry.engine.arena import Arena
from kvferry.engine.devices.base import Piece
from kvferry.engine.devices.cpu import CpuDevice
from kvferry.engine.layout import Layout, group_layout
from kvferry.engine.messages import JobOrder, Segment
from kvferry.engine.options import TransferOptions
from kvferry.engine.strategy import Strategy
from kvferry.engine.transfer import TransferEngine
from kvferry.engine.types import (
    BlockId,
    Direction,
    GroupId,
    JobId,
    Key,
    Rank,
    SlotId,
    seed_of,
)

WAIT_S = 30.0


class HeldDevice(CpuDevice):
    """A CPU device whose moves wait for a job's gate, and raise for jobs in ``failing``.

    ``started`` is set when any held move has begun; ``release`` opens one gate, ``open_all`` all.
    """

    def __init__(self, num_threads: int = 2) -> None:
        self.gates: dict[JobId, threading.Event] = {}
        self.failing: set[JobId] = set()
        self.started = threading.Event()
        self.moved: list[JobId] = []
        super().__init__(num_threads)

    def hold(self, *jobs: JobId) -> None:
        for job in jobs:
            self.gates[job] = threading.Event()

    def release(self, job: JobId) -> None:
        self.gates[job].set()

    def open_all(self) -> None:
        for gate in self.gates.values():
            gate.set()

    def _move(self, piece: Piece, begin: int, end: int, strategy: Strategy) -> list[int]:
        gate = self.gates.get(piece.job_id)
        if gate is not None:
            self.started.set()
            assert gate.wait(WAIT_S), "a test left a gate closed"
        if piece.job_id in self.failing:
            raise OSError("the device says no")
        corrupt = super()._move(piece, begin, end, strategy)
        self.moved.append(piece.job_id)
        return corrupt


class Clock:
    """Time that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Rig:
    """One group of full attention; ``caches[layer][block]`` is what a test writes and reads."""

    def __init__(
        self,
        device: CpuDevice | None = None,
        *,
        order: str = "LBHNC",
        sizes: tuple[int, int, int, int, int] = (3, 16, 2, 4, 8),
        blocks_per_chunk: int = 1,
        num_slots: int = 8,
        clock: Callable[[], float] | None = None,
        **options: object,
    ) -> None:
        self.caches = layer_views(order, sizes)
        self.blocks_per_chunk = blocks_per_chunk
        page_bytes = sizes[2] * sizes[3] * sizes[4]
        group = group_layout(
            GroupId(0), blocks_per_chunk, [(cache, page_bytes) for cache in self.caches]
        )
        self.layout = Layout((group,), tuple(self.caches))
        self.device = device or HeldDevice()
        self.options = TransferOptions(**{"integrity": "off", **options})
        checksums = 0 if self.options.integrity == "off" else self.layout.checksum_stride_bytes
        self.arena = Arena.reserve(num_slots, self.layout.slot_stride_bytes, checksums, self.device)
        extra = {} if clock is None else {"clock": clock}
        self.engine = TransferEngine(
            self.device, self.layout, self.arena, Rank(0), self.options, **extra
        )

    def __enter__(self) -> "Rig":
        return self

    def __exit__(self, *exception: object) -> None:
        if isinstance(self.device, HeldDevice):
            self.device.open_all()
        self.engine.close()

    def fill(self, block: int, value: int) -> None:
        """Write a block of every layer, each byte told apart by its place."""
        for number, cache in enumerate(self.caches):
            size = cache[block].numel()
            pattern = (torch.arange(size) * 7 + value * 31 + number * 13) % 251
            cache[block].copy_(pattern.to(torch.uint8).view(cache[block].shape))

    def read(self, block: int) -> np.ndarray:
        return torch.stack([cache[block] for cache in self.caches]).numpy().copy()

    def order(
        self, job: int, direction: Direction, blocks: list[int], slots: list[int]
    ) -> JobOrder:
        seeds = tuple(
            seed_of(GroupId(0), Key(bytes([slot]) * 16 + b"key of a chunk")) for slot in slots
        )
        segment = Segment(
            GroupId(0),
            tuple(SlotId(slot) for slot in slots),
            tuple(BlockId(block) for block in blocks),
            seeds,
        )
        return JobOrder(JobId(job), direction, (segment,))

    def store(self, job: int, blocks: list[int], slots: list[int], **flags: bool) -> None:
        self.engine.submit(self.order(job, Direction.STORE, blocks, slots), **flags)

    def load(self, job: int, blocks: list[int], slots: list[int], **flags: bool) -> None:
        self.engine.submit(self.order(job, Direction.LOAD, blocks, slots), **flags)

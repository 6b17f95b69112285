"""The transfer engine on the CPU device against one plain memory copy, in one run.

What is timed is the whole engine: a job is submitted, cut into slices, moved by the device's
threads and polled. Beside it, in turns, the same bytes are copied contiguously by as many threads,
one ``memmove`` each. Ratios are medians over the turns; on a machine that does other work too, the
ratio of processor seconds says more than that of wall time. Bytes are checked before anything is
timed.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from ..engine.arena import Arena
from ..engine.devices.cpu import CpuDevice
from ..engine.layout import Layout, group_layout
from ..engine.messages import JobOrder, Segment
from ..engine.options import TransferOptions
from ..engine.pieces import Integrity
from ..engine.strategy import Chooser
from ..engine.transfer import TransferEngine
from ..engine.types import BlockId, Direction, GroupId, JobId, Rank, SlotId

TARGETS: Final = {4 << 10: 0.6, 16 << 10: 0.7, 32 << 10: 0.8, 64 << 10: 0.8}
NUM_LAYERS: Final = 32
TIMEOUT_S: Final = 120.0
_SEED: Final = 20261130


@dataclass(frozen=True, slots=True)
class Speed:
    """One case. Ratios are the plain copy's time through the engine's: less than 1 is slower.

    Figures are medians over the rounds, but for the plain copy's fastest round.
    """

    direction: str
    page_bytes: int
    num_threads: int
    integrity: str
    gb_per_s: float
    copy_gb_per_s: float
    best_copy_gb_per_s: float
    wall_ratio: float
    cpu_ratio: float
    target: float | None
    judged_by: str

    @property
    def ratio(self) -> float:
        """The ratio that counts on this machine."""
        return self.wall_ratio if self.judged_by == "wall" else self.cpu_ratio

    @property
    def met(self) -> bool:
        """Whether that ratio reaches the target, if there is one."""
        return self.target is None or self.ratio >= self.target


def judge() -> str:
    """``wall``, but ``cpu`` where other work keeps the processors busy and waits are not ours."""
    return "wall" if os.getloadavg()[0] < 0.5 * (os.cpu_count() or 1) else "cpu"


class Bench:
    """One engine over caches of ``num_layers`` layers, and the plain copy beside it.

    Blocks and slots are paired at random, all of them in each job.
    """

    def __init__(
        self, page_bytes: int, num_threads: int, integrity: Integrity, total_bytes: int
    ) -> None:
        self.num_blocks = max(num_threads, total_bytes // (page_bytes * NUM_LAYERS))
        self.num_bytes = self.num_blocks * page_bytes * NUM_LAYERS
        self.caches = torch.zeros(NUM_LAYERS, self.num_blocks, page_bytes, dtype=torch.uint8)
        group = group_layout(GroupId(0), 1, [(cache, page_bytes) for cache in self.caches])
        layout = Layout((group,), (self.caches,))
        device = CpuDevice(num_threads)
        checksums = 0 if integrity == "off" else layout.checksum_stride_bytes
        self.arena = Arena.reserve(self.num_blocks, layout.slot_stride_bytes, checksums, device)
        widest = {
            way: [max(device.strategies(way), key=lambda one: one.width)] for way in Direction
        }
        self.engine = TransferEngine(
            device,
            layout,
            self.arena,
            Rank(0),
            TransferOptions(integrity=integrity),
            chooser=Chooser(widest),
        )
        random = np.random.default_rng(_SEED)
        self.blocks = tuple(BlockId(int(block)) for block in random.permutation(self.num_blocks))
        self.seeds = tuple(int(seed) for seed in random.integers(0, 1 << 62, self.num_blocks))
        self.pool = ThreadPoolExecutor(num_threads)
        self.num_threads = num_threads
        self.job = 0

    def close(self) -> None:
        self.engine.close()
        self.pool.shutdown()

    def transfer(self, direction: Direction) -> None:
        """One job over all blocks, from submit to its report. Raises RuntimeError if it failed."""
        self.job += 1
        slots = tuple(SlotId(slot) for slot in range(self.num_blocks))
        segment = Segment(GroupId(0), slots, self.blocks, self.seeds)
        self.engine.submit(JobOrder(JobId(self.job), direction, (segment,)))
        reports = self.engine.drain(TIMEOUT_S)
        if len(reports) != 1 or reports[0].error is not None:
            raise RuntimeError(f"the transfer failed: {reports}")

    def plain_copy(self, direction: Direction) -> None:
        """The same bytes in one run a thread."""
        pages, host = self.caches.data_ptr(), self.arena.slots.data_ptr()
        target, source = (host, pages) if direction is Direction.STORE else (pages, host)
        share = self.num_bytes // self.num_threads
        copies = [
            self.pool.submit(ctypes.memmove, target + part * share, source + part * share, share)
            for part in range(self.num_threads)
        ]
        for copy in copies:
            copy.result()

    def check(self) -> None:
        """Store, wipe, load, compare. Raises RuntimeError when a byte differs."""
        random = torch.Generator().manual_seed(_SEED)
        self.caches.random_(0, 256, generator=random)
        wanted = self.caches.clone()
        self.transfer(Direction.STORE)
        self.caches.zero_()
        self.transfer(Direction.LOAD)
        if not torch.equal(self.caches, wanted):
            raise RuntimeError("what was loaded is not what was stored")

    def measure(
        self, direction: Direction, num_rounds: int
    ) -> tuple[float, float, float, float, float]:
        """Median seconds of the engine and of the copy, the copy's least, and the two ratios
        (wall, processor)."""
        self.transfer(Direction.STORE)  # a load verifies what a store has written
        ours, plain = [], []
        for _ in range(num_rounds):
            plain.append(_timed(lambda: self.plain_copy(direction)))
            if direction is Direction.LOAD:
                self.transfer(Direction.STORE)  # the copy wrote something else there
            ours.append(_timed(lambda: self.transfer(direction)))
        wall, cpu = (
            statistics.median(a[clock] / b[clock] for a, b in zip(plain, ours, strict=True))
            for clock in (0, 1)
        )
        return _median(ours), _median(plain), min(taken_s for taken_s, _ in plain), wall, cpu


def _timed(action: Callable[[], None]) -> tuple[float, float]:
    """Wall and processor seconds of one call, all threads of the process together."""
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - wall, max(time.process_time() - cpu, 1e-9)


def _median(times: Iterable[tuple[float, float]]) -> float:
    return statistics.median(wall for wall, _ in times)


@dataclass(frozen=True, slots=True)
class Case:
    """What one engine is made for."""

    page_bytes: int
    num_threads: int
    integrity: Integrity


def speeds_of(case: Case, total_bytes: int, num_rounds: int, judged_by: str) -> Iterator[Speed]:
    """Both directions of one case, on an engine of its own. Targets hold with integrity off.

    ``judged_by`` is what `judge` said before anything ran. Raises RuntimeError when a transfer
    failed or moved wrong bytes.
    """
    target = TARGETS.get(case.page_bytes) if case.integrity == "off" else None
    bench = Bench(case.page_bytes, case.num_threads, case.integrity, total_bytes)
    try:
        bench.check()
        for direction in Direction:
            ours_s, plain_s, least_s, wall, cpu = bench.measure(direction, num_rounds)
            yield Speed(
                direction.value,
                case.page_bytes,
                case.num_threads,
                case.integrity,
                bench.num_bytes / ours_s / 1e9,
                bench.num_bytes / plain_s / 1e9,
                bench.num_bytes / least_s / 1e9,
                wall,
                cpu,
                target,
                judged_by,
            )
    finally:
        bench.close()


def cases(
    page_sizes: Sequence[int], threads: Sequence[int], integrities: Sequence[Integrity]
) -> list[Case]:
    """All combinations."""
    return [Case(p, t, i) for p in page_sizes for t in threads for i in integrities]

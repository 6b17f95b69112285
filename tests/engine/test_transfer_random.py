"""Over 10,000 random submits, polls, flushes and steps on the CPU device, with failures and delays.

The test plays the scheduler: it gives no block and no slot to two jobs at once, except that it
writes a block whose store is in flight after it has flushed that store.
"""

import threading

import numpy as np
import torch
from kvferry.engine.messages import JobReport
from kvferry.engine.types import Direction, JobId
from worker_rig import WAIT_S, Clock, HeldDevice, Rig

NUM_OPERATIONS = 14_000  # three in four are submits, polls, flushes and steps
NUM_BLOCKS = 24
NUM_SLOTS = 24
HELD, FAILING = 0.05, 0.1


class Scheduler:
    """What is known of blocks, slots and jobs; a value stands for a block's bytes."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig = rig
        self.random = np.random.default_rng(seed)
        self.blocks: list[int | None] = [None] * NUM_BLOCKS
        self.slots: list[int | None] = [None] * NUM_SLOTS
        self.busy_blocks: dict[int, JobId] = {}
        self.busy_slots: set[int] = set()
        self.jobs: dict[JobId, tuple[Direction, list[int], list[int], list[int | None]]] = {}
        self.given_up: set[JobId] = set()
        self.num_reported: dict[JobId, int] = {}
        self.num_failed = self.num_good = 0
        self.last_value = 0
        self.last_job = 0

    def some(self, among: list[int], most: int) -> list[int]:
        count = min(len(among), int(self.random.integers(1, most + 1)))
        return [int(one) for one in self.random.choice(among, count, replace=False)]

    def compute(self) -> None:
        """A forward writes a block; one with a store in flight only behind a flush."""
        block = int(self.random.integers(NUM_BLOCKS))
        job = self.busy_blocks.get(block)
        if job is not None:
            if self.jobs[job][0] is Direction.LOAD or job in self.given_up:
                return
            self.rig.device.open_all()  # any held job may have the thread that this one needs
            self.rig.engine.flush([job])
        self.last_value += 1
        self.blocks[block] = self.last_value
        self.rig.fill(block, self.last_value)

    def submit(self) -> None:
        direction = Direction.STORE if self.random.random() < 0.6 else Direction.LOAD
        free = [block for block in range(NUM_BLOCKS) if block not in self.busy_blocks]
        full = direction is Direction.LOAD
        places = [
            slot
            for slot in range(NUM_SLOTS)
            if slot not in self.busy_slots and (not full or self.slots[slot] is not None)
        ]
        if direction is Direction.STORE:
            free = [block for block in free if self.blocks[block] is not None]
        if not free or not places:
            return
        blocks = self.some(free, 6)
        slots = self.some(places, 6)
        count = min(len(blocks), len(slots))
        blocks, slots = blocks[:count], slots[:count]
        self.last_job += 1
        job = JobId(self.last_job)
        device = self.rig.device
        if self.random.random() < HELD:
            device.hold(job)
        if self.random.random() < FAILING:
            device.failing.add(job)
        values = [self.blocks[block] for block in blocks]
        if direction is Direction.LOAD:
            values = [self.slots[slot] for slot in slots]
        else:
            for slot in slots:
                self.slots[slot] = None
        self.jobs[job] = (direction, blocks, slots, values)
        self.busy_blocks.update(dict.fromkeys(blocks, job))
        self.busy_slots.update(slots)
        flag = bool(self.random.random() < 0.4)
        name = "deferred" if direction is Direction.STORE else "expedited"
        self.rig.engine.submit(self.rig.order(job, direction, blocks, slots), **{name: flag})

    def open_gate(self, job: JobId) -> None:
        if job in self.rig.device.gates:
            self.rig.device.release(job)

    def open_some_gates(self) -> None:
        for job in self.some(list(self.rig.device.gates), 4) if self.rig.device.gates else []:
            self.open_gate(JobId(job))

    def flush(self) -> None:
        jobs = self.some(list(self.jobs), 3) if self.jobs else []
        self.rig.device.open_all()
        self.rig.engine.flush([*map(JobId, jobs), JobId(10**9)])

    def poll(self) -> None:
        for report in self.rig.engine.poll():
            self.take(report)

    def take(self, report: JobReport) -> None:
        job = report.job_id
        self.num_reported[job] = self.num_reported.get(job, 0) + 1
        direction, blocks, slots, values = self.jobs[job]
        assert report.direction is direction
        if not report.settled:
            assert report.error is not None
            assert job not in self.given_up
            self.given_up.add(job)
            return
        del self.jobs[job]
        for block, slot, value in zip(blocks, slots, values, strict=True):
            del self.busy_blocks[block]
            self.busy_slots.discard(slot)
            if report.error is None and direction is Direction.STORE:
                self.slots[slot] = value
            if direction is Direction.LOAD:
                self.blocks[block] = value if report.error is None else None
                if report.error is None:
                    self.check(block, value)
        if report.error is None:
            self.num_good += 1
            assert job not in self.rig.device.failing
            assert report.num_bytes == len(blocks) * self.rig.layout.groups[0].block_bytes
        else:
            self.num_failed += 1
            # A late job that the device has let go of at once is never given up.
            late = report.error.startswith("TransferTimeout")
            assert job in self.rig.device.failing or job in self.given_up or late, report.error
        self.rig.device.gates.pop(job, None)

    def check(self, block: int, value: int | None) -> None:
        """The block's bytes are those that ``fill`` writes for this value."""
        assert value is not None
        found = [cache[block].clone() for cache in self.rig.caches]
        self.rig.fill(block, value)
        for cache, bytes_found in zip(self.rig.caches, found, strict=True):
            assert torch.equal(cache[block], bytes_found)


def test_every_job_ends_once_with_the_right_bytes() -> None:
    seed = 20261130
    print("seed", seed)
    num_threads = threading.active_count()
    device, clock = HeldDevice(), Clock()
    rig = Rig(
        device,
        sizes=(2, NUM_BLOCKS, 1, 4, 24),
        num_slots=NUM_SLOTS,
        clock=clock,
        deadline_s=40.0,
        max_failures=10**6,
        slice_bytes=400,
        integrity="full",
    )
    with rig:
        world = Scheduler(rig, seed)
        actions = [
            (0.45, world.submit),
            (0.2, world.compute),
            (0.2, world.poll),
            (0.05, world.flush),
            (0.05, rig.engine.begin_step),
            (0.05, world.open_some_gates),
        ]
        choices = world.random.choice(
            len(actions), NUM_OPERATIONS, p=[share for share, _ in actions]
        )
        assert np.isin(choices, [0, 2, 3, 4]).sum() > 10_000, "too few that the engine sees"
        for choice in choices:
            clock.now_s += float(world.random.random() < 0.02) * 40.0
            actions[choice][1]()
        device.open_all()
        for report in rig.engine.drain(WAIT_S):
            world.take(report)
        print(world.num_good, "good", world.num_failed, "failed", len(world.given_up), "given up")
        assert not world.jobs
        for job in range(1, world.last_job + 1):
            assert world.num_reported[JobId(job)] == 1 + (JobId(job) in world.given_up)
        assert world.num_good > 500
        assert world.num_failed > 50
        assert world.given_up
        counts = rig.engine.snapshot()
        assert counts["jobs"] == counts["queued"] == counts["store_bytes_in_flight"] == 0
        assert counts["given_up"] == counts["skipped_jobs"] == counts["corrupt_chunks"] == 0
        assert not device._queue
    rig.engine.close()
    assert threading.active_count() == num_threads
    assert rig.engine.poll() == []

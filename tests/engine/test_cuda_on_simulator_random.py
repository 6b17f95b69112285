"""Thousands of random submits, polls and flushes with failures, delays and missed deadlines.

A model in plain Python knows what each block and slot must hold. Blocks and slots are used again as
early as the rules allow: a slot once every job on it is settled, a block once its loads are settled
and its stores are flushed.
"""

import gc
import logging
import random

import pytest
from kvferry.engine.devices.simulation import RandomChooser, Simulation
from kvferry.engine.strategy import Method, Strategy
from kvferry.engine.transfer import TransferOptions
from kvferry.engine.types import Direction

NUM_ACTIONS = 16_000  # over both seeds; more than 10,000 are submits, polls and flushes
METHODS = [Method.ZERO_COPY, Method.PACKED, Method.COPY_ENGINE]


class RandomStrategies:
    """Any method for any piece."""

    def __init__(self, rng):
        self._rng = rng

    def choose(self, *_):
        return Strategy(self._rng.choice(METHODS))


class Drive:
    """Random actions and the model beside them."""

    def __init__(self, make_rig, seed):
        self.rng = random.Random(seed)
        self.rig = make_rig(
            simulation=Simulation(RandomChooser(seed, eagerness=0.7)),
            num_blocks=24,
            num_slots=12,
            staging_blocks=2,
            give_way_s=0.02,
            strategies=RandomStrategies(self.rng),
            options=TransferOptions(integrity="full", deadline_s=0.02, max_failures=10**9),
        )
        self.content = dict.fromkeys(range(24), 0)  # of a block; None: anything
        self.kept = {}  # of a slot whose store is settled and good
        self.jobs = {}  # job id -> direction, blocks, slots, values
        self.next_job = 0
        self.unsettled = set()
        self.wrong_reads = []
        self.failing = False
        self.count = {"failed": 0, "timeouts": 0, "good loads": 0, "submits": 0}
        self.gate = None
        self.rig.runtime.refuse_when(
            lambda name: self.failing and self.rng.random() < 0.01,
            lambda: OSError("refused"),
            times=10**9,
        )
        self.hold_some()

    def act(self):
        action = self.rng.choices(
            (self.store, self.load, self.write, self.read, self.flush, self.poll, self.step),
            (5, 5, 3, 2, 2, 8, 4),
        )[0]
        action()

    def store(self):
        slots = self.free_slots()
        blocks = [b for b, value in self.content.items() if value is not None]
        blocks = [b for b in blocks if not self.jobs_on(b, Direction.LOAD)]
        num_chunks = min(self.rng.randint(1, 3), len(slots), len(blocks) // 2)
        if not num_chunks:
            return
        slots = self.rng.sample(slots, num_chunks)
        blocks = self.rng.sample(blocks, 2 * num_chunks)
        for slot in slots:
            self.kept.pop(slot, None)
        values = [self.content[b] for b in blocks]
        job = self.new_job(Direction.STORE, blocks, slots, values)
        self.may_fail(self.rig.store, job, blocks, slots, deferred=self.rng.random() < 0.5)

    def load(self):
        writing = {s for j in self.jobs.values() if j[0] is Direction.STORE for s in j[2]}
        slots = [s for s in self.kept if s not in writing]
        blocks = [b for b in self.content if not self.jobs_on(b, Direction.LOAD)]
        num_chunks = min(self.rng.randint(1, 2), len(slots), len(blocks) // 2)
        if not num_chunks:
            return
        slots = self.rng.sample(slots, num_chunks)
        blocks = self.rng.sample(blocks, 2 * num_chunks)
        self.fence(blocks)
        self.rig.engine.mark_loads()
        values = [value for slot in slots for value in self.kept[slot]]
        job = self.new_job(Direction.LOAD, blocks, slots, values)
        for block in blocks:
            self.content[block] = None
        self.may_fail(self.rig.load, job, blocks, slots, expedited=self.rng.random() < 0.2)

    def write(self):
        """A forward fills a block."""
        blocks = [b for b in self.content if not self.jobs_on(b, Direction.LOAD)]
        if not blocks:
            return
        block, value = self.rng.choice(blocks), self.rng.randrange(250)
        self.fence([block])
        self.content[block] = value
        self.rig.simulation.queue(
            "compute",
            f"write block {block}",
            writes=self.rig.cache.ranges([block]),
            action=lambda: self.rig.fill([block], [value]),
        )

    def read(self):
        """A forward reads a block and finds what belongs there."""
        known = [b for b, value in self.content.items() if value is not None]
        if not known:
            return
        block = self.rng.choice(known)
        value = self.content[block]

        def look():
            found = self.rig.values([block])
            if found != [value]:
                self.wrong_reads.append((block, found, value))

        self.rig.simulation.queue(
            "compute", f"read block {block}", reads=self.rig.cache.ranges([block]), action=look
        )

    def fence(self, blocks):
        self.rig.flush(*{job for b in blocks for job in self.jobs_on(b, Direction.STORE)})

    def flush(self):
        known = [*self.jobs, 0, 1, 10**9]
        stores = [j for j in known if self.jobs.get(j, (Direction.STORE,))[0] is Direction.STORE]
        self.rig.flush(*self.rng.sample(stores, min(2, len(stores))))

    def step(self):
        self.may_fail(self.rig.engine.begin_step)
        if self.rng.random() < 0.15:
            self.gate.open()
            self.hold_some()

    def poll(self):
        reports = []
        self.may_fail(lambda: reports.extend(self.rig.poll()))
        for report in reports:
            job_id = int(report.job_id)
            if not report.settled:
                assert job_id not in self.unsettled, "given up twice"
                self.unsettled.add(job_id)
                self.count["timeouts"] += 1
                continue
            direction, blocks, slots, values = self.jobs.pop(job_id)
            assert report.error or job_id not in self.unsettled
            self.count["failed"] += report.error is not None
            if report.error:
                continue
            if direction is Direction.STORE:
                for index, slot in enumerate(slots):
                    self.kept[slot] = values[2 * index : 2 * index + 2]
                    assert self.rig.slot(slot)[:, 0].tolist() == self.kept[slot]
            else:
                self.count["good loads"] += 1
                assert self.rig.values(blocks) == values
                self.content.update(zip(blocks, values, strict=True))

    def hold_some(self):
        self.gate = self.rig.simulation.hold_when(
            lambda operation: (
                self.rng.random() < 0.01 and operation.stream.startswith(("loads", "stores"))
            )
        )
        self.rig.simulation.fail_when(
            lambda operation: (
                operation.stream.startswith(("loads", "stores", "expedited"))
                and self.rng.random() < 0.05
            ),
            lambda: OSError("failed as it ran"),
        )

    def check_races(self):
        """A store that was given up may read what is overwritten: its slot is not offered."""
        races, self.rig.simulation.races = self.rig.simulation.races, []
        for race in races:
            kind, job = race.first.name.split()[-2:]
            assert kind == "store", str(race)
            assert int(job) in self.unsettled, str(race)
            assert race.second.writes.overlap(self.rig.cache.ranges(list(range(24)))), str(race)

    def new_job(self, direction, blocks, slots, values):
        self.next_job += 1
        self.count["submits"] += 1
        self.jobs[self.next_job] = (direction, blocks, slots, values)
        return self.next_job

    def may_fail(self, call, *arguments, **flags):
        self.failing = True
        try:
            call(*arguments, **flags)
        finally:
            self.failing = False

    def free_slots(self):
        used = {slot for job in self.jobs.values() for slot in job[2]}
        return [slot for slot in range(12) if slot not in used]

    def jobs_on(self, block, direction):
        return [job for job, j in self.jobs.items() if j[0] is direction and block in j[1]]


@pytest.mark.parametrize("seed", [11, 12])
def test_random_work_ends_once_with_the_right_bytes_and_leaves_nothing(make_rig, seed, caplog):
    caplog.set_level(logging.CRITICAL)  # records keep tracebacks, and those keep marks
    print(f"seed {seed}")
    drive = Drive(make_rig, seed)
    for _ in range(NUM_ACTIONS // 2):
        drive.act()
        drive.check_races()
    drive.gate.open()
    drive.rig.engine.begin_step()
    drive.rig.simulation.run_all()
    for _ in range(3):
        drive.poll()
    assert not drive.jobs
    assert not drive.wrong_reads
    settled = [int(report.job_id) for report in drive.rig.reports if report.settled]
    assert sorted(settled) == list(range(1, drive.next_job + 1))
    print(drive.count)
    assert min(drive.count.values()) > 10, drive.count
    drive.rig.engine.snapshot()
    gc.collect()
    assert drive.rig.device.num_taken <= 1, "only the mark that the engine keeps is out"
    drive.rig.engine.close()
    drive.rig.engine.close()
    assert drive.rig.device.num_taken <= 1
    assert not drive.rig.runtime.registered
    assert not drive.rig.simulation.unfinished()

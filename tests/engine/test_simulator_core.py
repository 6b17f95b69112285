"""The simulation itself: what is an edge, what is a race, which orders run, what never finishes."""

import ctypes
import itertools

import numpy as np
import pytest
import torch
from kvferry.engine.devices.byte_ranges import NOTHING, ByteRanges
from kvferry.engine.devices.exploration import explore
from kvferry.engine.devices.simulation import (
    Operation,
    RaceError,
    RandomChooser,
    Simulation,
    StuckError,
)


class Memory:
    """Bytes that simulated operations write."""

    def __init__(self, num_bytes: int = 64) -> None:
        self.bytes = torch.zeros(num_bytes, dtype=torch.uint8)

    def ranges(self, start: int = 0, size: int | None = None) -> ByteRanges:
        size = self.bytes.numel() - start if size is None else size
        return ByteRanges.of(self.bytes.data_ptr() + start, size)

    def fill(self, value: int, start: int = 0, size: int | None = None):
        size = self.bytes.numel() - start if size is None else size

        def action() -> None:
            ctypes.memset(self.bytes.data_ptr() + start, value, size)

        return action


def write(simulation, stream, memory, value, start=0, size=None, after=()) -> Operation:
    return simulation.queue(
        stream,
        f"write {value}",
        writes=memory.ranges(start, size),
        action=memory.fill(value, start, size),
        after=after,
    )


def nothing() -> None:
    """An action without an effect."""


def test_byte_ranges_against_sets():
    generator = np.random.default_rng(7)
    for _ in range(300):
        sets, ranges = [], []
        for _ in range(2):
            count = int(generator.integers(0, 6))
            starts = generator.integers(0, 60, count)
            sizes = generator.integers(0, 9, count)
            ranges.append(ByteRanges.of(starts, sizes))
            sets.append({b for s, n in zip(starts, sizes, strict=True) for b in range(s, s + n)})
        shared = ranges[0].overlap(ranges[1])
        assert (shared is not None) == bool(sets[0] & sets[1]), "seed 7"
        if shared:
            assert set(range(*shared)) <= sets[0] & sets[1]
            assert shared[0] == min(sets[0] & sets[1])
        assert ranges[0].covers(ranges[1]) == (sets[1] <= sets[0])
        assert ranges[0].union(ranges[1]).num_bytes == len(sets[0] | sets[1])


def test_byte_ranges_refuse_bad_input():
    with pytest.raises(ValueError, match="allowed: 0 and more"):
        ByteRanges.of([0], [-1])
    with pytest.raises(ValueError, match="contiguous"):
        ByteRanges.of_tensor(torch.zeros(4, 4)[:, :2])


def test_a_stream_orders_and_two_streams_do_not():
    memory = Memory()
    simulation = Simulation(RandomChooser(0))
    write(simulation, "a", memory, 1)
    write(simulation, "a", memory, 2)
    assert not simulation.races
    write(simulation, "b", memory, 3, start=60)
    (first, second) = simulation.races
    assert "'write 1' on a writes and 'write 3' on b writes" in str(first)
    assert "missing edge: 'write 2' on a -> 'write 3' on b" in str(second)
    assert (second.end - second.start) == 4
    with pytest.raises(RaceError, match="missing edge"):
        simulation.check()


def test_edges_reach_through_other_operations():
    memory = Memory()
    simulation = Simulation(RandomChooser(0))
    first = write(simulation, "a", memory, 1)
    marker = simulation.queue("b", "wait", after=(first,))
    write(simulation, "c", memory, 2, after=(marker,))
    simulation.run_all()
    simulation.check()
    assert memory.bytes.unique().tolist() == [2]


def test_readers_do_not_race_with_readers_but_with_a_writer():
    memory = Memory()
    simulation = Simulation(RandomChooser(0))
    for stream in "ab":
        simulation.queue(stream, "read", reads=memory.ranges(), action=nothing)
    assert not simulation.races
    write(simulation, "c", memory, 1, start=5, size=1)
    assert len(simulation.races) == 2


def test_neighbouring_bytes_do_not_race():
    memory = Memory()
    simulation = Simulation(RandomChooser(0))
    write(simulation, "a", memory, 1, start=0, size=32)
    write(simulation, "b", memory, 2, start=32, size=32)
    assert not simulation.races


@pytest.mark.parametrize("seed", range(5))
def test_what_the_host_has_seen_complete_is_an_edge(seed):
    memory = Memory()
    simulation = Simulation(RandomChooser(seed))
    first = write(simulation, "a", memory, 1)
    simulation.wait(first)
    write(simulation, "b", memory, 2)
    assert not simulation.races
    simulation.touch_from_host("look", reads=memory.ranges())
    assert len(simulation.races) == 1


def test_what_ran_but_was_not_seen_is_no_edge():
    memory = Memory()
    simulation = Simulation(RandomChooser(0))
    write(simulation, "a", memory, 1)
    other = simulation.queue("b", "other", action=nothing)
    simulation.wait(other)
    while simulation.unfinished():
        simulation.look(simulation.queue("b", "other", action=nothing))
    write(simulation, "c", memory, 2)
    assert len(simulation.races) == 1


def test_held_work_is_named_and_goes_on_once_released():
    memory = Memory()
    simulation = Simulation(RandomChooser(0))
    gate = simulation.hold_when(lambda operation: operation.name == "write 1")
    first = write(simulation, "a", memory, 1)
    second = write(simulation, "b", memory, 2, after=(first,))
    assert not simulation.look(second)
    with pytest.raises(StuckError, match="'write 1' on a is held back; 'write 2' on b waits"):
        simulation.wait(second)
    with pytest.raises(StuckError, match="can never finish"):
        simulation.run_all()
    gate.open()
    simulation.wait(second)
    assert memory.bytes.unique().tolist() == [2]


def test_a_failed_operation_spoils_its_destination():
    memory = Memory()
    simulation = Simulation(RandomChooser(0))
    simulation.fail_when(lambda operation: True, lambda: OSError("bus"))
    failed = write(simulation, "a", memory, 1, size=32)
    good = write(simulation, "a", memory, 2, start=32)
    simulation.run_all()
    assert isinstance(failed.failure, OSError)
    assert good.failure is None
    assert memory.bytes[:32].unique().tolist() == [0xDD]
    assert memory.bytes[32:].unique().tolist() == [2]


def test_exploring_a_race_shows_both_outcomes():
    outcomes = set()

    def program(simulation):
        memory = Memory()
        write(simulation, "a", memory, 1)
        write(simulation, "b", memory, 2)
        return lambda: outcomes.add(int(memory.bytes[0]))

    found = explore(program)
    assert outcomes == {1, 2}
    assert found.num_orders == 2
    assert found.races


def test_exploring_skips_orders_that_are_the_same():
    def program(simulation):
        for stream in range(5):
            for value in range(3):
                write(simulation, str(stream), Memory(), value)

    found = explore(program)
    assert found.num_orders == 1
    assert not found.races


def test_exploring_finds_every_distinct_order_of_conflicting_operations():
    """Against brute force: each write appends its value; two writers commute with the third."""
    results = set()

    def program(simulation):
        shared, apart = Memory(8), Memory(8)
        log: list[int] = []
        for value in range(3):
            simulation.queue(
                f"s{value}",
                f"append {value}",
                writes=shared.ranges(),
                action=lambda value=value: log.append(value),
            )
        simulation.queue("t", "apart", writes=apart.ranges(), action=nothing)
        return lambda: results.add(tuple(log))

    found = explore(program)
    assert results == set(itertools.permutations(range(3)))
    assert found.num_orders == 6


class EveryChoice:
    """Steers a program through all choices there are, with no reduction: the brute force."""

    def __init__(self):
        self.path = []  # [options, taken] of each choice
        self.depth = 0

    def _choose(self, options):
        if self.depth == len(self.path):
            self.path.append([len(options), 0])
        taken = self.path[self.depth][1]
        self.depth += 1
        return options[taken]

    def pick(self, ready):
        return self._choose(list(ready))

    def pick_or_look(self, ready, looked_at):
        return self._choose([None, *ready])

    def next(self):
        while self.path and self.path[-1][1] + 1 == self.path[-1][0]:
            self.path.pop()
        if self.path:
            self.path[-1][1] += 1
        self.depth = 0
        return bool(self.path)


@pytest.mark.parametrize("seed", range(12))
def test_reduction_loses_no_outcome(seed):
    """Random small programs: what they end with, and what the host sees, against brute force."""
    print(f"seed {seed}")
    plan = np.random.default_rng(seed)
    operations = [
        (f"s{plan.integers(3)}", int(plan.integers(4)), bool(plan.integers(2))) for _ in range(6)
    ]
    waits = {int(late): int(plan.integers(late)) for late in plan.integers(1, 6, 2)}
    looks = sorted(int(number) for number in plan.integers(0, 6, 2))
    outcomes = []

    def program(simulation):
        memory = Memory(4)
        nodes, seen = [], []
        for index, (stream, byte, reads) in enumerate(operations):
            if reads:
                log = [None]

                def action(byte=byte, log=log):
                    log[0] = int(memory.bytes[byte])

                seen.append(log)
                access = {"reads": memory.ranges(byte, 1)}
            else:
                action, access = memory.fill(index + 1, byte, 1), {"writes": memory.ranges(byte, 1)}
            after = (nodes[waits[index]],) if index in waits else ()
            nodes.append(simulation.queue(stream, str(index), action=action, after=after, **access))
        answers = [simulation.look(nodes[number]) for number in looks]
        return lambda: outcomes.append((tuple(memory.bytes.tolist()), str(seen), str(answers)))

    explore(program)
    reduced, outcomes = outcomes, []
    chooser = EveryChoice()
    num_runs = 0
    while True:
        simulation = Simulation(chooser)
        check = program(simulation)
        simulation.run_all()
        check()
        num_runs += 1
        if num_runs == 20_000 or not chooser.next():
            break
    assert set(reduced) >= set(outcomes)
    assert num_runs == 20_000 or set(reduced) == set(outcomes)
    assert len(reduced) <= num_runs


def test_exploring_shows_a_look_both_answers():
    answers = set()

    def program(simulation):
        first = write(simulation, "a", Memory(), 1)
        write(simulation, "b", Memory(), 2)
        looks = (simulation.look(first), simulation.look(first))
        answers.add(looks)

    found = explore(program)
    assert answers == {(False, False), (False, True), (True, True)}
    assert found.num_orders == 3


def test_exploring_refuses_a_program_that_is_too_large():
    def program(simulation):
        memory = Memory()
        for stream in range(6):
            write(simulation, str(stream), memory, stream)

    with pytest.raises(ValueError, match="more than 50 orders"):
        explore(program, max_runs=50)


def test_nothing_is_empty():
    assert not NOTHING
    assert NOTHING.overlap(ByteRanges.of(0, 5)) is None
    assert ByteRanges.of(0, 5).covers(NOTHING)
    assert not NOTHING.covers(ByteRanges.of(0, 5))

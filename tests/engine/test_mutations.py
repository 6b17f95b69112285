"""Every edge that the device makes is missed when it is gone (the list is in ``docs/ordering.md``).

A mutation wraps the runtime and leaves out one kind of edge. The same steps run with and without
it: without, no race; with it, a race between the two operations that the edge is there for.
"""

from dataclasses import dataclass
from typing import ClassVar

import pytest
from kvferry.engine.devices.simulated_worker import Step
from kvferry.engine.strategy import Method
from simulator_rig import StepHooks

METHODS = [Method.ZERO_COPY, Method.PACKED, Method.COPY_ENGINE]
PACKED = [Method.PACKED]


class Mutant:
    """A runtime that passes everything on."""

    def __init__(self, runtime):
        self._runtime = runtime

    def __getattr__(self, name):
        return getattr(self._runtime, name)


def role(name):
    """``stores:copies#3`` -> ``stores:copies``."""
    return name.partition("#")[0]


class NoWait(Mutant):
    """Leaves out the waits of streams whose role begins with ``waiting`` for ``awaited`` ones."""

    waiting: ClassVar[str]
    awaited: ClassVar[str]

    def wait(self, stream, event):
        late = role(stream.name).startswith(self.waiting)
        if not (late and role(event.operation.stream).startswith(self.awaited)):
            self._runtime.wait(stream, event)


class DoneAtOnce(Mutant):
    """Takes every piece of a lane for done as soon as it is queued."""

    lane: ClassVar[str]

    def is_done(self, event):
        return event.operation.stream.startswith(self.lane) or self._runtime.is_done(event)

    def elapsed_s(self, start, end):
        return 0.0


class EndOnTheFirstStream(Mutant):
    """Records the end of a packed piece where it began, not where its last operation is."""

    lane: ClassVar[str]
    first: ClassVar[str]
    last: ClassVar[str]

    def __init__(self, runtime):
        super().__init__(runtime)
        self._streams = {}

    def create_stream(self, name, priority):
        stream = self._streams[name] = self._runtime.create_stream(name, priority)
        return stream

    def record(self, event, stream):
        if event.timed and role(stream.name) == f"{self.lane}:{self.last}":
            stream = self._streams[f"{self.lane}:{self.first}"]
        self._runtime.record(event, stream)


def no_wait(late, early):
    return type("NoWait", (NoWait,), {"waiting": late, "awaited": early})


def done_at_once(lane_name):
    return type("DoneAtOnce", (DoneAtOnce,), {"lane": lane_name})


def end_early(lane_name, early, late):
    fields = {"lane": lane_name, "first": early, "last": late}
    return type("EndOnTheFirstStream", (EndOnTheFirstStream,), fields)


@dataclass(frozen=True)
class Edge:
    """An edge, the mutation without it, and a race that must then be found.

    ``first`` and ``second`` are the beginnings of the names of the two operations.
    """

    name: str
    mutation: type
    methods: list[Method]
    first: tuple[str, ...]
    second: tuple[str, ...]


MOVES_OUT = ("store store", "pack store", "copy store")
MOVES_IN = ("load load", "unpack load", "copy load")
EDGES = [
    Edge("store after compute", no_wait("stores", "compute"), METHODS, ("forward",), MOVES_OUT),
    Edge("load after readers", no_wait("loads", "compute"), METHODS, ("forward",), MOVES_IN),
    Edge("load after zeroing", no_wait("loads", "compute"), METHODS, ("zero",), MOVES_IN),
    Edge("flush before reuse", no_wait("compute", "stores"), METHODS, MOVES_OUT, ("zero",)),
    Edge("forward after sync load", no_wait("compute", "loads"), METHODS, MOVES_IN, ("forward",)),
    Edge("load after its store", done_at_once("stores"), METHODS, MOVES_OUT, MOVES_IN),
    Edge("slot reuse after load", done_at_once("loads"), METHODS, MOVES_IN, MOVES_OUT),
    Edge("reader after load", done_at_once("loads"), METHODS, MOVES_IN, ("forward",)),
    Edge(
        "descriptors of a store after completion",
        done_at_once("stores"),
        [Method.ZERO_COPY, Method.PACKED],
        MOVES_OUT,
        ("write",),
    ),
    Edge(
        "descriptors of a load after completion",
        done_at_once("loads"),
        [Method.ZERO_COPY, Method.PACKED],
        MOVES_IN,
        ("write",),
    ),
    Edge(
        "flags after completion",
        done_at_once("loads"),
        METHODS,
        ("load load", "unpack load", "verify load"),
        ("read",),
    ),
    Edge(
        "staging of a store filled again once emptied",
        no_wait("stores:kernels", "stores:copies"),
        PACKED,
        ("copy store",),
        ("pack store",),
    ),
    Edge(
        "staging of a load filled again once emptied",
        no_wait("loads:copies", "loads:kernels"),
        PACKED,
        ("unpack load",),
        ("copy load",),
    ),
    Edge(
        "copy after pack",
        no_wait("stores:copies", "stores:kernels"),
        PACKED,
        ("pack store",),
        ("copy store",),
    ),
    Edge(
        "unpack after copy",
        no_wait("loads:kernels", "loads:copies"),
        PACKED,
        ("copy load",),
        ("unpack load",),
    ),
    Edge(
        "end of a packed store on its last stream",
        end_early("stores", "kernels", "copies"),
        PACKED,
        ("copy store",),
        ("copy load",),
    ),
    Edge(
        "end of a packed load on its last stream",
        end_early("loads", "copies", "kernels"),
        PACKED,
        ("unpack load",),
        ("forward",),
    ),
]
CASES = [
    pytest.param(edge, method, id=f"{edge.name}-{method}".replace(" ", "_"))
    for edge in EDGES
    for method in edge.methods
]


class SyncLoads(StepHooks):
    """The forward of the step needs its loads."""

    def start_load_kv(self):
        super().start_load_kv()
        self.rig.flush(*(load[0] for load in self.loads))


def run_until(rig, job_id):
    """Empty steps until a job is reported."""
    for _ in range(1000):
        if job_id in rig.errors():
            return
        rig.worker.run(Step(forward=False), StepHooks(rig))
    raise AssertionError(f"job {job_id} was never reported")


def all_edges(rig):
    """Steps in which every edge of the list is needed, by blocks, slots or buffers used again."""
    source, target = [0, 1, 2, 3], [8, 9, 10, 11]
    slots = [0, 1]
    run = rig.worker.run
    written = dict.fromkeys(source, 10)
    run(Step(written=written, read=target), StepHooks(rig, stores=[(1, source, slots)]))
    again = dict.fromkeys(source, 20)
    run(Step(zeroed=source, written=again, read=target), StepHooks(rig, flush=[1]))
    run_until(rig, 1)
    # Nothing but its report says that the store is complete: the load goes by that.
    run(Step(read=target), StepHooks(rig, stores=[(2, source, [2, 3])]))
    run(Step(zeroed=[8, 9]), StepHooks(rig, loads=[(3, target, slots)]))
    run_until(rig, 2)
    run(Step(), StepHooks(rig, loads=[(4, [12, 13, 14, 15], [2, 3])]))
    run_until(rig, 3)
    run(Step(read=target), StepHooks(rig, stores=[(5, [4, 5, 6, 7], slots)], deferred=False))
    run_until(rig, 4)
    run_until(rig, 5)
    run(
        Step(read=target, sync_loads=True),
        SyncLoads(rig, loads=[(6, target, slots)]),
    )
    for _ in range(3):
        run(Step(forward=False), StepHooks(rig))
    rig.worker.wait_for_output()
    rig.simulation.run_all()
    rig.poll()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(10))
def test_with_all_edges_there_is_no_race(make_rig, method, seed):
    rig = make_rig(seed, method=method, staging_blocks=1)
    all_edges(rig)
    rig.simulation.check()
    assert set(rig.errors().values()) == {None}
    assert rig.values([8, 9, 10, 11]) == [0, 0, 0, 0]
    assert rig.values([12, 13]) == [20, 20]


@pytest.mark.parametrize(("edge", "method"), CASES)
def test_without_an_edge_the_race_is_found(make_rig, edge, method):
    """Ten seeds at the most: what the host sees complete can order two operations by chance."""
    for seed in range(10):
        rig = make_rig(seed, method=method, staging_blocks=1, mutate=edge.mutation)
        all_edges(rig)
        for race in rig.simulation.races:
            if race.first.name.startswith(edge.first) and race.second.name.startswith(edge.second):
                assert "missing edge" in str(race)
                return
    found = {f"{race.first} -> {race.second}" for race in rig.simulation.races}
    raise AssertionError(f"not found without '{edge.name}'; found: {sorted(found)}")


def test_after_a_failure_both_streams_belong_to_the_end(make_rig):
    """A piece that failed half-way ends when all of it that was queued has run."""
    for mutation, is_safe in ((Mutant, True), (no_wait("stores:copies", "stores"), False)):
        rig = make_rig(method=Method.PACKED, staging_blocks=1, mutate=mutation)
        packed = []

        def after_pack(name, packed=packed):
            packed.extend([name] if name.startswith("pack") else [])
            return name == "record" and bool(packed)

        rig.runtime.refuse_when(after_pack, lambda: OSError("no"))
        rig.store(1, [0, 1], [0])
        rig.flush(1)
        reused = rig.cache.ranges([0, 1])
        rig.simulation.queue("compute", "reuse", writes=reused, action=lambda: None)
        assert (not rig.simulation.races) == is_safe
        assert "OSError" in rig.finish()[1]


@pytest.mark.parametrize("method", METHODS)
def test_an_expedited_load_waits_for_compute_too(make_rig, method):
    """Its lane is one of its own, and needs the edges of the other loads."""
    for mutation, is_safe in ((Mutant, True), (no_wait("expedited", "compute"), False)):
        rig = make_rig(method=method, mutate=mutation)
        rig.store(1, [0, 1, 2, 3], [0, 1])
        rig.finish()
        rig.worker.run(Step(zeroed=[8, 9], read=[10, 11]), StepHooks(rig))
        rig.engine.mark_loads()
        rig.load(2, [8, 9], [0], expedited=True)
        rig.load(3, [10, 11], [1], expedited=True)
        firsts = {race.first.name.partition(" ")[0] for race in rig.simulation.races}
        assert firsts == (set() if is_safe else {"zero", "forward"})
        rig.simulation.races.clear()
        rig.finish()

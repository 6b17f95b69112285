"""Queued operations, ordered only by streams, events and the host; races are found and named.

Theory. An operation is a node. It comes after another only if there is a path of edges between
them, and there are three kinds of edges: the operation before it in its own stream, a wait on an
event (the event stands for what its stream held when it was recorded), and the host, which queues
operations in its program order and has seen others complete. Nothing else orders anything: that
an operation *usually* runs later is not an edge.

Two operations that touch the same byte, one of them writing, with no path between them are a race.
It is found when the second one is queued, from the edges alone, whatever order is then executed;
so one run finds every race of that run's program. Orders matter all the same, because the host
reacts to what it sees complete: the ``Chooser`` decides how far the device gets before each look.

An operation whose completion the host has seen is before everything queued from then on. It leaves
the set of live operations, which keeps that set as small as what is in flight.
"""

import ctypes
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .byte_ranges import NOTHING, ByteRanges


class StuckError(Exception):
    """The host waits for work that can never finish; the message names it and what holds it up."""


class RaceError(Exception):
    """Two operations touch the same bytes and nothing orders them; carries all the races."""


@dataclass(eq=False, slots=True)
class Operation:
    """One node. ``before`` holds the numbers of the live operations that come before it."""

    number: int
    name: str
    stream: str
    reads: ByteRanges
    writes: ByteRanges
    action: Callable[[], None] | None
    after: tuple["Operation", ...]
    before: frozenset[int]
    held: bool = False
    failure: Exception | None = None
    done: bool = False
    done_at: int = 0

    @property
    def is_marker(self) -> bool:
        """Orders only; touches nothing."""
        return self.action is None

    @property
    def ready(self) -> bool:
        return not self.held and all(other.done for other in self.after)

    def conflict(self, other: "Operation") -> tuple[int, int] | None:
        """The first bytes that both touch, one of them writing."""
        return (
            self.writes.overlap(other.writes)
            or self.writes.overlap(other.reads)
            or self.reads.overlap(other.writes)
        )

    def __str__(self) -> str:
        return f"'{self.name}' on {self.stream}"


@dataclass(frozen=True, slots=True)
class Race:
    """``second`` was queued after ``first``; they share the bytes ``start`` to ``end``."""

    first: Operation
    second: Operation
    start: int
    end: int

    def __str__(self) -> str:
        first = "writes" if self.first.writes.overlap(self._bytes) else "reads"
        second = "writes" if self.second.writes.overlap(self._bytes) else "reads"
        return (
            f"race: {self.first} {first} and {self.second} {second} the bytes "
            f"{self.start:#x} to {self.end:#x}; missing edge: {self.first} -> {self.second}"
        )

    @property
    def _bytes(self) -> ByteRanges:
        return ByteRanges.of(self.start, self.end - self.start)


class Chooser(Protocol):
    """Decides what runs next where the order is open."""

    def pick(self, ready: Sequence[Operation]) -> Operation:
        """The host waits: one of these must run."""
        ...

    def pick_or_look(self, ready: Sequence[Operation], looked_at: Operation) -> Operation | None:
        """The host is about to look whether ``looked_at`` is done: run one first, or None."""
        ...


class RandomChooser:
    """A seeded random order; the device gets ``eagerness`` (0 to 1) of the way before a look."""

    def __init__(self, seed: int, eagerness: float = 0.5) -> None:
        self._random = random.Random(seed)
        self._eagerness = eagerness

    def pick(self, ready: Sequence[Operation]) -> Operation:
        return self._random.choice(ready)

    def pick_or_look(self, ready: Sequence[Operation], looked_at: Operation) -> Operation | None:
        return self._random.choice(ready) if self._random.random() < self._eagerness else None


@dataclass(eq=False, slots=True)
class Gate:
    """Holds back the operations it matches, as they are queued, until it is opened."""

    matches: Callable[[Operation], bool]
    is_open: bool = False
    operations: list[Operation] = field(default_factory=list)

    def open(self) -> None:
        self.is_open = True
        for operation in self.operations:
            operation.held = False


@dataclass(eq=False, slots=True)
class Failing:
    """Lets the operations it matches fail as they run, at most ``times``."""

    matches: Callable[[Operation], bool]
    error: Callable[[], Exception]
    times: int


class Simulation:
    """The queues of one simulated device; see the module docstring. One thread."""

    def __init__(self, chooser: Chooser) -> None:
        self.races: list[Race] = []
        self.num_queued = 0
        self.num_run = 0
        self.ticks = 0
        """Rises with every operation that runs: the simulation's clock."""
        self._chooser = chooser
        self._queues: dict[str, deque[Operation]] = {}
        self._tails: dict[str, Operation] = {}
        self._live: dict[int, Operation] = {}
        self._gates: list[Gate] = []
        self._failing: list[Failing] = []

    def hold_when(self, matches: Callable[[Operation], bool]) -> Gate:
        """Delay what is queued from now on and matches; a gate never opened is work that hangs."""
        gate = Gate(matches)
        self._gates = [other for other in self._gates if not other.is_open] + [gate]
        return gate

    def fail_when(
        self, matches: Callable[[Operation], bool], error: Callable[[], Exception], times: int = 1
    ) -> Failing:
        """The next ``times`` operations that match fail: their destination becomes garbage."""
        failing = Failing(matches, error, times)
        self._failing = [other for other in self._failing if other.times > 0] + [failing]
        return failing

    def queue(
        self,
        stream: str,
        name: str,
        *,
        reads: ByteRanges = NOTHING,
        writes: ByteRanges = NOTHING,
        action: Callable[[], None] | None = None,
        after: Iterable[Operation] = (),
    ) -> Operation:
        """Append an operation to a stream; ``after`` are its further edges. No action: a marker."""
        tail = self._tails.get(stream)
        edges = tuple(after) if tail is None else (tail, *after)
        operation = self._node(stream, name, reads, writes, action, edges)
        for gate in self._gates:
            if not gate.is_open and gate.matches(operation):
                gate.operations.append(operation)
                operation.held = True
        self._look_for_races(operation)
        self._live[operation.number] = operation
        self._queues.setdefault(stream, deque()).append(operation)
        self._tails[stream] = operation
        self._run_markers()
        return operation

    def tail(self, stream: str) -> Operation | None:
        """What was queued last on a stream."""
        return self._tails.get(stream)

    def touch_from_host(
        self, name: str, *, reads: ByteRanges = NOTHING, writes: ByteRanges = NOTHING
    ) -> None:
        """The host itself reads or writes these bytes now: ordered by what it has seen complete."""
        self._look_for_races(self._node("the host", name, reads, writes, None, ()))

    def look(self, operation: Operation) -> bool:
        """The host asks whether an operation is done, without waiting."""
        while not operation.done and (ready := self._ready()):
            choice = self._chooser.pick_or_look(ready, operation)
            if choice is None:
                break
            self._run(choice)
        if operation.done:
            self._seen(operation)
        return operation.done

    def wait(self, operation: Operation) -> None:
        """The host waits. Raises ``StuckError`` when that would be for ever."""
        while not operation.done:
            if not (ready := self._ready()):
                raise StuckError(f"the host waits for {operation}; {self._why_stuck()}")
            self._run(self._chooser.pick(ready))
        self._seen(operation)

    def run_all(self) -> None:
        """Run whatever can run. Raises ``StuckError`` when something is left."""
        while ready := self._ready():
            self._run(self._chooser.pick(ready))
        if any(self._queues.values()):
            raise StuckError(self._why_stuck())
        for operation in list(self._live.values()):
            self._seen(operation)

    def check(self) -> None:
        """Raises ``RaceError`` when there was a race."""
        if self.races:
            raise RaceError("\n".join(str(race) for race in self.races))

    def unfinished(self) -> tuple[Operation, ...]:
        return tuple(operation for queue in self._queues.values() for operation in queue)

    def _node(
        self,
        stream: str,
        name: str,
        reads: ByteRanges,
        writes: ByteRanges,
        action: Callable[[], None] | None,
        edges: tuple[Operation, ...],
    ) -> Operation:
        before: set[int] = set()
        for edge in edges:
            before |= edge.before
            before.add(edge.number)
        before &= self._live.keys()
        number, self.num_queued = self.num_queued, self.num_queued + 1
        return Operation(number, name, stream, reads, writes, action, edges, frozenset(before))

    def _look_for_races(self, operation: Operation) -> None:
        for other in self._live.values():
            if other.number not in operation.before and (shared := operation.conflict(other)):
                self.races.append(Race(other, operation, *shared))

    def _seen(self, operation: Operation) -> None:
        """The host knows that this one, and so everything before it, is complete."""
        for number in (operation.number, *operation.before):
            self._live.pop(number, None)

    def _ready(self) -> list[Operation]:
        self._run_markers()  # a gate may have been opened since
        return [queue[0] for queue in self._queues.values() if queue and queue[0].ready]

    def _run(self, operation: Operation) -> None:
        self._queues[operation.stream].popleft()
        for failing in self._failing:
            if failing.times > 0 and operation.action and failing.matches(operation):
                failing.times -= 1
                operation.failure = failing.error()
        if operation.failure is not None:
            spoil(operation.writes)
        elif operation.action is not None:
            operation.action()
        self.ticks += 1
        self.num_run += 1
        self._finish(operation)
        self._run_markers()

    def _run_markers(self) -> None:
        """Markers take no time: an unfinished one could not be told from what it waits for."""
        progress = True
        while progress:
            progress = False
            for queue in self._queues.values():
                while queue and queue[0].is_marker and queue[0].ready:
                    self._finish(queue.popleft())
                    progress = True

    def _finish(self, operation: Operation) -> None:
        operation.done, operation.done_at = True, self.ticks
        operation.action, operation.after = None, ()

    def _why_stuck(self) -> str:
        reasons = []
        for queue in self._queues.values():
            if queue:
                waits = [str(other) for other in queue[0].after if not other.done]
                reason = "is held back" if queue[0].held else f"waits for {', '.join(waits)}"
                reasons.append(f"{queue[0]} {reason}")
        return "; ".join(reasons) + ": this can never finish"


def spoil(writes: ByteRanges) -> None:
    """Overwrite a destination: what a failed operation leaves is anything but the right bytes."""
    for start, end in zip(writes.starts.tolist(), writes.ends.tolist(), strict=True):
        ctypes.memset(start, 0xDD, end - start)

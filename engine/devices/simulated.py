"""The runtime protocol on the simulator: the same calls as on a GPU, in any order that they allow.

GPU memory is plain CPU memory here, and so is host memory; copies move real bytes and kernels run
as their PyTorch references, so a schedule that loses an edge shows twice: as a race, and sooner or
later as wrong bytes. What CUDA would punish raises here: a kernel that touches host memory that is
not pinned, a wait for an event that was never recorded, an error left behind by a failed call.
"""

import ctypes
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from .byte_ranges import NOTHING, ByteRanges
from .runtime import Copies, Event, KernelLaunch, Priority, Stream
from .simulation import Operation, Simulation, StuckError

SECONDS_PER_TICK = 1e-3


@dataclass(frozen=True, slots=True)
class SimulatedStream:
    name: str
    priority: Priority


@dataclass(eq=False, slots=True)
class SimulatedEvent:
    """``operation`` is the marker in its stream, once recorded."""

    timed: bool
    operation: Operation | None = None


@dataclass(eq=False, slots=True)
class Refusal:
    """Lets calls whose name matches raise, at most ``times``; ``sticky`` leaves an error behind."""

    matches: Callable[[str], bool]
    error: Callable[[], Exception]
    times: int
    sticky: bool = False


class IllegalAccessError(RuntimeError):
    """A kernel touched memory that a GPU cannot reach."""


class SimulatedRuntime:
    """See the module docstring. ``compute`` is the model's stream: tests queue on it themselves."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.compute = SimulatedStream("compute", Priority.HIGH)
        self.registered: dict[int, int] = {}
        self.num_events = 0
        self.reachable = NOTHING
        """What a GPU can touch: its own memory and pinned memory that was allocated here."""
        self._owned: list[torch.Tensor] = []
        self._refusals: list[Refusal] = []
        self._left_behind: Exception | None = None
        self._unlooked: dict[int, Operation] = {}
        self._names = itertools.count()

    # Faults on demand

    def refuse_when(
        self,
        matches: Callable[[str], bool],
        error: Callable[[], Exception],
        times: int = 1,
        *,
        sticky: bool = False,
    ) -> Refusal:
        """The next calls that match raise: ``register``, ``wait``, ... or an operation's name."""
        refusal = Refusal(matches, error, times, sticky)
        self._refusals.append(refusal)
        return refusal

    def expose(self, *tensors: torch.Tensor) -> None:
        """These are GPU memory (a model's KV cache): kernels may touch them."""
        for tensor in tensors:
            self.reachable = self.reachable.union(ByteRanges.of_tensor(tensor))

    # The protocol

    @property
    def identity(self) -> str:
        return "simulated"

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def numa_node(self) -> int | None:
        return None

    def now_s(self) -> float:
        return self.simulation.ticks * SECONDS_PER_TICK

    def compute_stream(self) -> Stream:
        return self.compute

    def create_stream(self, name: str, priority: Priority) -> Stream:
        return SimulatedStream(f"{name}#{next(self._names)}", priority)

    def create_event(self, *, timed: bool = False) -> Event:
        self._call("create_event")
        self.num_events += 1
        return SimulatedEvent(timed)

    def record(self, event: Event, stream: Stream) -> None:
        self._call("record")
        assert isinstance(event, SimulatedEvent)
        assert isinstance(stream, SimulatedStream)
        event.operation = self.simulation.queue(stream.name, f"event in {stream.name}")

    def wait(self, stream: Stream, event: Event) -> None:
        self._call("wait")
        assert isinstance(stream, SimulatedStream)
        recorded = _recorded(event)
        self.simulation.queue(stream.name, f"wait for {recorded.stream}", after=(recorded,))

    def is_done(self, event: Event) -> bool:
        self._call("is_done")
        recorded = _recorded(event)
        done = self.simulation.look(recorded)
        if done:
            self._raise_failures(recorded)
        return done

    def wait_on_host(self, event: Event, timeout_s: float) -> bool:
        """Work that can never finish is what a timeout is on a GPU."""
        self._call("wait_on_host")
        recorded = _recorded(event)
        try:
            self.simulation.wait(recorded)
        except StuckError:
            return False
        self._raise_failures(recorded)
        return True

    def elapsed_s(self, start: Event, end: Event) -> float:
        assert isinstance(start, SimulatedEvent)
        assert isinstance(end, SimulatedEvent)
        if not (start.timed and end.timed):
            raise ValueError("the time between events that were not made for timing")
        return (_recorded(end).done_at - _recorded(start).done_at) * SECONDS_PER_TICK

    def allocate(self, num_bytes: int) -> torch.Tensor:
        self._call("allocate")
        return self._new(num_bytes)

    def allocate_pinned(self, num_bytes: int) -> torch.Tensor:
        self._call("allocate_pinned")
        return self._new(num_bytes)

    def write_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._call("write_host")
        self.simulation.touch_from_host("write", writes=ByteRanges.of_tensor(target))
        target.copy_(source)

    def read_host(self, source: torch.Tensor) -> torch.Tensor:
        self._call("read_host")
        self.simulation.touch_from_host("read", reads=ByteRanges.of_tensor(source))
        return source.clone()

    def register(self, address: int, num_bytes: int) -> None:
        try:
            self._call("register")
        except Exception:
            self._left_behind = None  # what the real runtime does by asking for the last error
            raise
        self.registered[address] = num_bytes

    def unregister(self, address: int) -> None:
        self._call("unregister")
        del self.registered[address]

    def copy(self, stream: Stream, copies: Copies) -> None:
        self._call(copies.name)
        assert isinstance(stream, SimulatedStream)
        self._refuse_seams(copies)

        def action() -> None:
            for target, source, size in zip(
                copies.targets.tolist(), copies.sources.tolist(), copies.sizes.tolist(), strict=True
            ):
                ctypes.memmove(target, source, size)

        self._queue(
            stream,
            copies.name,
            ByteRanges.of(copies.sources, copies.sizes),
            ByteRanges.of(copies.targets, copies.sizes),
            action,
        )

    def launch(self, stream: Stream, kernel: KernelLaunch) -> None:
        self._call(kernel.name)
        assert isinstance(stream, SimulatedStream)
        accesses = kernel.accesses()
        touched = accesses.reads.union(accesses.writes)
        pinned = ByteRanges.of(list(self.registered.keys()), list(self.registered.values()))
        if not self.reachable.union(pinned).covers(touched):
            raise IllegalAccessError(f"kernel '{kernel.name}' touches memory that is not pinned")
        self._queue(stream, kernel.name, accesses.reads, accesses.writes, kernel.reference)

    def close(self) -> None:
        self._owned.clear()

    def _refuse_seams(self, copies: Copies) -> None:
        """A copy that begins in one registered piece of memory must end in it."""
        hosts = copies.targets if copies.to_host else copies.sources
        for address, num_bytes in self.registered.items():
            ends = hosts + copies.sizes
            inside = (hosts < address + num_bytes) & (ends > address)
            if (inside & ((hosts < address) | (ends > address + num_bytes))).any():
                raise IllegalAccessError(f"'{copies.name}' spans two registered pieces of memory")

    def _new(self, num_bytes: int) -> torch.Tensor:
        tensor = torch.full((num_bytes,), 0xCD, dtype=torch.uint8)
        self._owned.append(tensor)  # a freed address must not be given out again: see reachable
        self.expose(tensor)
        return tensor

    def _call(self, name: str) -> None:
        """Every call into the runtime passes here, as every CUDA call can return an old error."""
        if self._left_behind is not None:
            error, self._left_behind = self._left_behind, None
            raise error
        for refusal in self._refusals:
            if refusal.times > 0 and refusal.matches(name):
                refusal.times -= 1
                error = refusal.error()
                if refusal.sticky:
                    self._left_behind = error
                raise error

    def _queue(
        self,
        stream: SimulatedStream,
        name: str,
        reads: ByteRanges,
        writes: ByteRanges,
        action: Callable[[], None],
    ) -> None:
        operation = self.simulation.queue(
            stream.name, name, reads=reads, writes=writes, action=action
        )
        self._unlooked[operation.number] = operation

    def _raise_failures(self, recorded: Operation) -> None:
        """The first look past failed work of the same lane learns of it, once.

        (On CUDA every later look learns of it too: such an error stays.)
        """
        lane = _lane(recorded)
        failure: Exception | None = None
        for number in (*recorded.before, recorded.number):
            operation = self._unlooked.get(number)
            if operation is not None and _lane(operation) == lane:
                del self._unlooked[number]
                failure = failure or operation.failure
        if failure is not None:
            raise failure


@dataclass(eq=False, slots=True)
class Cache:
    """A simulated KV cache of one group: a uint8 ``[num_blocks, page_bytes]`` for each layer."""

    num_layers: int
    num_blocks: int
    page_bytes: int
    layers: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.layers = [
            torch.zeros(self.num_blocks, self.page_bytes, dtype=torch.uint8)
            for _ in range(self.num_layers)
        ]

    def block(self, block: int) -> torch.Tensor:
        """A copy of a block's bytes, layer after layer."""
        return torch.cat([layer[block] for layer in self.layers])

    def ranges(self, blocks: list[int]) -> ByteRanges:
        addresses = [
            layer.data_ptr() + block * self.page_bytes for layer in self.layers for block in blocks
        ]
        return ByteRanges.of(addresses, self.page_bytes)


def _lane(operation: Operation) -> str:
    """Streams that work on the same transfers share the first part of their names."""
    return operation.stream.partition(":")[0]


def _recorded(event: Event) -> Operation:
    assert isinstance(event, SimulatedEvent)
    if event.operation is None:
        raise ValueError("the event was never recorded: waiting for it orders nothing")
    return event.operation

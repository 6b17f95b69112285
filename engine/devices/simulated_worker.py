"""The serving engine's side of a step, on the simulator's compute stream.

What it queues, and when it calls the connector, was read off the workers of vLLM 0.32 and 0.33 (see
``docs/ordering.md``). Two orders are in use. The first runner lets the connector flush before
anything is queued for the step. The second has already queued the zeroing of new blocks and the
copy-on-write copies when it first calls the connector.
"""

import ctypes
import enum
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from .byte_ranges import NOTHING, ByteRanges
from .simulated import Cache, SimulatedRuntime
from .simulation import Operation

INPUT_BYTES = 64


class RunnerOrder(enum.Enum):
    """Which model runner's order of calls."""

    FIRST = "gpu_model_runner"
    SECOND = "gpu/model_runner"


class Hooks(Protocol):
    """The worker side of a connector, as far as it queues work."""

    def handle_preemptions(self) -> None: ...

    def bind_connector_metadata(self) -> None: ...

    def start_load_kv(self) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_finished(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Step:
    """What the scheduler decided for one step.

    ``zeroed`` are new blocks, ``copied`` copy-on-write pairs (source, target). The forward reads
    the blocks ``read`` and fills the blocks ``written`` with a byte each. Without a forward the
    step exists for the connector alone. ``sync_loads``: the forward needs this step's loads.
    ``late_save``: the first runner with a draft model, which saves after the drafts are made.
    """

    zeroed: Sequence[int] = ()
    copied: Sequence[tuple[int, int]] = ()
    read: Sequence[int] = ()
    written: Mapping[int, int] = field(default_factory=dict)
    forward: bool = True
    sync_loads: bool = False
    late_save: bool = False


class SimulatedWorker:
    """One worker and its KV cache. ``seen[n][block]`` is what the forward of step ``n`` read."""

    def __init__(self, runtime: SimulatedRuntime, cache: Cache, order: RunnerOrder) -> None:
        self.runtime = runtime
        self.cache = cache
        self.order = order
        self.seen: list[dict[int, torch.Tensor]] = []
        self.num_steps = 0
        self._inputs_on_host = torch.zeros(INPUT_BYTES, dtype=torch.uint8)
        self._inputs = torch.zeros(INPUT_BYTES, dtype=torch.uint8)
        self._inputs_copied: Operation | None = None
        self._outputs: list[tuple[torch.Tensor, Operation]] = []
        runtime.expose(*cache.layers)

    def run(self, step: Step, hooks: Hooks) -> None:
        """One step. Only the host's part: what it queues runs whenever the simulation lets it."""
        if self.order is RunnerOrder.FIRST:
            hooks.handle_preemptions()
            self._update_states(step)
            hooks.bind_connector_metadata()
        else:
            self._update_states(step)
            hooks.handle_preemptions()
            hooks.bind_connector_metadata()
        if step.sync_loads:
            hooks.start_load_kv()
        if step.forward:
            self._forward(step)
        if self.order is RunnerOrder.SECOND:
            self._sample(step)
        if not step.sync_loads:
            hooks.start_load_kv()
        if not step.late_save:
            hooks.wait_for_save()
        hooks.get_finished()
        if self.order is RunnerOrder.FIRST:
            self._sample(step)
        if step.late_save:
            hooks.wait_for_save()
        self.num_steps += 1

    def wait_for_output(self, lag: int = 0) -> None:
        """The host takes sampled tokens, ``lag`` steps late under asynchronous scheduling."""
        while len(self._outputs) > lag:
            self.runtime.simulation.wait(self._outputs[0][1])
            self._outputs.pop(0)

    def _update_states(self, step: Step) -> None:
        """Zero what is new, then copy for copy-on-write, then bring the inputs to the device."""
        if step.zeroed:
            blocks = list(step.zeroed)
            self._queue("zero", writes=self.cache.ranges(blocks), action=lambda: self._zero(blocks))
        for source, target in step.copied:
            self._queue(
                "copy on write",
                reads=self.cache.ranges([source]),
                writes=self.cache.ranges([target]),
                action=functools.partial(self._copy, source, target),
            )
        if step.forward:
            self._copy_inputs()

    def _copy_inputs(self) -> None:
        """The host's input buffer is used again only once the copy from it is complete."""
        if self._inputs_copied is not None:
            self.runtime.simulation.wait(self._inputs_copied)
        here, there = (
            ByteRanges.of_tensor(self._inputs_on_host),
            ByteRanges.of_tensor(self._inputs),
        )
        self.runtime.simulation.touch_from_host("prepare inputs", writes=here)
        self._inputs_on_host.fill_(self.num_steps % 256)
        self._inputs_copied = self._queue(
            "copy inputs",
            reads=here,
            writes=there,
            action=lambda: ctypes.memmove(
                self._inputs.data_ptr(), self._inputs_on_host.data_ptr(), INPUT_BYTES
            ),
        )

    def _forward(self, step: Step) -> None:
        seen: dict[int, torch.Tensor] = {}
        self.seen.append(seen)

        def attend() -> None:
            seen.update((block, self.cache.block(block)) for block in step.read)
            for block, value in step.written.items():
                for layer in self.cache.layers:
                    layer[block] = value

        inputs = ByteRanges.of_tensor(self._inputs)
        self._queue(
            "forward",
            reads=self.cache.ranges(list(step.read)).union(inputs),
            writes=self.cache.ranges(list(step.written)),
            action=attend,
        )

    def _sample(self, step: Step) -> None:
        """Sampled tokens leave on a stream of their own, behind an event of the compute stream.

        They lie in a new tensor every step, which is kept until the host has them.
        """
        if not step.forward:
            return
        tensor = torch.zeros(INPUT_BYTES, dtype=torch.uint8)
        sampled = ByteRanges.of_tensor(tensor)
        done = self._queue("sample", writes=sampled, action=lambda: None)
        leaves = self.runtime.simulation.queue(
            "output",
            f"copy sampled tokens of step {self.num_steps}",
            reads=sampled,
            action=lambda: None,
            after=(done,),
        )
        self._outputs.append((tensor, leaves))

    def _zero(self, blocks: list[int]) -> None:
        for layer in self.cache.layers:
            layer[blocks] = 0

    def _copy(self, source: int, target: int) -> None:
        for layer in self.cache.layers:
            layer[target] = layer[source]

    def _queue(
        self,
        name: str,
        *,
        reads: ByteRanges = NOTHING,
        writes: ByteRanges = NOTHING,
        action: Callable[[], object],
    ) -> Operation:
        def run() -> None:
            action()

        return self.runtime.simulation.queue(
            self.runtime.compute.name,
            f"{name} of step {self.num_steps}",
            reads=reads,
            writes=writes,
            action=run,
        )

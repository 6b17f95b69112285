"""Every legal order of a small program, equivalent ones once.

A program is a function that queues work on a fresh ``Simulation``. It is run again and again, each
time steered into another order, by replaying the choices of the run before up to the last one that
still has an alternative (depth first, so nothing has to be copied or restored).

Reduction. Two operations that touch no common byte (or only read it) commute, and so does the
host's look at an event with every operation that does not come before that event. Of the orders
that differ only by swapping neighbours that commute one is enough. *Sleep sets* skip the others:
what was already tried first at a choice is asleep in its later alternatives, until something runs
that it does not commute with; a run whose every continuation is asleep repeats an order and is cut.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from .simulation import Operation, Race, Simulation

LOOK: Final = -1
"""Stands for the host among the operation numbers of a choice: it looks without waiting more."""


class _RepeatError(BaseException):
    """This run can only repeat an order that was seen. Not for the program to handle."""


@dataclass(slots=True)
class _Choice:
    """One point where the order was open. ``options`` are awake operations, and ``LOOK``."""

    options: tuple[int, ...]
    taken: int = 0


@dataclass(slots=True)
class _Steered:
    """A chooser that replays ``path`` and then takes the first option, growing ``path``."""

    path: list[_Choice]
    asleep: dict[int, Operation] = field(default_factory=dict)
    looking_asleep: Operation | None = None
    depth: int = 0

    def pick(self, ready: Sequence[Operation]) -> Operation:
        chosen = self._choose(ready, None)
        assert chosen is not None
        return chosen

    def pick_or_look(self, ready: Sequence[Operation], looked_at: Operation) -> Operation | None:
        return self._choose(ready, looked_at)

    def _choose(self, ready: Sequence[Operation], looked_at: Operation | None) -> Operation | None:
        by_number = {operation.number: operation for operation in ready}
        if self.depth == len(self.path):
            options = [number for number in by_number if number not in self.asleep]
            if looked_at is not None and self.looking_asleep is None:
                options.insert(0, LOOK)
            if not options:
                raise _RepeatError
            self.path.append(_Choice(tuple(options)))
        choice = self.path[self.depth]
        self.depth += 1
        number = choice.options[choice.taken]
        tried = choice.options[: choice.taken]
        chosen = by_number[number] if number != LOOK else None
        self._fall_asleep(tried, by_number, looked_at)
        self._wake(chosen, looked_at)
        return chosen

    def _fall_asleep(
        self,
        tried: Sequence[int],
        by_number: dict[int, Operation],
        looked_at: Operation | None,
    ) -> None:
        for number in tried:
            if number == LOOK:
                self.looking_asleep = looked_at
            else:
                self.asleep[number] = by_number[number]

    def _wake(self, chosen: Operation | None, looked_at: Operation | None) -> None:
        """Whatever does not commute with what happens now may lead somewhere new again."""
        if chosen is None:
            assert looked_at is not None
            self.looking_asleep = None
            self.asleep = {
                number: operation
                for number, operation in self.asleep.items()
                if not _decides(operation, looked_at)
            }
            return
        self.asleep = {
            number: operation
            for number, operation in self.asleep.items()
            if number != chosen.number and not operation.conflict(chosen)
        }
        if self.looking_asleep is not None and _decides(chosen, self.looking_asleep):
            self.looking_asleep = None


def _decides(operation: Operation, looked_at: Operation) -> bool:
    """Whether running ``operation`` can change what a look at ``looked_at`` says."""
    return operation is looked_at or operation.number in looked_at.before


@dataclass(frozen=True, slots=True)
class Exploration:
    """``num_orders`` are complete runs that differ; ``num_cut`` runs were found to repeat one."""

    num_orders: int
    num_cut: int
    races: tuple[Race, ...]


def explore(
    program: Callable[[Simulation], Callable[[], None] | None], max_runs: int = 10_000
) -> Exploration:
    """Run ``program`` in every legal order.

    It queues its work (on fresh memory) and may return a check, which is called when all of it has
    run. Raises what the program or its check raises, and ValueError beyond ``max_runs``.
    """
    path: list[_Choice] = []
    races: list[Race] = []
    num_orders = num_cut = 0
    while True:
        if num_orders + num_cut == max_runs:
            raise ValueError(f"the program has more than {max_runs} orders; allowed: a smaller one")
        simulation = Simulation(_Steered(path))
        try:
            check = program(simulation)
            simulation.run_all()
            if check is not None:
                check()
            num_orders += 1
        except _RepeatError:
            num_cut += 1
        races.extend(simulation.races)
        while path and path[-1].taken + 1 == len(path[-1].options):
            path.pop()
        if not path:
            return Exploration(num_orders, num_cut, tuple(races))
        path[-1].taken += 1

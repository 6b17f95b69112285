"""Scheduling cost of kvferry's general connector against vLLM's own: what was to be shown.

Both connectors hold the same chunks, are driven through vLLM's hooks with the same block hashes,
and have to give the same answers before anything counts. Measured are the keys and the lookup of a
prompt of 8,192 chunks that are all there, planning a store of 512 new chunks in a full cache and
taking its completion, a step with 256 running requests and nothing to do, and the memory of a slot.
That a step with nothing to do costs the same whatever the cache's size, and however many requests
have ended, is shown on kvferry's side alone. Figures are judged by processor time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .schedule_measure import Figure

SIZES: Final = (10_000, 1_000_000)
IDLE_SIZES: Final = (10_000, 100_000, 1_000_000, 10_000_000)
NUM_FINISHED: Final = 20_000
MEMORY_SLOTS: Final = 44_000
"""Just more than fit a dict of 2**16: it has doubled, and weighs the most for each of its keys."""

MOST_IDLE_S: Final = 100e-6
MOST_BYTES_PER_SLOT: Final = 300
MOST_GROWTH: Final = 1.25
"""Steps with nothing to do are the same work at every size, but not at the same addresses."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One thing that was to be shown. ``given`` in ``unit``; ``at_least`` or at most ``target``.

    A target of None is none: the figure is for information.
    """

    what: str
    unit: str
    given: float
    target: float | None
    at_least: bool

    @property
    def met(self) -> bool:
        if self.target is None:
            return True
        return self.given >= self.target if self.at_least else self.given <= self.target

    def __str__(self) -> str:
        if self.target is None:
            return f"{self.what}: {self.given:.1f} {self.unit}"
        relation = ">=" if self.at_least else "<="
        verdict = "met" if self.met else "MISSED"
        given = f"{self.what}: {self.given:.1f} {self.unit}"
        return f"{given}, wanted {relation} {self.target:g}: {verdict}"


def least_ratio(operation: str, num_slots: int) -> float | None:
    """How many times less than vLLM's kvferry's side must take; None where that is not said."""
    from . import schedule_measure as measure

    few = num_slots <= SIZES[0]
    ratios: dict[str, float | None] = {
        measure.LOOKUP_WARM: 10.0 if few else None,  # with more, the index itself leaves the cache
        measure.LOOKUP_FRESH: 3.0 if few else 1.5,
        measure.PLAN: 2.0,
        measure.COMPLETE: 2.0,
    }
    return ratios.get(operation)


def compared(figures: Sequence["Figure"]) -> list[Verdict]:
    """How many times less kvferry takes than vLLM, for what both did."""
    from . import schedule_measure as measure

    verdicts = []
    for ours in figures:
        if ours.side != "kvferry":
            continue
        theirs = measure.of(figures, ours.operation, "vllm", ours.num_slots)
        verdicts.append(
            Verdict(
                f"{ours.operation}, {ours.num_slots} slots",
                "times less",
                theirs.cpu_s / ours.cpu_s,
                least_ratio(ours.operation, ours.num_slots),
                at_least=True,
            )
        )
    return verdicts


def idled(figures: Sequence["Figure"]) -> list[Verdict]:
    """The longest step with nothing to do, and how much it grew from the first of these."""
    longest_s = max(figure.cpu_s for figure in figures)
    growth = longest_s / figures[0].cpu_s
    return [
        Verdict("step, nothing to do", "us", longest_s * 1e6, MOST_IDLE_S * 1e6, at_least=False),
        Verdict("the same, growth", "times", growth, MOST_GROWTH, at_least=False),
    ]


def weighed(bytes_per_slot: dict[str, float]) -> list[Verdict]:
    """The memory of each side; only kvferry's has a target."""
    return [
        Verdict(
            f"memory beside the hashes, {side}",
            "bytes a slot",
            num_bytes,
            MOST_BYTES_PER_SLOT if side == "kvferry" else None,
            at_least=False,
        )
        for side, num_bytes in bytes_per_slot.items()
    ]

"""The figures of the serving benchmark: what each side did, from its single answers."""

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ..demo.engine import Answer
from .serve_client import Played
from .serve_sides import PLAIN, SIDES
from .serve_workload import Turn, Workload

PERCENTILES: Final = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Asked:
    """One wave on one side; ``played.answers`` are in the order of ``turns``."""

    round: int
    wave: int
    turns: tuple[Turn, ...]
    played: Played


@dataclass(frozen=True, slots=True)
class Run:
    """All that was seen. ``refused`` says of sides that did not run why."""

    model: str
    device: str
    dtype: str
    num_gpu_blocks: int
    host_bytes: int
    min_load_tokens: int | str
    seed: int
    workload: Workload
    asked: Mapping[str, Sequence[Asked]]
    refused: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Figures:
    """One side. Times to the first token in ms, in their order of asking; counts in tokens."""

    name: str
    all_ms: tuple[float, ...]
    returning_ms: tuple[float, ...]
    round_s: tuple[float, ...]
    num_prompt: int
    num_answer: int
    num_from_gpu: int
    num_from_host: int
    num_same_answers: int
    """Answers with the tokens of the side without a connector."""
    admitted: dict[str, int]
    """As in ``Played``."""

    @property
    def label(self) -> str:
        return SIDES[self.name].label

    @property
    def num_recomputed(self) -> int:
        return self.num_prompt - self.num_from_gpu - self.num_from_host

    @property
    def wall_s(self) -> float:
        return sum(self.round_s)

    @property
    def answer_tokens_per_s(self) -> float:
        return self.num_answer / self.wall_s

    @property
    def tokens_per_s(self) -> float:
        return (self.num_prompt + self.num_answer) / self.wall_s

    def times_faster(self, other: "Figures") -> float:
        """The other's wall time over this one's, of the same round each: the median."""
        return statistics.median(
            theirs / ours for ours, theirs in zip(self.round_s, other.round_s, strict=True)
        )


def _answers(asked: Sequence[Asked]) -> Iterator[tuple[Turn, Answer]]:
    for wave in asked:
        yield from zip(wave.turns, wave.played.answers, strict=True)


def figures_of(name: str, run: Run) -> Figures:
    pairs = list(_answers(run.asked[name]))
    answers = [answer for _, answer in pairs]
    rounds: dict[int, float] = {}
    for wave in run.asked[name]:
        rounds[wave.round] = rounds.get(wave.round, 0.0) + wave.played.wall_s
    plain = _answers(run.asked[PLAIN])
    return Figures(
        name=name,
        all_ms=tuple(answer.first_token_s * 1e3 for answer in answers),
        returning_ms=tuple(answer.first_token_s * 1e3 for turn, answer in pairs if turn.is_return),
        round_s=tuple(rounds.values()),
        num_prompt=sum(answer.num_prompt_tokens for answer in answers),
        num_answer=sum(len(answer.tokens) for answer in answers),
        num_from_gpu=sum(answer.num_from_gpu for answer in answers),
        num_from_host=sum(answer.num_from_host for answer in answers),
        num_same_answers=sum(
            answer.tokens == theirs.tokens
            for answer, (_, theirs) in zip(answers, plain, strict=True)
        ),
        admitted=_added(wave.played.admitted for wave in run.asked[name]),
    )


def _added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    added: Counter[str] = Counter()
    for some in counts:
        added.update(some)
    return dict(added)


def sources_of(side: Figures) -> list[tuple[str, int]]:
    """Where the prompt tokens of a side came from, and how many each."""
    return [
        ("GPU prefix cache", side.num_from_gpu),
        ("host", side.num_from_host),
        ("computed", side.num_recomputed),
    ]


def share_of(number: int, side: Figures) -> float:
    """Of the prompt tokens, in percent."""
    return round(100 * number / side.num_prompt, 1)

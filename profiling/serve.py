"""Serving with and without kvferry: a real engine on each side, asked the same in turns.

Every side has an engine in a process of its own with a GPU pool too small for what is asked. The
sides take turns after each wave of a round, each wave beginning with another side, so that what
else the machine does hits all of them alike. In float32 all sides have to answer the same tokens.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from ..demo.command import device
from ..demo.engine import EngineSetup
from ..demo.model import demo_model, given_model
from .bench_result import Progress, Result
from .plan_units import parse_size
from .serve_client import Played, Wave
from .serve_figures import Asked, Run
from .serve_result import result_of
from .serve_sides import GPU_SHARE, PLAIN, QUICK_SIDES, SIDES, Side, running
from .serve_workload import (
    BLOCK_TOKENS,
    FULL,
    QUICK,
    Histories,
    Turn,
    Workload,
    vocabulary_of,
    warm_up_of,
    waves_of,
)

_WORKLOAD_HELP: Final = {
    "chats": "chats behind one system prompt",
    "turns": "turns of each chat",
    "documents": "documents that are asked about once a turn",
    "clients": "how many ask at the same time",
    "system_tokens": "length of the system prompt",
    "document_tokens": "length of a document",
    "question_tokens": "mean length of a question",
    "answer_tokens": "length of an answer",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``measure_serving``; None where one was not given."""
    parser.add_argument(
        "--model", type=Path, metavar="PATH", help="a model folder (default: the demo's model)"
    )
    parser.add_argument(
        "--sides", nargs="+", metavar="SIDE", help=f"out of {', '.join(SIDES)} (default: all)"
    )
    for name, text in _WORKLOAD_HELP.items():
        default = f"{getattr(FULL, name)}, with --quick {getattr(QUICK, name)}"
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, metavar="N", help=f"{text} (default: {default})")
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="rounds (default: 2, with --quick 1)"
    )
    parser.add_argument("--host-bytes", metavar="SIZE", help="host memory a side (default: 1GiB)")
    parser.add_argument(
        "--min-load-tokens",
        metavar="N",
        help='kvferry\'s option of that name: a number, or "auto" (default: auto)',
    )
    parser.add_argument("--seed", type=int, metavar="N", help="of all requests (default: 1)")


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured, checked. ``model`` is None for the demo's."""

    workload: Workload
    sides: tuple[str, ...]
    rounds: int
    seed: int
    host_bytes: int
    min_load_tokens: int | str
    model: Path | None

    @property
    def num_side_steps(self) -> int:
        """Warming up, and the waves."""
        return 1 + self.rounds * self.workload.turns

    @property
    def num_steps(self) -> int:
        return 1 + len(self.sides) * self.num_side_steps


def settings_of(*, quick: bool, **options: Any) -> Settings:
    """The settings for the given options, those that are None by default. Raises ValueError with
    the option's name, what was given and what is allowed; ModelMissingError for the model."""
    given = {name: value for name, value in options.items() if value is not None}
    changes = {f.name: given.pop(f.name) for f in fields(Workload) if f.name in given}
    workload = replace(QUICK if quick else FULL, **changes)
    sides = _sides(given.pop("sides", QUICK_SIDES if quick else tuple(SIDES)))
    rounds = _integer("rounds", given.pop("rounds", 1 if quick else 2), least=1)
    seed = _integer("seed", given.pop("seed", 1), least=0)
    host_bytes = parse_size("--host-bytes", str(given.pop("host_bytes", "1GiB")))
    min_load_tokens = _count_or_auto("min-load-tokens", given.pop("min_load_tokens", "auto"))
    model = given.pop("model", None)
    if given:
        raise ValueError(f"unknown options {', '.join(sorted(given))}")
    checked = None if model is None else given_model(Path(model))
    return Settings(workload, sides, rounds, seed, host_bytes, min_load_tokens, checked)


def _sides(given: Sequence[str]) -> tuple[str, ...]:
    """In the order of ``SIDES``; all are measured against the one without a connector."""
    for name in given:
        if name not in SIDES:
            raise ValueError(f"--sides {name}; allowed: {', '.join(SIDES)}")
    return tuple(name for name in SIDES if name in {PLAIN, *given})


def _integer(name: str, given: Any, least: int) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or given < least:
        raise ValueError(f"--{name} {given!r}; allowed: {least} or more")
    return given


def _count_or_auto(name: str, given: Any) -> int | str:
    text = str(given)
    if text != "auto" and not text.isdecimal():
        raise ValueError(f'--{name} {text!r}; allowed: 0 or more, or "auto"')
    return text if text == "auto" else int(text)


def measure_serving(*, quick: bool, progress: Progress, **options: Any) -> Result:
    """Measure; the options are those of ``add_options``, by name.

    Raises ValueError for a bad option, ModelMissingError without a model, EngineFailedError when an
    engine fails, and RuntimeError when sides differ in a token where none may.
    """
    settings = settings_of(quick=quick, **options)
    progress(0, settings.num_steps, f"starting {len(settings.sides)} engines")
    model = settings.model or demo_model()
    on = device()
    plain = EngineSetup(
        model=model,
        max_model_len=settings.workload.longest_tokens,
        num_gpu_blocks=settings.workload.num_gpu_blocks,
        block_size=BLOCK_TOKENS,
        dtype="float32" if on == "cpu" else "bfloat16",
        gpu_memory_share=None if on == "cpu" else GPU_SHARE / len(settings.sides),
    )
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    with running(
        settings.sides,
        plain,
        settings.host_bytes,
        {"min_load_tokens": settings.min_load_tokens},
        at_once=on == "cpu",
    ) as started:
        sides, refused = started
        course = _Course(settings, vocabulary_of(config), sides, progress)
        course.warm_up()
        for number in range(settings.rounds):
            course.play_round(number, must_agree=plain.dtype == "float32")
    return result_of(
        Run(
            model=model.name,
            device=on,
            dtype=plain.dtype,
            num_gpu_blocks=plain.num_gpu_blocks,
            host_bytes=settings.host_bytes,
            min_load_tokens=settings.min_load_tokens,
            seed=settings.seed,
            workload=settings.workload,
            asked=course.asked,
            refused=refused,
        )
    )


class _Course:
    """The course of a measurement over the sides that run; ``asked`` fills up as it goes on."""

    def __init__(
        self,
        settings: Settings,
        vocabulary: int,
        sides: Mapping[str, Side],
        progress: Progress,
    ) -> None:
        self._settings = settings
        self._vocabulary = vocabulary
        self._sides = sides
        self._progress = progress
        # What a side that does not run would have done is done.
        self._num_done = settings.num_steps - len(sides) * settings.num_side_steps
        self.asked: dict[str, list[Asked]] = {name: [] for name in sides}

    def _play(self, name: str, what: str, wave: Wave) -> Played:
        self._progress(self._num_done, self._settings.num_steps, f"{SIDES[name].label}: {what}")
        played = self._sides[name](wave)
        self._num_done += 1
        self._progress(self._num_done, self._settings.num_steps, f"{SIDES[name].label}: {what}")
        return played

    def _wave(self, prompts: list[list[int]], **kind: bool) -> Wave:
        workload = self._settings.workload
        return Wave(prompts, workload.answer_tokens, workload.clients, **kind)

    def warm_up(self) -> None:
        prompts = warm_up_of(self._settings.workload, self._settings.seed, self._vocabulary)
        for name in self._sides:
            self._play(name, "warming up", self._wave(prompts, is_warm_up=True))

    def play_round(self, number: int, *, must_agree: bool) -> None:
        """One round on every side. Raises RuntimeError when they must agree and do not."""
        waves = waves_of(self._settings.workload, self._settings.seed + number, self._vocabulary)
        histories = {name: Histories() for name in self._sides}
        names = list(self._sides)
        for place, turns in enumerate(waves):
            shift = (number * len(waves) + place) % len(names)
            for name in names[shift:] + names[:shift]:
                prompts = [histories[name].prompt(turn) for turn in turns]
                what = f"round {number + 1}, wave {place + 1}"
                played = self._play(name, what, self._wave(prompts, is_first=place == 0))
                self.asked[name].append(Asked(number, place, tuple(turns), played))
                for turn, answer in zip(turns, played.answers, strict=True):
                    histories[name].remember(turn, answer.tokens)
            if must_agree:
                self._compare(turns)

    def _compare(self, turns: Sequence[Turn]) -> None:
        expected = self.asked[PLAIN][-1].played.answers
        for name in self._sides:
            for turn, ours, theirs in zip(
                turns, self.asked[name][-1].played.answers, expected, strict=True
            ):
                if ours.tokens != theirs.tokens:
                    raise RuntimeError(
                        f"{turn.thread}: {SIDES[name].label} answered {ours.tokens}, "
                        f"{SIDES[PLAIN].label} {theirs.tokens}"
                    )

"""The serving benchmark: what it asks, how it compares sides, and one short run on real engines."""

import argparse
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kvferry.profiling import serve
from kvferry.profiling.serve import add_options, measure_serving, settings_of
from kvferry.profiling.serve_client import Played, Wave
from kvferry.profiling.serve_sides import PLAIN, QUICK_SIDES, SIDES
from kvferry.profiling.serve_workload import (
    BLOCK_TOKENS,
    FULL,
    QUICK,
    Histories,
    Workload,
    vocabulary_of,
    waves_of,
)

from kvferry.demo.engine import Answer
from kvferry.demo.model import ModelMissingError

SEED = 7
SMALL = replace(
    QUICK,
    chats=4,
    turns=2,
    documents=1,
    clients=2,
    system_tokens=32,
    document_tokens=96,
    question_tokens=32,
    answer_tokens=4,
)


def silent(num_done: int, num_steps: int, what: str) -> None:
    assert 0 <= num_done <= num_steps
    assert what


def test_a_seed_gives_the_same_requests() -> None:
    print(f"seed {SEED}")
    assert waves_of(QUICK, SEED, 5000) == waves_of(QUICK, SEED, 5000)
    assert waves_of(QUICK, SEED, 5000) != waves_of(QUICK, SEED + 1, 5000)


@pytest.mark.parametrize("workload", [QUICK, FULL, SMALL], ids=["quick", "full", "small"])
def test_what_returns_does_not_fit_in_the_pool(workload: Workload) -> None:
    """Chats come back with all that was said; every request fits, and not all that is asked."""
    waves = waves_of(workload, SEED, 256)
    histories = Histories()
    different: set[tuple[int, ...]] = set()
    earlier: dict[str, list[int]] = {}
    for number, wave in enumerate(waves):
        assert len(wave) == workload.chats + workload.documents
        assert all(turn.is_return == (number > 0) for turn in wave)
        for turn in wave:
            prompt = histories.prompt(turn)
            assert max(prompt) < 256
            assert len(prompt) + workload.answer_tokens <= workload.longest_tokens
            answer = [number] * workload.answer_tokens
            histories.remember(turn, answer)
            said = [*prompt, *answer]
            ends = range(BLOCK_TOKENS, len(said) + 1, BLOCK_TOKENS)
            different.update(tuple(said[:end]) for end in ends)
            before = earlier.get(turn.thread, [])
            assert prompt[: len(before)] == before
            earlier[turn.thread] = said
    assert sum(map(len, waves)) == workload.num_requests
    assert len(earlier) == workload.chats + workload.turns * workload.documents
    assert len(different) > workload.num_gpu_blocks
    assert workload.num_gpu_blocks > workload.clients * workload.longest_tokens // BLOCK_TOKENS


def test_documents_are_shared_and_questions_are_not() -> None:
    first, second = (
        next(turn for turn in wave if turn.thread.startswith("document 0"))
        for wave in waves_of(QUICK, SEED, 5000)[:2]
    )
    assert first.opening == second.opening
    assert first.question != second.question
    assert first.thread != second.thread


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chats": 0}, r"--chats 0; allowed: 1 or more"),
        ({"turns": 1}, r"--turns 1; allowed: 2 or more"),
        ({"clients": 11}, r"--clients 11; allowed: at most .* 10"),
        ({"question_tokens": 1}, r"--question-tokens 1; allowed: 2 or more"),
        ({"rounds": 0}, r"--rounds 0; allowed: 1 or more"),
        ({"seed": -1}, r"--seed -1; allowed: 0 or more"),
        ({"host_bytes": "much"}, r"--host-bytes 'much'; allowed: .*64GiB"),
        ({"min_load_tokens": "-3"}, r"--min-load-tokens '-3'; allowed: .*auto"),
        ({"sides": ["theirs"]}, r"--sides theirs; allowed: without, kvferry-offloading"),
        ({"turn": 3}, r"unknown options turn"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure_serving(quick=True, progress=silent, **options)


def test_a_model_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelMissingError, match=r"holds no config\.json"):
        measure_serving(quick=True, progress=silent, model=tmp_path)
    with pytest.raises(ValueError, match="vocab_size"):
        vocabulary_of({})
    assert vocabulary_of({"text_config": {"vocab_size": 9}}) == 9


def test_the_options_of_the_command_line_are_those_of_the_function() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    assert settings_of(quick=True, **vars(parser.parse_args([]))).workload == QUICK
    assert settings_of(quick=False, **vars(parser.parse_args([]))).sides == tuple(SIDES)
    given = ["--sides", "kvferry-simple", "--chats", "3", "--host-bytes", "16MiB"]
    settings = settings_of(quick=True, **vars(parser.parse_args(given)))
    assert settings.sides == (PLAIN, "kvferry-simple")
    assert (settings.workload.chats, settings.host_bytes) == (3, 16 << 20)


class FakeSide:
    """A side that answers with the last tokens of its prompts, or with ``wrong`` ones."""

    def __init__(self, wrong: bool = False) -> None:
        self.waves: list[Wave] = []
        self._wrong = wrong

    def __call__(self, wave: Wave) -> Played:
        self.waves.append(wave)
        answers = tuple(
            Answer((*prompt[-3:], int(self._wrong)), "", 0.1, len(prompt), 0, 0, ())
            for prompt in wave.prompts
        )
        return Played(answers, 1.0, {})


def course_of(*sides: FakeSide, calls: list[str] | None = None) -> serve._Course:
    settings = replace(
        settings_of(quick=True, sides=QUICK_SIDES, seed=SEED), workload=SMALL, rounds=2
    )
    named: Any = dict(zip(QUICK_SIDES, sides, strict=False))

    def progress(num_done: int, num_steps: int, what: str) -> None:
        silent(num_done, num_steps, what)
        if calls is not None:
            calls.append(what)

    return serve._Course(settings, 256, named, progress)


def test_sides_are_asked_the_same_in_turns() -> None:
    plain, ours = FakeSide(), FakeSide()
    calls: list[str] = []
    course = course_of(plain, ours, calls=calls)
    course.warm_up()
    for number in range(2):
        course.play_round(number, must_agree=True)
    assert plain.waves == ours.waves
    assert [wave.is_warm_up for wave in plain.waves] == [True, False, False, False, False]
    assert [wave.is_first for wave in plain.waves] == [False, True, False, True, False]
    begun = [what.split(":")[0] for what in calls[4::4]]
    assert begun == ["without", "kvferry offloading"] * 2


def test_a_different_token_fails_the_run() -> None:
    with pytest.raises(RuntimeError, match=r"kvferry offloading answered .*, without \("):
        course_of(FakeSide(), FakeSide(wrong=True)).play_round(0, must_agree=True)
    course_of(FakeSide(), FakeSide(wrong=True)).play_round(0, must_agree=False)


def test_on_real_engines(tmp_path: Path) -> None:
    """The host serves tokens, the same come out, and vLLM's connector runs or says why not."""
    from tiny_models import build_model

    sizes = {name: getattr(SMALL, name) for name in SMALL.__slots__}
    steps: list[tuple[int, int]] = []
    result = measure_serving(
        quick=True,
        progress=lambda num_done, num_steps, what: steps.append((num_done, num_steps)),
        model=build_model("llama", tmp_path),
        sides=["kvferry-offloading", "vllm-offloading"],
        host_bytes="32MiB",
        min_load_tokens=0,
        seed=SEED,
        **sizes,
    )
    plain, ours = result.data["sides"][PLAIN], result.data["sides"]["kvferry-offloading"]
    assert ours["prompt_tokens"]["host"] > 0
    assert plain["prompt_tokens"]["host"] == 0
    assert ours["prompt_tokens"]["computed"] < plain["prompt_tokens"]["computed"]
    assert [one["tokens"] for one in ours["requests"]] == [
        one["tokens"] for one in plain["requests"]
    ]
    assert len(ours["requests"]) == SMALL.num_requests
    assert ours["admitted"]["hits"] > 0
    assert ours["admitted"]["declined"] == 0
    assert ("vllm-offloading" in result.data["sides"]) != (
        "vllm-offloading" in result.data["refused"]
    )
    assert (0, steps[0][1]) == steps[0]
    assert steps[-1] == (steps[0][1], steps[0][1])
    assert all(left <= right for left, right in itertools.pairwise(steps))

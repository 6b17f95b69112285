"""Each of the demo's checks passes on a good run and fails on the one thing it is there for."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvferry.demo import command, phases
from kvferry.demo.checks import check
from kvferry.demo.engine import Answer, logprobs_of
from kvferry.demo.phases import DemoRun, Ending, Phase
from kvferry.demo.report import as_object, as_table

NUM_PROMPT = 1_450
NUM_HIT = 1_440  # 45 blocks of 32
LOGPROBS = (None, *(-0.5 - place / 100 for place in range(NUM_PROMPT - 1)))


def answer(
    num_from_gpu: int = 0, num_from_host: int = 0, first_token_s: float = 0.5, **changes: Any
) -> Answer:
    plain = Answer(
        (5, 6, 7), "at 07:20", first_token_s, NUM_PROMPT, num_from_gpu, num_from_host, ()
    )
    return replace(plain, **changes)


def phase(name: str, *answers: Answer) -> Phase:
    return Phase(name, answers)


def snapshot(**changes: int) -> dict[str, int | float]:
    names = ("free", "writing", "ready", "reading", "doomed", "leases", "jobs", "fences")
    counts: dict[str, int | float] = dict.fromkeys((*names, "requests", "lookups"), 0)
    return counts | {"free": 100, **changes}


@pytest.fixture
def good() -> DemoRun:
    hit = answer(num_from_host=NUM_HIT, first_token_s=0.02)
    return DemoRun(
        model="model",
        device="cpu",
        dtype="float32",
        block_size=32,
        cold=phase("(1) cold", answer(), answer(first_token_s=0.4), answer(first_token_s=0.9)),
        gpu_hit=phase("(2) gpu", answer(num_from_gpu=NUM_HIT, first_token_s=0.016)),
        host_hit=phase("(4) host", hit, hit),
        bypass=phase("(5) bypass", answer(prompt_logprobs=LOGPROBS)),
        plain=phase("(6) plain", answer()),
        plain_logprobs=phase("(6) logprobs", answer(prompt_logprobs=LOGPROBS)),
        connector_answers=((0, False),),
        ending=Ending(
            fresh=snapshot(),
            before_bypass=snapshot(free=40, ready=60, lookups=9),
            settled=snapshot(free=30, ready=70, lookups=9),
            settled_worker={"jobs": 0, "queued": 0},
        ),
    )


def failures(run: DemoRun) -> list[str]:
    return [check.name for check in check(run) if not check.passed]


def test_a_good_run_passes(good: DemoRun) -> None:
    assert failures(good) == []


@pytest.mark.parametrize("name", ["cold", "gpu_hit", "host_hit", "plain"])
def test_other_tokens_are_seen(good: DemoRun, name: str) -> None:
    wrong = phase("(9) wrong", *getattr(good, name).answers)
    wrong = Phase(wrong.name, (*wrong.answers[:-1], replace(wrong.last, tokens=(5, 6, 8))))
    (failure,) = failures(replace(good, **{name: wrong}))
    assert "same tokens" in failure


def test_in_bf16_only_the_hits_must_agree(good: DemoRun) -> None:
    run = replace(good, dtype="bfloat16", plain=phase("(6)", answer(tokens=(1, 2, 3))))
    assert failures(run) == []
    wrong = phase("(4)", answer(num_from_host=NUM_HIT, tokens=(1, 2, 3)))
    assert len(failures(replace(run, host_hit=wrong))) == 1


@pytest.mark.parametrize(
    ("num_from_gpu", "num_from_host"), [(0, 0), (32, NUM_HIT - 32), (0, NUM_HIT - 32)]
)
def test_a_hit_that_was_not_all_from_the_host_is_seen(
    good: DemoRun, num_from_gpu: int, num_from_host: int
) -> None:
    host_hit = phase("(4)", good.host_hit.last, answer(num_from_gpu, num_from_host))
    assert failures(replace(good, host_hit=host_hit)) == ["(4) took its tokens from the host"]


@pytest.mark.parametrize("answers", [(), ((NUM_HIT, True),), ((0, False), (None, False))])
def test_a_connector_that_did_not_decline_is_seen(
    good: DemoRun, answers: tuple[tuple[int | None, bool], ...]
) -> None:
    (failure,) = failures(replace(good, connector_answers=answers))
    assert "(0, False)" in failure


def test_a_lookup_for_the_bypassing_request_is_seen(good: DemoRun) -> None:
    ending = replace(good.ending, settled=good.ending.settled | {"lookups": 10})
    (failure,) = failures(replace(good, ending=ending))
    assert "looked up" in failure


def test_missing_and_different_logprobs_are_seen(good: DemoRun) -> None:
    holes = phase("(5)", answer(prompt_logprobs=(*LOGPROBS[:7], None, *LOGPROBS[8:])))
    assert len(failures(replace(good, bypass=holes))) == 2
    short = phase("(5)", answer(prompt_logprobs=LOGPROBS[:-1]))
    assert len(failures(replace(good, bypass=short))) == 1
    shifted = phase("(5)", answer(prompt_logprobs=(*LOGPROBS[:7], -9.0, *LOGPROBS[8:])))
    (failure,) = failures(replace(good, bypass=shifted))
    assert "1e-3" in failure or "0.001" in failure


@pytest.mark.parametrize(
    "changes",
    [{"ready": 69}, {"ready": 69, "doomed": 1}, {"leases": 1}, {"fences": 2}, {"requests": 1}],
)
def test_what_is_left_over_is_seen(good: DemoRun, changes: dict[str, int]) -> None:
    ending = replace(good.ending, settled=good.ending.settled | changes)
    assert len(failures(replace(good, ending=ending))) == 1


def test_a_busy_worker_is_seen(good: DemoRun) -> None:
    ending = replace(good.ending, settled_worker={"jobs": 1, "queued": 0})
    assert len(failures(replace(good, ending=ending))) == 1


def test_the_table_tells_times_sources_and_answers(good: DemoRun) -> None:
    table = as_table(good, check(good))
    lines = {line.split("  ")[0]: line.split() for line in table.splitlines() if line}
    assert lines["(1) cold"][2:] == ["500.0", "ms", "0", "0", "1450", "1450"]
    assert lines["(4) host"][2:] == ["20.0", "ms", "0", "1440", "10", "1450"]
    assert "25.0 times faster than (1)" in table
    assert "1.25 times the time of (2)" in table
    assert "'at 07:20'" in table
    assert "FAIL" not in table
    broken = replace(good, connector_answers=())
    assert "FAIL" in as_table(broken, check(broken))


def test_the_object_survives_json(good: DemoRun) -> None:
    told = json.loads(json.dumps(as_object(good, check(good))))
    assert told["passed"] is True
    assert told["connector_answers"] == [[0, False]]
    assert [row["name"] for row in told["phases"]] == [phase.name for phase in good.phases]
    assert told["host_hit_faster_than_cold"] == pytest.approx(25)


def test_logprobs_are_those_of_the_prompts_own_tokens() -> None:
    class Entry:
        def __init__(self, logprob: float) -> None:
            self.logprob = logprob

    positions = [None, {8: Entry(-1.0), 3: Entry(-0.1)}, {3: Entry(-0.2)}]
    assert logprobs_of((7, 8, 9), positions) == (None, -1.0, None)
    assert logprobs_of((7, 8, 9), None) == ()


def test_an_engine_that_does_not_come_to_rest_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def hang(*_: object) -> DemoRun:
        raise TimeoutError("the engine still had work after 60 s")

    monkeypatch.setattr(phases, "run_demo", hang)
    assert command.show(tmp_path, as_json=False, result=io.StringIO()) == 1
    assert "FAILED: with nothing left to do, the engine comes to rest" in capsys.readouterr().err

"""The benchmark of what the connector costs when nothing is reused."""

from collections.abc import Callable
from pathlib import Path

import pytest
from kvferry.profiling import idle
from kvferry.profiling.idle import MODES, PLAIN, Load, Side, Taken, costs_of, in_turns, table

LOAD = Load(num_prompts=3, prompt_tokens=70, answer_tokens=2)


def side(wall_s: float, calls: list[str] | None = None, name: str = "") -> Side:
    """A side whose tokens are those of the prompts, and whose rounds take ``wall_s``."""

    def run(prompts: list[list[int]]) -> Taken:
        if calls is not None:
            calls.append(name)
        return Taken(wall_s, 2 * wall_s, [prompt[-2:] for prompt in prompts])

    return run


def test_prompts_have_nothing_in_common() -> None:
    rounds = [LOAD.prompts(seed) for seed in range(20)]
    first = [tuple(prompt[:32]) for prompts in rounds for prompt in prompts]
    assert len(set(first)) == len(first) == 60
    assert LOAD.prompts(3) == rounds[3]
    assert {len(prompt) for prompts in rounds for prompt in prompts} == {70}


def test_the_pool_holds_some_rounds() -> None:
    assert LOAD.num_pool_blocks == 2 * 3 * 3 + 2
    with pytest.raises(ValueError, match=r"pool_rounds=0\.5.*allowed: all of them from 1"):
        Load(pool_rounds=0.5)


def test_sides_take_turns_and_begin_in_turn() -> None:
    calls: list[str] = []
    sides = {name: side(1.0, calls, name) for name in (PLAIN, *MODES)}
    taken = in_turns(sides, LOAD, num_rounds=4, seed=0, num_warm=2)
    assert {name: len(rounds) for name, rounds in taken.items()} == dict.fromkeys(sides, 4)
    assert calls[::3] == [PLAIN, "eager", "lazy"] * 2
    assert sorted(calls[3:6]) == sorted(sides)


def test_ratios_are_of_one_round() -> None:
    """A slow moment that hits both sides of a round changes nothing."""
    plain = [Taken(1.0, 1.0, []), Taken(9.0, 1.0, []), Taken(1.0, 1.0, [])]
    eager = [Taken(2.0, 1.0, []), Taken(18.0, 4.0, []), Taken(2.0, 4.0, [], 0, 7)]
    (cost,) = costs_of({PLAIN: plain, "eager": eager})
    assert (cost.wall_ratio, cost.processor_ratio) == (0.5, 0.25)
    assert (cost.target, cost.num_stored) == (0.97, 7)
    assert table([cost]).splitlines()[-1] == "| eager | 0.500 | 0.250 | 0.97 | 7 |"


def wrong_token(prompts: list[list[int]]) -> Taken:
    return Taken(1.0, 1.0, [[*prompt[-2:-1], 0] for prompt in prompts])


def with_a_hit(prompts: list[list[int]]) -> Taken:
    return Taken(1.0, 1.0, [prompt[-2:] for prompt in prompts], num_hits=1)


@pytest.mark.parametrize(
    ("broken", "message"), [(wrong_token, "tokens of eager"), (with_a_hit, "loaded for 1 prompts")]
)
def test_times_of_a_wrong_result_do_not_count(broken: Callable[..., Taken], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        in_turns({PLAIN: side(1.0), "eager": broken}, LOAD, num_rounds=1, seed=0)


def test_its_command_judges_when_told_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from contextlib import nullcontext

    def fake(setup: object, answer_tokens: int) -> object:
        slow = getattr(setup, "kv_transfer", None) is not None
        return nullcontext(side(2.0 if slow else 1.0))

    monkeypatch.setattr(idle, "side_in_process", fake)
    arguments = ["--model", str(tmp_path), "--rounds", "2", "--prompt-tokens", "40"]
    assert idle.main(arguments) == 0
    assert "| lazy | 0.500 | 0.500 | 0.99 |" in capsys.readouterr().out
    assert idle.main([*arguments, "--check", "--modes", "eager"]) == 1
    with pytest.raises(SystemExit):
        idle.main([*arguments, "--rounds", "0"])


def test_an_engine_in_its_own_process_runs_a_round(tmp_path: Path) -> None:
    """On a tiny model: tokens come back, blocks were stored and none was hit; the process ends."""
    from tiny_models import VOCABULARY, build_model

    model = build_model("llama", tmp_path)
    setup = idle.setup_of(model, LOAD, "eager", "16MiB")
    with idle.side_in_process(setup, LOAD.answer_tokens) as run:
        taken = run(LOAD.prompts(1, VOCABULARY))
    assert [len(tokens) for tokens in taken.tokens] == [2, 2, 2]
    assert (taken.num_hits, taken.num_stored) == (0, 6)
    assert min(taken.wall_s, taken.processor_s) > 0

"""Whether a load is made: by a number of tokens, or by what was measured."""

import pytest
from kvferry.engine.worth import DECLINED_PER_LOAD, WINDOW, LoadWorth, StepClock


def test_a_number_of_tokens_decides_alone() -> None:
    worth = LoadWorth(32)
    worth.saw_load(100, 1e6)
    worth.saw_step(100, 1e-6)
    assert [worth.allows(n) for n in (31, 32, 1000)] == [False, True, True]


def test_zero_always_loads() -> None:
    assert LoadWorth(0).allows(1)


@pytest.mark.parametrize("saw", ["nothing", "load", "step"])
def test_nothing_is_declined_before_both_rates_were_seen(saw: str) -> None:
    worth = LoadWorth(None)
    if saw == "load":
        worth.saw_load(10, 1e6)
    elif saw == "step":
        worth.saw_step(1000, 1e-6)
    assert worth.allows(1)
    assert not worth.measured


def test_a_load_that_is_slower_than_computing_is_declined() -> None:
    worth = LoadWorth(None)
    worth.saw_step(1000, 1.0)  # 1 ms a token
    worth.saw_load(100, 0.3)  # 3 ms a token
    assert not worth.allows(50)
    assert not worth.allows(5000)


def test_a_short_hit_is_not_worth_a_loads_latency() -> None:
    worth = LoadWorth(None)
    worth.saw_step(1000, 1.0)
    worth.saw_load(1000, 0.1)  # 0.1 ms a token, but no load was faster than 0.1 s
    assert worth.load_s(10) == pytest.approx(0.1)
    assert not worth.allows(99)
    assert worth.allows(101)


def test_what_was_long_ago_is_forgotten() -> None:
    worth = LoadWorth(None)
    worth.saw_step(1000, 1.0)
    worth.saw_load(100, 100.0)
    assert not worth.allows(1000)
    for _ in range(WINDOW):
        worth.saw_load(100, 0.01)
    assert worth.allows(1000)


def test_loads_that_were_slow_are_tried_again() -> None:
    worth = LoadWorth(None)
    worth.saw_step(1000, 1.0)
    for _ in range(2):
        worth.saw_load(100, 100.0)
    for _ in range(2 * DECLINED_PER_LOAD):
        assert not worth.allows(1000)
        worth.saw_decline()
    assert worth.allows(1000)
    worth.saw_load(100, 0.01)
    assert worth.allows(1000)


def test_a_step_of_decoding_says_nothing_about_prefill() -> None:
    worth = LoadWorth(None)
    worth.saw_step(8, 1.0)
    worth.saw_load(100, 1e6)
    assert not worth.measured


def test_steps_that_overlap_are_timed_from_the_end_of_the_one_before() -> None:
    clock = StepClock()
    clock.built(0.0, 100)
    clock.built(0.5, 200)  # built while the first one runs
    assert clock.ended(2.0) == (100, 2.0)
    assert clock.ended(5.0) == (200, 3.0)
    assert clock.ended(6.0) is None
    clock.built(10.0, 300)  # after a pause
    assert clock.ended(11.0) == (300, 1.0)

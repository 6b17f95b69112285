"""Tokens with and without kvferry, on vLLM's real engine: models x ranks x connectors x scheduling.

Everywhere both pools evict, requests are preempted and prompts come in pieces. In CI each model
runs once for each number of ranks; with ``KVFERRY_SLOW=1``, all in every combination. One engine
without kvferry is the reference for all runs of its model, those on two ranks too: in float32 their
tokens are the same.
"""

import functools
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from real_runs import (
    CONNECTORS,
    hold_tokens_equal,
    put_async_scheduling_back,
    without_kvferry,
)
from tiny_models import build_model, shared_prefix_prompts

SEED = 22
NUM_REQUESTS = 200
MAX_TOKENS = 24

Run = tuple[str, int, str, str]
CI_RUNS: list[Run] = [
    ("llama", 1, "offloading", "async"),
    ("llama", 2, "simple", "async"),
    ("mistral", 1, "simple_lazy", "sync"),
    ("mistral", 2, "offloading", "sync"),
    ("gemma3", 1, "simple", "sync"),
    ("gemma3", 2, "offloading", "async"),
    ("gpt_oss", 1, "simple", "async"),
    ("gpt_oss", 2, "simple_lazy", "sync"),
]
ALL_RUNS: list[Run] = list(
    itertools.product(
        ("llama", "mistral", "gemma3", "gpt_oss"), (1, 2), CONNECTORS, ("sync", "async")
    )
)
RUNS = ALL_RUNS if os.environ.get("KVFERRY_SLOW") == "1" else CI_RUNS


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    print(f"seed {SEED}")
    return shared_prefix_prompts(SEED, NUM_REQUESTS)


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("models")
    return lambda name: build_model(name, folder)


@pytest.fixture(scope="module")
def expected_of(
    model_of: Callable[[str], Path], prompts: list[list[int]]
) -> Callable[[str], list[list[int]]]:
    return functools.cache(lambda name: without_kvferry(model_of(name), prompts, MAX_TOKENS))


def test_ci_has_every_model_and_number_of_ranks_once() -> None:
    assert set(CI_RUNS) <= set(ALL_RUNS)
    assert len({run[:2] for run in CI_RUNS}) == len(CI_RUNS) == 8


@pytest.mark.parametrize(("name", "num_ranks", "connector", "scheduling"), RUNS)
def test_tokens_are_equal_under_pressure(
    name: str,
    num_ranks: int,
    connector: str,
    scheduling: str,
    prompts: list[list[int]],
    model_of: Callable[[str], Path],
    expected_of: Callable[[str], list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = expected_of(name)
    if scheduling == "async":
        put_async_scheduling_back(monkeypatch)
    num_preemptions = hold_tokens_equal(
        model_of(name),
        connector,
        prompts,
        expected,
        MAX_TOKENS,
        is_async=scheduling == "async",
        num_ranks=num_ranks,
    )
    if (name, scheduling) != ("mistral", "async"):
        # There a window gives a block back in time whenever the next one is needed.
        assert num_preemptions > 0

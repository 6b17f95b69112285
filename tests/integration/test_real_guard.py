"""The guard in vLLM's real engine, with each way of setting the flag, for both connectors.

The core overrules the connector's answer to a bypassing request, so each test records what the
connector itself answered, and its ``snapshot`` before and after it did.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from tiny_models import BLOCK_TOKENS, Answer, TinyEngine, build_model, shared_prefix_prompts
from tiny_models import tiny_engine as start_engine
from vllm.config import VllmConfig

SEED = 70
PINS = {"KVFerrySimpleConnector": True, "KVFerryOffloadingConnector": False}

BYPASSES: dict[str, dict[str, Any]] = {
    "prompt_logprobs": {"prompt_logprobs": 1},
    "prompt_logprob_token_ids": {"prompt_logprob_token_ids": [[3, 4]]},
    "by_hand": {"skip_reading_prefix_cache": True},
}


@pytest.fixture(scope="module", params=PINS)
def connector(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engine(connector: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyEngine]:
    llama = build_model("llama", tmp_path_factory.mktemp("models"))
    print(f"seed {SEED}")
    with start_engine(llama, connector=connector) as engine:
        yield engine


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return shared_prefix_prompts(SEED, 1)[0]


@pytest.fixture
def right(engine: TinyEngine, prompt: list[int]) -> Answer:
    """The answer without any cache; afterwards the prompt is in the host cache and only there."""
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    (answer,) = engine.generate([prompt])
    assert answer.num_cached_tokens == 0
    engine.drain()
    assert engine.scheduler.reset_prefix_cache()
    assert engine.connector.snapshot()["ready"] == len(prompt) // BLOCK_TOKENS
    return answer


@dataclass
class Asked:
    """One call of the connector's ``get_num_new_matched_tokens``."""

    bypassing: bool
    answer: tuple[int | None, bool]
    before: dict[str, Any]
    after: dict[str, Any]


@pytest.fixture
def asked(engine: TinyEngine, right: Answer) -> Iterator[list[Asked]]:
    """What the connector itself is asked and answers from here on."""
    connector, calls = engine.connector, []
    answer = connector.get_num_new_matched_tokens

    def watched(request: Any, num_computed: int) -> tuple[int | None, bool]:
        before = connector.snapshot()
        given: tuple[int | None, bool] = answer(request, num_computed)
        bypassing = bool(request.skip_reading_prefix_cache)
        calls.append(Asked(bypassing, given, before, connector.snapshot()))
        return given

    connector.get_num_new_matched_tokens = watched
    yield calls
    connector.get_num_new_matched_tokens = answer


@pytest.fixture(params=BYPASSES)
def sampling(
    request: pytest.FixtureRequest, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """Parameters of a bypassing request."""
    if request.param == "prompt_logprob_token_ids":
        # The front end takes it with the second model runner only, which is not there on a CPU;
        # the engine itself was started with the first one, which leaves the parameter alone.
        monkeypatch.setattr(VllmConfig, "use_v2_model_runner", True)
        rows = BYPASSES[request.param][request.param] * (len(prompt) - 1)
        return {request.param: rows}
    return BYPASSES[request.param]


def changed(call: Asked) -> set[str]:
    return {name for name in call.before if call.before[name] != call.after[name]}


def test_a_bypassing_request_is_declined_by_the_connector_itself(
    engine: TinyEngine,
    prompt: list[int],
    right: Answer,
    asked: list[Asked],
    sampling: dict[str, Any],
) -> None:
    idle = engine.connector.snapshot()
    (answer,) = engine.generate([prompt], **sampling)
    engine.drain()
    assert [(call.bypassing, call.answer) for call in asked] == [(True, (0, False))]
    assert changed(asked[0]) == {"requests"}
    assert engine.connector.snapshot() == idle  # nothing looked up, loaded, stored or held
    assert answer.token_ids == right.token_ids
    assert answer.num_cached_tokens == 0
    if "prompt_logprobs" in sampling:
        assert answer.prompt_logprobs is not None
        there = [bool(entry) for entry in answer.prompt_logprobs]
        assert there == [False] + [True] * (len(prompt) - 1)
    engine.check_idle()


def test_an_explicit_false_together_with_prompt_logprobs_reads(
    engine: TinyEngine, prompt: list[int], right: Answer, asked: list[Asked]
) -> None:
    num_host_tokens = len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS
    before = engine.connector.snapshot()
    (answer,) = engine.generate([prompt], prompt_logprobs=1, skip_reading_prefix_cache=False)
    engine.drain()
    after = engine.connector.snapshot()
    assert [(call.bypassing, call.answer) for call in asked] == [(False, (num_host_tokens, True))]
    assert after["lookups"] == before["lookups"] + 1
    assert after["hits"] == before["hits"] + 1
    assert after["loaded_chunks"] == before["loaded_chunks"] + len(prompt) // BLOCK_TOKENS
    assert answer.num_cached_tokens == num_host_tokens
    assert answer.token_ids == right.token_ids
    engine.check_idle()


def test_a_pin_left_by_the_same_request_is_gone(
    engine: TinyEngine,
    connector: str,
    prompt: list[int],
    right: Answer,
    asked: list[Asked],
    sampling: dict[str, Any],
) -> None:
    """A real hit, pinned, right before the core asks for the same request id, bypassing."""
    watched = engine.connector.get_num_new_matched_tokens

    def hit_first(request: Any, num_computed: int) -> Any:
        request.skip_reading_prefix_cache = False
        watched(request, num_computed)
        request.skip_reading_prefix_cache = True
        return watched(request, num_computed)

    engine.connector.get_num_new_matched_tokens = hit_first
    (answer,) = engine.generate([prompt], **sampling)
    num_chunks = len(prompt) // BLOCK_TOKENS
    hit, bypass = asked
    assert hit.answer == (num_chunks * BLOCK_TOKENS, True)
    held = (hit.after["reading"], hit.after["leases"])
    assert held == ((num_chunks, 1) if PINS[connector] else (0, 0))
    assert bypass.answer == (0, False)
    assert changed(bypass) == ({"reading", "ready", "leases"} if PINS[connector] else set())
    assert (bypass.after["reading"], bypass.after["leases"]) == (0, 0)
    assert answer.num_cached_tokens == 0
    assert answer.token_ids == right.token_ids
    engine.check_idle()

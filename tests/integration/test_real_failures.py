"""S20 on vLLM's real engine, with one KV cache group, two and three, under both of its policies.

A load that fails is computed again under ``recompute`` and ends its own request, alone, under
``fail``; a store that fails is a later miss. Whatever happens, no answer has wrong tokens.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from kvferry.engine.devices.cpu import CpuDevice
from kvferry.engine.types import Direction
from real_runs import CONNECTORS, MAX_MODEL_LEN, pressed_engine, without_kvferry
from tiny_models import TinyEngine, build_model, shared_prefix_prompts, tiny_engine
from vllm import SamplingParams

SEED = 24
MAX_TOKENS = 8
CASES = [
    ("llama", 1, "offloading"),
    ("gpt_oss", 2, "simple"),
    ("gemma3", 3, "offloading"),
]


@dataclass
class Failures:
    """Directions of which the device fails the next job, once each."""

    due: set[Direction] = field(default_factory=set)


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> Iterator[Failures]:
    failures, launch = Failures(), CpuDevice.launch

    def told(self: CpuDevice, piece: Any, *args: Any) -> Any:
        if piece.direction in failures.due:
            failures.due.discard(piece.direction)
            raise RuntimeError(f"told to fail this {piece.direction}")
        return launch(self, piece, *args)

    monkeypatch.setattr(CpuDevice, "launch", told)
    yield failures
    assert not failures.due, "never asked for"


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("models")
    return lambda name: build_model(name, folder)


Outcome = tuple[str | None, list[int]]


def ask(engine: TinyEngine, *prompts: list[int]) -> list[Outcome]:
    """How each request ended, and its tokens. The "GPU" has nothing cached before."""
    engine.scheduler.reset_prefix_cache()
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True, detokenize=False)
    given: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = [out.outputs[0] for out in engine.llm.generate(given, params, use_tqdm=False)]
    engine.drain()
    return [(output.finish_reason, list(output.token_ids)) for output in outputs]


def counts(engine: TinyEngine) -> tuple[int, int, int]:
    snapshot = engine.connector.snapshot()
    return snapshot["failed_loads"], snapshot["failed_stores"], snapshot["loaded_chunks"]


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize(("name", "num_groups", "connector"), CASES)
def test_s20_a_failed_load_and_a_failed_store(
    name: str,
    num_groups: int,
    connector: str,
    policy: str,
    failures: Failures,
    model_of: Callable[[str], Path],
) -> None:
    print(f"seed {SEED}")
    first, second, third = (shared_prefix_prompts(SEED + i, 1)[0] for i in range(3))
    with tiny_engine(
        model_of(name),
        connector=CONNECTORS[connector][0],
        policy=policy,
        num_blocks=120,
        max_model_len=MAX_MODEL_LEN,
    ) as engine:
        assert len(engine.scheduler.kv_cache_config.kv_cache_groups) == num_groups
        (right,) = ask(engine, first)

        failures.due.add(Direction.LOAD)
        again, beside = ask(engine, first, second)
        if policy == "recompute":
            assert again == right
        else:
            assert again[0] == "error"
        assert beside[0] == "length"
        assert counts(engine) == (1, 0, 0)

        failures.due.add(Direction.STORE)
        (stored,) = ask(engine, third)
        assert counts(engine) == (1, 1, 0)
        before = engine.connector.snapshot()["loaded_chunks"]
        # The first time its chunks are not all there: whatever is, the tokens are the same.
        assert ask(engine, third) == [stored]
        missed = engine.connector.snapshot()["loaded_chunks"] - before
        assert ask(engine, third) == [stored]
        found = engine.connector.snapshot()["loaded_chunks"] - before - missed
        assert found > missed

        # The engine goes on, with the host cache and with the right tokens.
        assert ask(engine, first, second) == [right, beside]
        ask(engine, first)
        assert counts(engine)[:2] == (1, 1)
        engine.check_idle()


@pytest.mark.parametrize(("name", "connector"), [(case[0], case[2]) for case in CASES])
def test_many_failed_loads_at_once_hold_nobody_up(
    name: str,
    connector: str,
    model_of: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half of the loads fail while the requests that load hold nearly all of the "GPU"."""
    launch, launched = CpuDevice.launch, Counter[Direction]()

    def told(self: CpuDevice, piece: Any, *args: Any) -> Any:
        launched[piece.direction] += 1
        if piece.direction is Direction.LOAD and launched[Direction.LOAD] % 2 == 0:
            raise RuntimeError("told to fail every second load")
        return launch(self, piece, *args)

    model, prompts = model_of(name), shared_prefix_prompts(SEED + 3, 60)
    expected = without_kvferry(model, prompts, MAX_TOKENS)
    monkeypatch.setattr(CpuDevice, "launch", told)
    with pressed_engine(model, connector) as engine:
        add_requests(engine, prompts)
        outputs: dict[str, list[int]] = {}
        for _ in range(20_000):  # it takes some hundreds
            for output in engine.llm.llm_engine.step():
                outputs[output.request_id] = list(output.outputs[0].token_ids)
            if not engine.llm.llm_engine.has_unfinished_requests():
                break
        assert engine.scheduler.get_num_unfinished_requests() == 0, repr(engine.connector)
        engine.check_idle()
        assert engine.connector.snapshot()["failed_loads"] > 5
    assert [outputs[str(index)] for index in range(len(prompts))] == expected


def add_requests(engine: TinyEngine, prompts: list[list[int]]) -> None:
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True, detokenize=False)
    for index, prompt in enumerate(prompts):
        engine.llm.llm_engine.add_request(str(index), {"prompt_token_ids": prompt}, params)

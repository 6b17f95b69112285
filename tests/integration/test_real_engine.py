"""The simple connector on vLLM's real engine: tokens are those of an engine without it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kvferry.engine.messages import StepOrders
from kvferry.engine.types import Direction
from tiny_models import TinyEngine, build_model, shared_prefix_prompts, tiny_engine
from vllm import SamplingParams

SEED = 20
PRESSURE: dict[str, Any] = {"max_num_batched_tokens": 256, "max_num_seqs": 6}
"""Prompts of up to 440 tokens come in pieces, and six running requests do not fit in 40 blocks."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    print(f"seed {SEED}")
    return shared_prefix_prompts(SEED, 200)


@pytest.fixture(scope="module")
def expected(llama: Path, prompts: list[list[int]]) -> list[list[int]]:
    """The tokens of an engine without a connector and without prefix caching."""
    with tiny_engine(llama, connector=None, num_blocks=400, enable_prefix_caching=False) as engine:
        return [answer.token_ids for answer in engine.generate(prompts)]


@pytest.fixture
def engine(llama: Path) -> Iterator[TinyEngine]:
    with tiny_engine(llama) as engine:
        yield engine


def test_tokens_are_equal_under_pressure(
    llama: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """200 requests with shared prefixes; a pool small enough to evict, preempt and chunk."""
    with tiny_engine(llama, **PRESSURE) as engine:
        answers = engine.generate(prompts)
        assert engine.num_preemptions > 0
        engine.check_idle()
        snapshot, worker = engine.connector.snapshot(), engine.worker.snapshot()
    assert [answer.token_ids for answer in answers] == expected
    num_loaded = snapshot["loaded_chunks"] * 32
    num_prompt = sum(map(len, prompts))
    assert num_loaded >= 0.3 * num_prompt, f"{num_loaded} of {num_prompt} tokens from the host"
    assert worker["failed_jobs"] == 0


def test_a_corrupted_byte_changes_tokens(llama: Path, prompts: list[list[int]]) -> None:
    """The comparison above is able to fail: one byte of each stored block is flipped."""
    prompt = prompts[0]
    with tiny_engine(llama, extra_config={"integrity": "off"}) as engine:
        (right,) = engine.generate([prompt], max_tokens=16)
        engine.drain()
        slots = engine.worker._worker._engine._arena.slots
        stride = engine.worker._worker._engine._arena.slot_stride_bytes
        slots[3::stride] ^= 0x40  # in the exponent of the first float of every slot
        engine.scheduler.reset_prefix_cache()
        (wrong,) = engine.generate([prompt], max_tokens=16)
        assert wrong.num_cached_tokens > 0
    assert wrong.token_ids != right.token_ids


def test_a_bypassing_request_has_all_its_prompt_logprobs(
    engine: TinyEngine, prompts: list[list[int]]
) -> None:
    """S24 on the real engine; what the connector itself answered is recorded."""
    prompt = prompts[0]
    engine.generate([prompt])
    engine.drain()
    engine.scheduler.reset_prefix_cache()
    before = engine.connector.snapshot()
    answers = record_answers(engine)
    for _ in range(3):
        (answer,) = engine.generate([prompt], prompt_logprobs=1)
        assert answer.prompt_logprobs is not None
        assert answer.prompt_logprobs[0] is None
        assert all(entry for entry in answer.prompt_logprobs[1:])
        assert len(answer.prompt_logprobs) == len(prompt)
    engine.drain()
    assert answers == [(0, False)] * 3
    assert engine.connector.snapshot() == before
    engine.check_idle()


def record_answers(engine: TinyEngine) -> list[tuple[int | None, bool]]:
    answers: list[tuple[int | None, bool]] = []
    answer = engine.connector.get_num_new_matched_tokens

    def asked(request: Any, num_computed: int) -> tuple[int | None, bool]:
        answers.append(answer(request, num_computed))
        return answers[-1]

    engine.connector.get_num_new_matched_tokens = asked
    return answers


def step_with(engine: TinyEngine, between: Callable[[], None]) -> list[StepOrders]:
    """One step of the core, with something happening between its planning and its execution."""
    seen: list[StepOrders] = []
    schedule = engine.scheduler.schedule

    def planned(*args: Any) -> Any:
        engine.scheduler.schedule = schedule
        output = schedule(*args)
        seen.append(output.kv_connector_metadata.orders)
        between()
        return output

    engine.scheduler.schedule = planned
    engine.llm.llm_engine.step()
    return seen


def test_an_abort_while_loading(engine: TinyEngine, prompts: list[list[int]]) -> None:
    prompt = prompts[0]
    engine.generate([prompt])
    engine.drain()
    engine.scheduler.reset_prefix_cache()
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, detokenize=False)
    engine.llm.llm_engine.add_request("aborted", {"prompt_token_ids": prompt}, params)
    (orders,) = step_with(engine, lambda: engine.llm.llm_engine.abort_request(["aborted"]))
    assert orders.loads
    engine.check_idle()
    assert engine.scheduler.kv_cache_manager.usage == 0


def test_a_reset_with_a_store_and_a_load_in_flight(
    engine: TinyEngine, prompts: list[list[int]]
) -> None:
    """I6: nothing from before the reset is found after it; vLLM's own answer is no."""
    loaded, stored = prompts[0], shared_prefix_prompts(SEED + 1, 1)[0]
    (right,) = engine.generate([loaded])
    engine.drain()
    engine.scheduler.reset_prefix_cache()
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False)
    for name, prompt in (("loads", loaded), ("stores", stored)):
        engine.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def reset() -> None:
        assert engine.scheduler.reset_prefix_cache(reset_connector=True) is False
        doomed.append(engine.connector.snapshot()["doomed"])

    doomed: list[float] = []
    (orders,) = step_with(engine, reset)
    assert orders.loads
    assert orders.stores
    planned = (*orders.loads, *orders.stores)
    assert doomed == [sum(len(part.slots) for order in planned for part in order.segments)]
    for _ in range(1000):
        if not engine.llm.llm_engine.has_unfinished_requests():
            break
        engine.llm.llm_engine.step()
    engine.drain()
    assert engine.connector.snapshot()["ready"] == 0
    engine.scheduler.reset_prefix_cache()
    (again,) = engine.generate([loaded])
    assert again.num_cached_tokens == 0
    assert again.token_ids == right.token_ids
    engine.check_idle()


def test_two_engines_one_after_the_other(llama: Path, prompts: list[list[int]]) -> None:
    answers = []
    for _ in range(2):
        with tiny_engine(llama) as engine:
            for _ in range(2):
                answers.append([a.token_ids for a in engine.generate(prompts[:10])])
                engine.drain()
                engine.scheduler.reset_prefix_cache()
            assert engine.connector.snapshot()["loaded_chunks"] > 0
            engine.check_idle()
            worker = engine.worker
        assert worker.snapshot()["arena_bytes"] == 0  # closed with the engine
    assert answers[1:] == answers[:-1]


def test_a_failed_load_and_a_failed_store(
    llama: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S20: the load is computed again, the store is a later miss, the engine goes on."""
    from kvferry.engine.devices.cpu import CpuDevice

    failing: set[Direction] = set()
    launch = CpuDevice.launch

    def broken(self: CpuDevice, piece: Any, *args: Any) -> Any:
        if piece.direction in failing:
            failing.discard(piece.direction)
            raise RuntimeError(f"told to fail this {piece.direction}")
        return launch(self, piece, *args)

    monkeypatch.setattr(CpuDevice, "launch", broken)
    first, second = prompts[0], shared_prefix_prompts(SEED + 2, 1)[0]
    with tiny_engine(llama) as engine:
        (right,) = engine.generate([first])
        engine.drain()
        engine.scheduler.reset_prefix_cache()
        failing.add(Direction.LOAD)
        (again,) = engine.generate([first])
        assert again.token_ids == right.token_ids
        assert not failing
        failing.add(Direction.STORE)
        engine.generate([second])
        engine.drain()
        assert engine.connector.snapshot()["failed_jobs"] == 2
        engine.scheduler.reset_prefix_cache()
        (missed,) = engine.generate([second])
        assert missed.num_cached_tokens == 0
        engine.check_idle()


def test_a_failed_load_fails_its_request_alone_under_vllms_default_policy(
    llama: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvferry.engine.devices.cpu import CpuDevice

    launch = CpuDevice.launch
    with tiny_engine(llama, policy="fail") as engine:
        (right,) = engine.generate([prompts[0]])
        engine.drain()
        engine.scheduler.reset_prefix_cache()

        def broken(self: CpuDevice, piece: Any, *args: Any) -> Any:
            if piece.direction is Direction.LOAD:
                raise RuntimeError("told to fail")
            return launch(self, piece, *args)

        monkeypatch.setattr(CpuDevice, "launch", broken)
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False)
        outputs = engine.llm.generate(
            [{"prompt_token_ids": prompts[0]}, {"prompt_token_ids": [*range(3, 60)]}],
            params,
            use_tqdm=False,
        )
        assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length"]
        monkeypatch.setattr(CpuDevice, "launch", launch)
        (again,) = engine.generate([prompts[0]])
        assert again.token_ids == right.token_ids
        engine.check_idle()


def test_torch_is_on_one_thread() -> None:
    """Hybrid models are not deterministic with more."""
    assert torch.get_num_threads() == 1

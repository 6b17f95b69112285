"""The guard: a request that must not read the cache is turned away before any lookup.

vLLM's core forces ``(0, False)`` for such a request after the connector has answered, so nothing
here looks at what the engine puts out: the tests record what the connector itself answered, which
of the ledger's reads it used, and its snapshot before and after.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kvferry.engine.types import Direction
from kvferry.integration.vllm.connector import OffloadConnectorBase
from real_scheduler import Engine, changed, tokens

PROMPT = tokens(0, 12)

BYPASSES: dict[str, dict[str, Any]] = {
    "prompt_logprobs": {"prompt_logprobs": 1},
    "prompt_logprob_token_ids": {"prompt_logprob_token_ids": [1, 2]},
    "by_hand": {"skip_reading_prefix_cache": True},
}


@dataclass(frozen=True)
class Case:
    """One connector. ``num_chunks`` is what the prompt's three blocks are to it."""

    connector: str
    num_chunks: int
    extra_config: dict[str, Any]
    pins: bool

    def engine(self, model: Path, **kwargs: Any) -> Engine:
        return Engine(model, connector=self.connector, extra_config=self.extra_config, **kwargs)


CASES = {
    "simple": Case("KVFerrySimpleConnector", 3, {}, pins=True),
    "offloading": Case("KVFerryOffloadingConnector", 1, {"blocks_per_chunk": 3}, pins=False),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture
def engine(case: Case, async_scheduling: bool, model_config_dir: Path) -> Engine:
    return case.engine(model_config_dir, async_scheduling=async_scheduling)


class Recorder:
    """Records the connector's own answers, and every read of the ledger made while it answers."""

    READS = ("readable", "readable_at", "state_of", "pin", "match_prefix")

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: list[tuple[str, tuple[int | None, bool]]] = []
        self.reads: list[str] = []
        self._asking = False
        connector = engine.connector
        answer = connector.get_num_new_matched_tokens

        def asked(request: Any, num_computed: int) -> tuple[int | None, bool]:
            self._asking = True
            try:
                result = answer(request, num_computed)
            finally:
                self._asking = False
            self.answers.append((request.request_id, result))
            return result

        monkeypatch.setattr(connector, "get_num_new_matched_tokens", asked)
        ledger_type = type(engine.manager.core.ledger)
        for name in self.READS:
            if hasattr(ledger_type, name):
                monkeypatch.setattr(ledger_type, name, self._spy(name, getattr(ledger_type, name)))

    def _spy(self, name: str, read: Callable[..., Any]) -> Callable[..., Any]:
        def spied(*args: Any, **kwargs: Any) -> Any:
            if self._asking:
                self.reads.append(name)
            return read(*args, **kwargs)

        return spied


def warm(engine: Engine, case: Case) -> None:
    """The prompt's three blocks are in the host cache, and nowhere else."""
    engine.add("warm", [*PROMPT, 1])
    engine.run()
    engine.reset_gpu_cache()
    assert engine.snapshot()["ready"] == case.num_chunks
    engine.ranks.open.clear()


@pytest.mark.parametrize("how", BYPASSES)
def test_a_bypassing_request_is_answered_before_any_lookup(
    case: Case, engine: Engine, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    warm(engine, case)
    recorder = Recorder(engine, monkeypatch)
    before = engine.snapshot()
    engine.add("bypass", [*PROMPT, 2], max_tokens=3, **BYPASSES[how])
    engine.step()
    assert recorder.answers == [("bypass", (0, False))]
    assert recorder.reads == []
    assert changed(before, engine.snapshot()) == {"requests"}
    assert engine.ranks.open == {}  # neither loaded nor stored a second time
    engine.run()
    engine.check_idle()


def test_the_recorder_sees_the_reads_of_an_ordinary_request(
    case: Case, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm(engine, case)
    recorder = Recorder(engine, monkeypatch)
    engine.add("reads", [*PROMPT, 2])
    engine.step()
    assert recorder.answers == [("reads", (12, True))]
    assert set(recorder.reads) >= ({"readable", "pin"} if case.pins else {"readable"})


def test_an_explicit_false_wins_over_prompt_logprobs(
    case: Case, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm(engine, case)
    recorder = Recorder(engine, monkeypatch)
    before = engine.snapshot()
    engine.add("reads", [*PROMPT, 2], prompt_logprobs=1, skip_reading_prefix_cache=False)
    engine.step()
    assert recorder.answers == [("reads", (12, True))]
    assert engine.snapshot()["lookups"] == before["lookups"] + 1
    assert len(engine.ranks.of(Direction.LOAD)) == 1


@pytest.mark.parametrize("how", BYPASSES)
def test_a_pin_left_by_the_same_request_id_is_dropped(case: Case, engine: Engine, how: str) -> None:
    """The simple manager's test of the contract page: hit and pin, then ask again bypassing."""
    warm(engine, case)
    idle = engine.snapshot()
    hit = engine.request("same", [*PROMPT, 2])
    assert engine.connector.get_num_new_matched_tokens(hit, 0) == (12, True)
    pinned = engine.snapshot()
    assert (pinned["reading"], pinned["leases"]) == ((case.num_chunks, 1) if case.pins else (0, 0))
    again = engine.request("same", [*PROMPT, 2], **BYPASSES[how])
    assert engine.connector.get_num_new_matched_tokens(again, 0) == (0, False)
    after = engine.snapshot()
    assert changed(idle, after) == {"requests", "lookups"}
    assert after["lookups"] == pinned["lookups"]
    engine.manager.core.check()


def test_bypassing_again_and_again_counts_and_pins_nothing(case: Case, engine: Engine) -> None:
    """S24."""
    warm(engine, case)
    before = engine.snapshot()
    for i in range(5):
        engine.add(f"bypass-{i}", [*PROMPT, 2], prompt_logprobs=1)
        engine.run()
    assert changed(before, engine.snapshot()) == set()
    engine.check_idle()


def test_a_bypassing_request_is_not_counted_as_the_connectors_hit(
    case: Case, engine: Engine
) -> None:
    warm(engine, case)
    engine.add("bypass", [*PROMPT, 2], prompt_logprobs=1)
    engine.step()
    assert engine.scheduler.connector_prefix_cache_stats.hits == 0


def test_what_it_computes_is_stored_when_it_was_evicted(case: Case, engine: Engine) -> None:
    """Its blocks are offered like anyone's: here the chunks are gone from the host."""
    warm(engine, case)
    engine.manager.core.ledger.invalidate_all()
    assert engine.snapshot()["ready"] == 0
    engine.add("bypass", [*PROMPT, 2], max_tokens=3, prompt_logprobs=1)
    engine.step()
    (store,) = engine.ranks.of(Direction.STORE)
    assert list(store.segments[0].blocks) == engine.blocks_of("bypass")[:3]
    engine.run()
    assert engine.snapshot()["ready"] == case.num_chunks
    engine.check_idle()


def test_what_is_still_there_is_not_copied_but_its_recency_is_refreshed(
    case: Case, model_config_dir: Path
) -> None:
    engine = case.engine(model_config_dir, num_slots=2 * case.num_chunks)
    warm(engine, case)
    engine.add("other", [*tokens(1, 12), 1])
    engine.run()  # the pool is full now, and the prompt's chunks are the older half
    engine.reset_gpu_cache()
    engine.add("bypass", [*PROMPT, 2], prompt_logprobs=1)
    engine.step()
    assert engine.ranks.of(Direction.STORE) == []
    engine.run()
    engine.add("third", [*tokens(2, 12), 1])
    engine.run()  # evicts half of it: not the prompt's chunks, which were used last
    engine.reset_gpu_cache()
    reads = engine.request("reads", [*PROMPT, 3])
    assert engine.connector.get_num_new_matched_tokens(reads, 0) == (12, True)


def test_a_preempted_bypassing_request_comes_back_while_its_store_is_in_flight(
    case: Case, async_scheduling: bool, model_config_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S25: ``(0, False)`` again, its bookkeeping done, the old fences kept, no assertion."""
    # Six blocks, of which it uses four: the second time it is given some of the first ones again.
    engine = case.engine(model_config_dir, async_scheduling=async_scheduling, num_blocks=7)
    engine.add("bypass", [*PROMPT, 2], max_tokens=8, prompt_logprobs=1)
    engine.step()
    (store,) = engine.ranks.of(Direction.STORE)
    fences = engine.snapshot()["fences"]
    assert fences == 3
    recorder = Recorder(engine, monkeypatch)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert engine.snapshot()["fences"] == fences
    engine.step()
    assert recorder.answers == [("bypass", (0, False))]
    assert recorder.reads == []
    assert engine.snapshot()["requests"] == 1
    # Its blocks were given out again (to itself), so the old store had to be flushed.
    assert store.job_id in engine.ranks.flushed
    engine.run()
    engine.check_idle()


def test_nothing_is_lost_when_the_last_request_ends(case: Case, engine: Engine) -> None:
    """After the end, with no further request, the engine keeps saying that it has work until the
    blocks are READY in the host, and then stops saying it."""
    engine.add("bypass", PROMPT, prompt_logprobs=1)
    for _ in range(10):
        if not engine.scheduler.has_unfinished_requests():
            break
        engine.step()
    for _ in range(5):
        assert engine.connector.has_pending_push_work()
        assert engine.scheduler.has_requests()
        engine.step()
    engine.ranks.complete_all()
    engine.step()
    assert engine.snapshot()["ready"] == case.num_chunks
    assert not engine.connector.has_pending_push_work()
    engine.run()
    engine.check_idle()


def test_no_subclass_can_replace_the_guard() -> None:
    with pytest.raises(TypeError, match="get_num_new_matched_tokens"):

        class Around(OffloadConnectorBase):
            def get_num_new_matched_tokens(self, request: Any, num: int) -> Any:  # type: ignore[misc]
                return 1, True

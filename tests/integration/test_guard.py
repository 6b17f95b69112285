"""The guard: a request that must not read the cache is turned away before any lookup.

vLLM's core forces ``(0, False)`` for such a request after the connector has answered, so nothing
here looks at what the engine puts out: the tests record what the connector itself answered, which
of the ledger's reads it used, and its snapshot before and after.
"""

from collections.abc import Callable
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


@pytest.fixture(params=["sync", "async"])
def async_scheduling(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "async")


@pytest.fixture
def engine(async_scheduling: bool, model_config_dir: Any) -> Engine:
    return Engine(model_config_dir, async_scheduling=async_scheduling)


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


def warm(engine: Engine) -> None:
    """The prompt's three blocks are in the host cache, and nowhere else."""
    engine.add("warm", [*PROMPT, 1])
    engine.run()
    engine.reset_gpu_cache()
    assert engine.snapshot()["ready"] == 3
    engine.ranks.open.clear()


@pytest.mark.parametrize("how", BYPASSES)
def test_a_bypassing_request_is_answered_before_any_lookup(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    warm(engine)
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
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm(engine)
    recorder = Recorder(engine, monkeypatch)
    engine.add("reads", [*PROMPT, 2])
    engine.step()
    assert recorder.answers == [("reads", (12, True))]
    assert {"readable", "pin"} <= set(recorder.reads)


def test_an_explicit_false_wins_over_prompt_logprobs(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm(engine)
    recorder = Recorder(engine, monkeypatch)
    before = engine.snapshot()
    engine.add("reads", [*PROMPT, 2], prompt_logprobs=1, skip_reading_prefix_cache=False)
    engine.step()
    assert recorder.answers == [("reads", (12, True))]
    assert engine.snapshot()["lookups"] == before["lookups"] + 1
    assert len(engine.ranks.of(Direction.LOAD)) == 1


@pytest.mark.parametrize("how", BYPASSES)
def test_a_pin_left_by_the_same_request_id_is_dropped(engine: Engine, how: str) -> None:
    """The simple manager's test of the contract page: hit and pin, then ask again bypassing."""
    warm(engine)
    idle = engine.snapshot()
    hit = engine.request("same", [*PROMPT, 2])
    assert engine.connector.get_num_new_matched_tokens(hit, 0) == (12, True)
    pinned = engine.snapshot()
    assert (pinned["reading"], pinned["leases"]) == (3, 1)
    again = engine.request("same", [*PROMPT, 2], **BYPASSES[how])
    assert engine.connector.get_num_new_matched_tokens(again, 0) == (0, False)
    after = engine.snapshot()
    assert changed(idle, after) == {"requests", "lookups", "hits"}
    assert (after["lookups"], after["hits"]) == (pinned["lookups"], pinned["hits"])
    engine.manager.core.check()


def test_bypassing_again_and_again_counts_and_pins_nothing(engine: Engine) -> None:
    """S24."""
    warm(engine)
    before = engine.snapshot()
    for i in range(5):
        engine.add(f"bypass-{i}", [*PROMPT, 2], prompt_logprobs=1)
        engine.run()
    assert changed(before, engine.snapshot()) == set()
    engine.check_idle()


def test_a_bypassing_request_is_not_counted_as_the_connectors_hit(engine: Engine) -> None:
    warm(engine)
    engine.add("bypass", [*PROMPT, 2], prompt_logprobs=1)
    engine.step()
    assert engine.scheduler.connector_prefix_cache_stats.hits == 0


def test_what_it_computes_is_stored_when_it_was_evicted(engine: Engine) -> None:
    """Its blocks are offered like anyone's: here the chunks are gone from the host."""
    warm(engine)
    engine.manager.core.ledger.invalidate_all()
    assert engine.snapshot()["ready"] == 0
    engine.add("bypass", [*PROMPT, 2], max_tokens=3, prompt_logprobs=1)
    engine.step()
    (store,) = engine.ranks.of(Direction.STORE)
    assert list(store.segments[0].blocks) == engine.blocks_of("bypass")[:3]
    engine.run()
    assert engine.snapshot()["ready"] == 3
    engine.check_idle()


def test_what_is_still_there_is_not_copied_but_its_recency_is_refreshed(
    model_config_dir: Any,
) -> None:
    engine = Engine(model_config_dir, num_slots=6)
    warm(engine)
    engine.add("other", [*tokens(1, 12), 1])
    engine.run()  # the pool is full now: 3 + 3 chunks, the prompt's are the older ones
    engine.reset_gpu_cache()
    engine.add("bypass", [*PROMPT, 2], prompt_logprobs=1)
    engine.step()
    assert engine.ranks.of(Direction.STORE) == []
    engine.run()
    engine.add("third", [*tokens(2, 12), 1])
    engine.run()  # evicts three chunks: not the prompt's, which were used last
    engine.reset_gpu_cache()
    reads = engine.request("reads", [*PROMPT, 3])
    assert engine.connector.get_num_new_matched_tokens(reads, 0) == (12, True)


def test_a_preempted_bypassing_request_comes_back_while_its_store_is_in_flight(
    async_scheduling: bool, model_config_dir: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S25: ``(0, False)`` again, its bookkeeping done, the old fences kept, no assertion."""
    # Six blocks, of which it uses four: the second time it is given some of the first ones again.
    engine = Engine(model_config_dir, async_scheduling=async_scheduling, num_blocks=7)
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


def test_nothing_is_lost_when_the_last_request_ends(engine: Engine) -> None:
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
    assert engine.snapshot()["ready"] == 3
    assert not engine.connector.has_pending_push_work()
    engine.run()
    engine.check_idle()


def test_no_subclass_can_replace_the_guard() -> None:
    with pytest.raises(TypeError, match="get_num_new_matched_tokens"):

        class Around(OffloadConnectorBase):
            def get_num_new_matched_tokens(self, request: Any, num: int) -> Any:  # type: ignore[misc]
                return 1, True

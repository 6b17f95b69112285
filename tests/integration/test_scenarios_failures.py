"""Scenarios of faults seen in public: what fails, ends early or is reset; real scheduler."""

import pytest
from kvferry.engine.types import Direction
from kvferry.integration.vllm import KVFerrySimpleConnector
from real_scheduler import MakeEngine, changed, stored_tokens, tokens
from vllm.v1.request import RequestStatus


def test_s16_a_reset_with_a_store_and_a_load_in_flight(make_engine: MakeEngine) -> None:
    """Nothing old is served; slots come back; the load that was begun completes first."""
    engine = make_engine(num_slots=8)
    loaded, stored = tokens(0, 8), tokens(1, 8)
    engine.add("warm", [*loaded, 1])
    engine.run()
    engine.reset_gpu_cache()
    engine.add("loads", [*loaded, 2], max_tokens=3)
    engine.add("stores", [*stored, 2], max_tokens=3)
    engine.step()
    assert len(engine.ranks.of(Direction.LOAD)) == len(engine.ranks.of(Direction.STORE)) == 1
    # vLLM's own answer is no: a request is running. The connector has reset all the same.
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert engine.snapshot()["doomed"] == 4
    assert stored_tokens(engine, loaded) == stored_tokens(engine, stored) == 0
    engine.run()
    # What the two computed from old bytes is not stored either.
    assert stored_tokens(engine, loaded) == stored_tokens(engine, stored) == 0
    assert engine.snapshot()["free"] == 8
    engine.check_idle()
    engine.reset_gpu_cache()
    engine.add("again", [*loaded, 3])
    engine.run()
    assert stored_tokens(engine, loaded) == 8
    engine.check_idle()


def test_a_request_that_starts_over_after_a_reset_is_stored_again(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt = tokens(0, 8)
    engine.add("a", [*prompt, 1], max_tokens=4)
    engine.step()
    engine.ranks.complete_all()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert stored_tokens(engine, prompt) == 0
    engine.run()
    assert stored_tokens(engine, prompt) == 8
    engine.check_idle()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_s20_a_failed_load_is_recomputed_or_fails_alone_and_is_not_offered_again(
    make_engine: MakeEngine, policy: str
) -> None:
    engine = make_engine(policy=policy)
    prompt = tokens(0, 8)
    engine.add("warm", [*prompt, 1])
    engine.run()
    engine.reset_gpu_cache()
    request = engine.add("a", [*prompt, 2], max_tokens=2)
    engine.step()
    (load,) = engine.ranks.of(Direction.LOAD)
    engine.ranks.complete(load.job_id, error="TransferError: told to fail")
    engine.step()
    assert stored_tokens(engine, prompt) == 0
    engine.run()
    if policy == "recompute":
        assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED
        assert stored_tokens(engine, prompt) == 8  # computed anew, and stored anew
    else:
        assert request.status == RequestStatus.FINISHED_ERROR
        assert stored_tokens(engine, prompt) == 0  # its blocks hold no good bytes
    assert engine.snapshot()["failed_jobs"] == 1
    engine.check_idle()


def test_s21_failed_stores_are_never_served(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for i in range(9):
        engine.add(f"r{i}", tokens(i, 9))
        engine.step()
        for n, store in enumerate(engine.ranks.of(Direction.STORE)):
            engine.ranks.complete(store.job_id, error="told to fail" if (i + n) % 3 == 0 else None)
        engine.step()
    engine.run()
    served = [stored_tokens(engine, tokens(i, 9)) for i in range(9)]
    assert served == [0, 8, 8] * 3
    engine.check_idle()


def test_s23_per_request_state_returns_to_zero(make_engine: MakeEngine) -> None:
    engine = make_engine(num_slots=16)
    for i in range(1000):
        engine.add(f"r{i}", tokens(i % 50, 9))
        engine.step()
        engine.ranks.complete_all()
    engine.run()
    engine.check_idle()


def test_s26_a_load_past_its_deadline_wakes_its_request_and_keeps_its_slots_doomed(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine()
    prompt = tokens(0, 8)
    engine.add("warm", [*prompt, 1])
    engine.run()
    engine.reset_gpu_cache()
    request = engine.add("a", [*prompt, 2], max_tokens=2)
    engine.step()
    (load,) = engine.ranks.of(Direction.LOAD)
    engine.ranks.give_up(load.job_id)
    engine.step()
    assert engine.snapshot()["doomed"] == 2
    assert engine.snapshot()["fences"] == 2
    for _ in range(10):
        engine.step()
        for store in engine.ranks.of(Direction.STORE):
            engine.ranks.complete(store.job_id)
    assert request.is_finished()
    assert not engine.connector.has_pending_push_work()  # a hung job does not keep it spinning
    assert engine.snapshot()["doomed"] == 2
    engine.ranks.settle(load)
    engine.step()
    assert engine.snapshot()["doomed"] == 0
    engine.run()
    engine.check_idle()


def test_an_abort_while_loading_gives_everything_back(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    engine = make_engine(async_scheduling=async_scheduling)
    prompt = tokens(0, 8)
    engine.add("warm", [*prompt, 1])
    engine.run()
    engine.reset_gpu_cache()
    before = engine.snapshot()
    engine.add("a", [*prompt, 2])
    engine.step()
    engine.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    free = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks
    held = free()
    engine.step()
    assert engine.snapshot()["reading"] == 2
    assert free() == held  # the load still writes to them
    engine.run()
    assert free() > held
    assert changed(before, engine.snapshot()) == {"lookups", "hits", "loaded_chunks"}
    engine.check_idle()


def test_an_abort_while_waiting_drops_the_pin(make_engine: MakeEngine) -> None:
    """Nothing could be allocated for the hit; the request goes away while it waits."""
    engine = make_engine(num_blocks=6)
    prompt = tokens(0, 8)
    engine.add("warm", [*prompt, 1])
    engine.run()
    engine.reset_gpu_cache()
    engine.add("holds", tokens(1, 15), max_tokens=4)
    engine.step()
    engine.ranks.complete_all()
    engine.add("a", [*prompt, 2])
    engine.step()
    pins = isinstance(engine.connector, KVFerrySimpleConnector)
    assert engine.snapshot()["reading"] == (2 if pins else 0)
    engine.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert engine.snapshot()["reading"] == 0
    engine.run()
    engine.check_idle()


def test_when_a_rank_turns_offloading_off_the_model_goes_on_without_it(
    make_engine: MakeEngine,
) -> None:
    """Nothing is looked up, loaded or stored any more; requests run as without a connector."""
    engine = make_engine()
    prompt = tokens(0, 8)
    engine.add("warm", [*prompt, 1])
    engine.run()
    engine.add("last", tokens(1, 9))
    engine.step()
    (store,) = engine.ranks.of(Direction.STORE)
    engine.ranks.complete(store.job_id, error="offloading is off", off=True)
    engine.run()
    engine.reset_gpu_cache()
    before = engine.snapshot()
    for i in range(3):
        request = engine.add(f"r{i}", [*prompt, 2 + i], max_tokens=3)
        engine.step()
        assert engine.ranks.open == {}
        engine.run()
        assert request.is_finished()
    assert changed(before, engine.snapshot()) == set()
    engine.check_idle()

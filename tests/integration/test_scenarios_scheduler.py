"""Scenarios of faults seen in public, on vLLM's real scheduler and block pool; ranks told when.

Each test says which scenario it is (S4, ...), with the outcome that is right. What fails, ends
early or is reset stands in ``test_scenarios_failures``.
"""

from pathlib import Path
from typing import Any

from kvferry.engine.messages import JobReport, StepReports
from kvferry.engine.types import Direction, Rank
from kvferry.integration.vllm import KVFerrySimpleConnector
from kvferry.integration.vllm.metadata import RankCapacity
from real_scheduler import Engine, MakeEngine, stored_tokens, tokens


def test_s4_a_store_in_flight_is_flushed_before_its_blocks_are_given_away(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    engine = make_engine(num_blocks=5, async_scheduling=async_scheduling)
    first = tokens(0, 8)
    engine.add("a", [*first, 1], max_tokens=6)
    engine.step()
    (store,) = engine.ranks.of(Direction.STORE)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)  # preempts a
    a = engine.scheduler.requests["a"]
    engine.scheduler.waiting.remove_request(a)  # b comes first
    engine.add("b", tokens(1, 13), max_tokens=2)
    engine.scheduler.waiting.add_request(a)
    output = engine.step()
    assert store.job_id in output.kv_connector_metadata.orders.flush
    taken = {block for new in output.scheduled_new_reqs for block in new.block_ids[0]}
    assert taken & set(store.segments[0].blocks)
    engine.run()
    assert stored_tokens(engine, first) == 8
    engine.check_idle()


def test_s5_a_preempted_request_comes_back_while_its_store_is_pending(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    engine = make_engine(num_blocks=60, async_scheduling=async_scheduling)
    request = engine.add("a", tokens(0, 13), max_tokens=6)
    engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    for _ in range(20):  # its store is never reported in this time: it computes again
        engine.step()
        engine.now_s += 1.0  # the general connector gives up waiting for it
    assert request.is_finished()
    assert request.num_output_tokens == 6
    engine.run()
    engine.check_idle()


def test_s6_the_last_block_is_stored_flushed_before_reuse_and_served(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    """A block fills on the final step, and the next step gives it to somebody else."""
    engine = make_engine(num_blocks=4, async_scheduling=async_scheduling)
    prompt = tokens(0, 7)
    engine.add("a", prompt, max_tokens=2)  # computes 8 tokens: two full blocks, one by decoding
    for _ in range(10):
        if engine.scheduler.requests.get("a") is None:
            break
        engine.step()
    in_flight = set(engine.ranks.open)
    engine.add("b", tokens(1, 12))  # needs all three blocks
    orders = engine.step().kv_connector_metadata.orders
    # Under async scheduling the block's hash came too late for its own step: stored at finish.
    prior = {order.job_id for order in orders.prior_stores}
    assert bool(prior) == async_scheduling
    assert set(orders.flush) == in_flight | prior
    engine.run()
    assert stored_tokens(engine, [*prompt, engine.sampled_token]) == 8
    engine.check_idle()


def test_s7_blocks_given_to_another_connector_are_fenced(make_engine: MakeEngine) -> None:
    """A store is pending on X; X is allocated with 0 external tokens of ours."""
    engine = make_engine()
    engine.add("a", tokens(0, 9), max_tokens=1)
    engine.step()
    (store,) = engine.ranks.of(Direction.STORE)
    other = engine.request("other", tokens(1, 9))
    pool = engine.scheduler.kv_cache_manager
    engine.connector.get_num_new_matched_tokens(other, 0)
    block = pool.block_pool.blocks[store.segments[0].blocks[0]]
    blocks = type(pool.empty_kv_cache_blocks)(([block],))
    engine.connector.update_state_after_alloc(other, blocks, 0)
    engine.step()
    assert store.job_id in engine.ranks.flushed
    engine.connector.request_finished_all_groups(other, ([],))
    engine.run()
    engine.check_idle()


def test_s9_a_hit_is_not_evicted_between_lookup_and_allocation(make_engine: MakeEngine) -> None:
    engine = make_engine(num_slots=2)
    prompt = tokens(0, 8)
    engine.add("warm", [*prompt, 1])
    engine.run()
    engine.reset_gpu_cache()
    hit = engine.request("a", [*prompt, 2])
    assert engine.connector.get_num_new_matched_tokens(hit, 0) == (8, True)
    pinned = engine.snapshot()["reading"] == 2  # the general connector only peeks
    assert pinned == isinstance(engine.connector, KVFerrySimpleConnector)
    engine.add("b", tokens(1, 9))  # wants both slots
    engine.run()
    evicted = 0 if pinned else 2
    assert engine.snapshot()["evicted_chunks"] == evicted
    assert stored_tokens(engine, prompt) == 8 - 4 * evicted
    answer = engine.connector.get_num_new_matched_tokens(hit, 0)
    assert answer == ((8, True) if pinned else (0, False))
    engine.connector.request_finished_all_groups(hit, ([],))
    engine.check_idle()


def test_s10_a_store_is_not_acknowledged_by_a_step_without_a_forward(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    engine = make_engine(async_scheduling=async_scheduling)
    engine.add("a", tokens(0, 8))
    for _ in range(5):
        engine.step()  # the last of these schedule nothing
    assert engine.snapshot()["ready"] == 0
    assert engine.connector.has_pending_push_work()
    engine.run()
    assert engine.snapshot()["ready"] == 2
    engine.check_idle()


def test_s11_every_full_block_is_stored_once_its_hash_exists(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    """Prompt 3, decode 6: the hash of a block comes a step late under async scheduling."""
    engine = make_engine(async_scheduling=async_scheduling)
    prompt = tokens(0, 3)
    engine.add("a", prompt, max_tokens=6)
    engine.run()
    assert engine.snapshot()["stored_chunks"] == 2  # 3 + 5 computed tokens, each block once
    assert stored_tokens(engine, prompt + [engine.sampled_token] * 5) == 8
    engine.check_idle()


def test_s15_a_store_that_never_completes_serves_nobody_and_blocks_nobody(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine()
    prompt = tokens(0, 8)
    engine.add("a", [*prompt, 1])
    engine.step()
    engine.reset_gpu_cache()
    follower = engine.add("b", [*prompt, 2])
    for _ in range(10):
        engine.step()
        engine.now_s += 1.0
    assert follower.is_finished()
    assert engine.snapshot()["loaded_chunks"] == 0
    engine.run()
    engine.check_idle()


def test_s14_followers_of_a_load_in_flight_wait_once_and_then_run(model_config_dir: Path) -> None:
    """50 requests with the same prefix, in the host only: it is loaded once."""
    engine = Engine(model_config_dir, connector="KVFerryOffloadingConnector")
    prompt = tokens(0, 40)
    engine.add("warm", [*prompt, 1])
    engine.run()
    engine.reset_gpu_cache()
    followers = [engine.add(f"r{i}", [*prompt, 2 + i]) for i in range(50)]
    engine.step()
    assert len(engine.ranks.of(Direction.LOAD)) == 1
    for _ in range(3):
        engine.step()
    assert len(engine.ranks.of(Direction.LOAD)) == 1
    engine.run()
    assert all(follower.is_finished() for follower in followers)
    assert engine.snapshot()["loaded_chunks"] == 10
    engine.check_idle()


def test_a_chunk_being_stored_is_waited_for_and_then_loaded(model_config_dir: Path) -> None:
    engine = Engine(model_config_dir, connector="KVFerryOffloadingConnector")
    prompt = tokens(0, 8)
    engine.add("a", [*prompt, 1])
    engine.step()
    engine.reset_gpu_cache()
    follower = engine.request("b", [*prompt, 2])
    assert engine.connector.get_num_new_matched_tokens(follower, 0) == (None, False)
    engine.ranks.complete_all()
    engine.step()
    assert engine.connector.get_num_new_matched_tokens(follower, 0) == (8, True)


def test_jobs_that_start_meanwhile_do_not_prolong_the_wait(model_config_dir: Path) -> None:
    engine = Engine(model_config_dir, connector="KVFerryOffloadingConnector")
    prompt = tokens(0, 8)
    engine.add("a", [*prompt, 1])
    engine.step()
    (first,) = engine.ranks.of(Direction.STORE)
    engine.reset_gpu_cache()
    follower = engine.request("b", [*prompt, 2])
    assert engine.connector.get_num_new_matched_tokens(follower, 0) == (None, False)
    engine.ranks.complete(first.job_id, error="told to fail")
    engine.step()
    engine.add("c", [*prompt, 3])  # stores the same chunks anew, and never reports it
    engine.step()
    assert engine.connector.get_num_new_matched_tokens(follower, 0) == (0, False)


def test_fewer_tokens_taken_than_answered_releases_the_rest(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt = tokens(0, 12)
    engine.add("warm", [*prompt, 1])
    engine.run()
    request = engine.request("a", [*prompt, 2])
    assert engine.connector.get_num_new_matched_tokens(request, 0) == (12, True)
    blocks = engine.scheduler.kv_cache_manager.block_pool.get_new_blocks(1)
    table = type(engine.scheduler.kv_cache_manager.empty_kv_cache_blocks)((blocks,))
    engine.connector.update_state_after_alloc(request, table, 4)
    assert (engine.snapshot()["reading"], engine.snapshot()["leases"]) == (1, 1)


def test_a_chunk_that_is_there_is_never_stored_twice(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt = tokens(0, 8)
    for i in range(4):
        engine.add(f"r{i}", [*prompt, i])
        engine.run()
        engine.reset_gpu_cache()
    assert engine.snapshot()["stored_chunks"] == 2


def test_a_prompt_in_pieces_is_stored_whole(make_engine: MakeEngine) -> None:
    engine = make_engine(max_batched_tokens=5)
    prompt = tokens(0, 22)
    engine.add("a", prompt)
    engine.run()
    assert stored_tokens(engine, prompt) == 20
    engine.check_idle()


def test_a_request_larger_than_the_pool_keeps_its_own_prefix(make_engine: MakeEngine) -> None:
    """Storing the tail must not evict the head of the same prompt, which it is useless without."""
    engine = make_engine(num_slots=3, max_batched_tokens=8)
    prompt = tokens(0, 40)
    engine.add("a", prompt, max_tokens=8)
    engine.run()
    assert stored_tokens(engine, prompt) == 12
    engine.check_idle()


def test_a_job_ends_when_every_rank_has_reported(make_engine: MakeEngine) -> None:
    engine = make_engine(num_ranks=2)
    engine.add("a", tokens(0, 9))
    engine.step()
    (store,) = engine.ranks.of(Direction.STORE)
    core = engine.manager.core
    core.take(StepReports((JobReport(store.job_id, Rank(0), Direction.STORE),)))
    assert engine.snapshot()["ready"] == 0
    core.take(StepReports((JobReport(store.job_id, Rank(1), Direction.STORE),)))
    assert engine.snapshot()["ready"] == 2


def test_ranks_that_hold_less_decide_for_all(make_engine: MakeEngine) -> None:
    """S13: the ledger is as large as the smallest rank."""
    engine = make_engine(num_ranks=2)
    capacities: dict[tuple[int, int], Any] = {(0, 0): RankCapacity(12), (1, 0): RankCapacity(10)}
    engine.connector.set_xfer_handshake_metadata_pp_aware(capacities)
    assert engine.snapshot()["free"] == 10

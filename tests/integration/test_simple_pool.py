"""The simple connector keeps to itself: no pin outlives its request, vLLM's pool is not touched.

Resets, sleep and vLLM's own eviction order are those of a scheduler without a connector.
"""

import copy
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kvferry.engine.types import Direction
from kvferry.integration.vllm import config
from kvferry.integration.vllm.config import SimpleOptions
from real_scheduler import Engine, tokens
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

PROMPT = tokens(0, 8)
MODES: dict[str, dict[str, Any]] = {
    "eager": {"min_load_tokens": 0},
    "lazy": {"min_load_tokens": 0, "lazy_offload": True},
}
MakeEngine = partial[Engine]


@pytest.fixture(params=["sync", "async"])
def async_scheduling(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "async")


@pytest.fixture(params=MODES)
def make_engine(
    request: pytest.FixtureRequest, model_config_dir: Path, async_scheduling: bool
) -> MakeEngine:
    return partial(
        Engine,
        model_config_dir,
        extra_config=MODES[request.param],
        max_batched_tokens=16,
        async_scheduling=async_scheduling,
    )


def warm(engine: Engine) -> None:
    """The prompt's two blocks are in the host cache, and nowhere else."""
    engine.add("warm", [*PROMPT, 1])
    engine.run()
    lazy = engine.manager.lazy
    if lazy is not None:
        lazy._num_step_blocks, usual = 1000, lazy._num_step_blocks
        engine.add("short", [1])
        engine.run()  # reads the whole queue
        lazy._num_step_blocks = usual
    engine.reset_gpu_cache()
    assert engine.snapshot()["ready"] == 2


def held(engine: Engine) -> tuple[Any, Any]:
    return engine.snapshot()["reading"], engine.snapshot()["leases"]


# Pins


def pinned(engine: Engine) -> Any:
    """A request that has been answered, and not allocated: it holds a pin."""
    request = engine.request("a", [*PROMPT, 2])
    assert engine.connector.get_num_new_matched_tokens(request, 0) == (8, True)
    assert held(engine) == (2, 1)
    return request


def asked_again(engine: Engine, request: Any) -> None:
    assert engine.connector.get_num_new_matched_tokens(request, 4) == (4, True)
    assert held(engine) == (1, 1)  # the new answer's pin alone
    assert engine.connector.get_num_new_matched_tokens(request, 8) == (0, False)


def no_tokens_taken(engine: Engine, request: Any) -> None:
    blocks = engine.scheduler.kv_cache_manager.empty_kv_cache_blocks
    engine.connector.update_state_after_alloc(request, blocks, 0)


def fewer_tokens_taken(engine: Engine, request: Any) -> None:
    pool = engine.scheduler.kv_cache_manager
    blocks = pool.block_pool.get_new_blocks(1)
    engine.connector.update_state_after_alloc(
        request, type(pool.empty_kv_cache_blocks)((blocks,)), 4
    )
    assert held(engine) == (1, 1)  # the load's own lease, on what it takes
    engine.step()
    (load,) = engine.ranks.of(Direction.LOAD)
    engine.scheduler.requests[request.request_id] = request
    request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.ranks.complete(load.job_id)
    engine.manager.take(engine.ranks.output().kv_connector_worker_meta.reports)
    del engine.scheduler.requests[request.request_id]
    pool.block_pool.free_blocks(blocks)


def preempted(engine: Engine, request: Any) -> None:
    """It comes back as a request that starts over, to a host cache that has lost its chunks."""
    request.num_preemptions += 1
    engine.manager.core.ledger.invalidate_all()
    assert engine.connector.get_num_new_matched_tokens(request, 0) == (0, False)


def bypassing(engine: Engine, request: Any) -> None:
    again = engine.request("a", [*PROMPT, 2], prompt_logprobs=1)
    assert engine.connector.get_num_new_matched_tokens(again, 0) == (0, False)


def finished(engine: Engine, request: Any) -> None:
    engine.connector.request_finished_all_groups(request, ([],))


def reset(engine: Engine, request: Any) -> None:
    assert engine.connector.reset_cache()


WAYS_OUT = [
    asked_again,
    no_tokens_taken,
    fewer_tokens_taken,
    preempted,
    bypassing,
    finished,
    reset,
]


@pytest.mark.parametrize("way_out", WAYS_OUT, ids=lambda way: way.__name__)
def test_a_pin_is_dropped_on_every_way_out(
    make_engine: MakeEngine, way_out: Callable[[Engine, Any], None]
) -> None:
    engine = make_engine()
    warm(engine)
    request = pinned(engine)
    way_out(engine, request)
    assert held(engine) == (0, 0)
    engine.connector.request_finished_all_groups(request, ([],))
    engine.run()
    engine.check_idle()


def test_an_abort_and_a_preemption_of_a_request_that_waits_with_a_pin(
    make_engine: MakeEngine,
) -> None:
    """There are no blocks for it, so that it keeps its pin while another one runs."""
    engine = make_engine(num_blocks=6)
    warm(engine)
    engine.add("holds", tokens(1, 15), max_tokens=4)
    engine.step()
    for name in ("a", "b"):
        engine.add(name, [*PROMPT, 2])
    engine.step()
    assert engine.snapshot()["reading"] == 2
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert engine.connector.reset_cache()
    assert engine.snapshot()["reading"] == engine.snapshot()["doomed"] - num_writing(engine) == 0
    for name in ("a", "b", "holds"):
        engine.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
    engine.run()
    engine.check_idle()


def num_writing(engine: Engine) -> int:
    """Chunks of the stores that the ranks have not reported."""
    orders = engine.ranks.of(Direction.STORE)
    return sum(len(segment.slots) for order in orders for segment in order.segments)


# vLLM's pool


class Plain:
    """The same scheduler without a connector."""

    def __init__(self, engine: Engine) -> None:
        settings = copy.copy(engine.config)
        settings.kv_transfer_config = None
        kind = AsyncScheduler if engine.async_scheduling else Scheduler
        self.scheduler = kind(
            vllm_config=settings,
            kv_cache_config=engine.kv_cache_config,
            structured_output_manager=StructuredOutputManager(settings),
            block_size=engine.block_tokens,
            hash_block_size=engine.block_tokens,
            log_stats=True,
        )
        self._in_flight: list[Any] = []
        self._late = engine.async_scheduling
        self._sampled_token = engine.sampled_token

    def step(self) -> None:
        output = self.scheduler.schedule()
        samples = {
            name: not self.scheduler.requests[name].is_prefill_chunk
            for name in output.num_scheduled_tokens
        }
        self._in_flight.append((output, samples))
        if self._late and len(self._in_flight) == 1 and samples:
            return
        output, samples = self._in_flight.pop(0)
        runner_output = ModelRunnerOutput(
            req_ids=list(samples),
            req_id_to_index={name: i for i, name in enumerate(samples)},
            sampled_token_ids=[[self._sampled_token] if s else [] for s in samples.values()],
        )
        self.scheduler.update_from_output(output, runner_output)


def queue_of(scheduler: Any) -> list[tuple[int, Any]]:
    free = scheduler.kv_cache_manager.block_pool.free_block_queue.get_all_free_blocks()
    return [(block.block_id, block.block_hash) for block in free]


@pytest.mark.parametrize("seed", range(3))
def test_vllms_eviction_order_is_its_own(make_engine: MakeEngine, seed: int) -> None:
    """The free queues with and without the connector are equal after each of 200 steps.

    Hits in vLLM's own cache, evictions, preemptions, aborts and resets, with stores in flight.
    Nothing is loaded, since a load delays its request: hits are declined.
    """
    print(f"seed {seed}")
    rng = random.Random(seed)
    never_load = {**make_engine.keywords["extra_config"], "min_load_tokens": 10**6}
    engine = make_engine(num_blocks=40, num_slots=50, extra_config=never_load)
    plain = Plain(engine)
    families = [tokens(family, 60) for family in range(4)]
    num_stores = 0
    for step in range(200):
        if rng.random() < 0.4:
            prompt = [*rng.choice(families)[: rng.randrange(1, 60)], rng.randrange(8, 60)]
            num_tokens = rng.randrange(1, 12)
            for scheduler in (engine.scheduler, plain.scheduler):
                scheduler.add_request(engine.request(f"r{step}", prompt, max_tokens=num_tokens))
        orders = engine.step().kv_connector_metadata.orders
        num_stores += len(orders.stores) + len(orders.prior_stores)
        assert not orders.loads
        plain.step()
        for job_id in list(engine.ranks.open):
            if rng.random() < 0.2:
                engine.ranks.complete(job_id)
        if rng.random() < 0.1 and engine.scheduler.requests:
            victim = rng.choice(sorted(engine.scheduler.requests))
            for scheduler in (engine.scheduler, plain.scheduler):
                scheduler.finish_requests(victim, RequestStatus.FINISHED_ABORTED)
        if rng.random() < 0.03:
            for scheduler in (engine.scheduler, plain.scheduler):
                assert scheduler.reset_prefix_cache(reset_running_requests=True)
        assert queue_of(engine.scheduler) == queue_of(plain.scheduler), f"step {step}"
        assert [b.ref_cnt for b in engine.scheduler.kv_cache_manager.block_pool.blocks] == [
            b.ref_cnt for b in plain.scheduler.kv_cache_manager.block_pool.blocks
        ]
    assert num_stores > 20


def leave_stores_in_flight(engine: Engine) -> None:
    """Three requests run to their end, and none of their stores does."""
    for i in range(3):
        engine.add(f"r{i}", tokens(i, 33))
    for _ in range(40):
        if not engine.scheduler.has_unfinished_requests():
            break
        engine.step()
    engine.step()
    assert engine.ranks.of(Direction.STORE)


def test_the_prefix_cache_is_reset_while_stores_are_in_flight(make_engine: MakeEngine) -> None:
    """Idle: True at once. Running: False, as without a connector; with its requests preempted True,
    and they go on."""
    engine = make_engine(num_blocks=41)
    leave_stores_in_flight(engine)
    assert engine.scheduler.reset_prefix_cache()
    assert engine.snapshot()["writing"] == num_writing(engine)
    engine.add("runs", tokens(3, 33), max_tokens=8)
    for _ in range(4):
        engine.step()
    assert engine.ranks.open
    assert engine.scheduler.reset_prefix_cache() is False
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert engine.snapshot()["ready"] == 0
    engine.run()
    engine.check_idle()


def test_sleep_empties_both_caches_while_stores_are_in_flight(make_engine: MakeEngine) -> None:
    """What ``sleep`` does before it lets go of memory: all requests aborted, caches reset, and it
    raises when one of them refuses."""
    engine = make_engine(num_blocks=41)
    leave_stores_in_flight(engine)
    engine.add("runs", tokens(3, 33), max_tokens=8)
    for _ in range(4):
        engine.step()
    assert engine.ranks.of(Direction.STORE)
    core = object.__new__(EngineCore)
    core.scheduler = engine.scheduler
    engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    assert core.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert engine.snapshot()["ready"] == 0
    engine.ranks.complete_all()
    engine.step()
    engine.run()
    engine.check_idle()
    assert engine.snapshot()["ready"] == 0


# Options


def test_an_engine_that_disagrees_with_itself_says_so(
    model_config_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned: list[str] = []
    monkeypatch.setattr(config.logger, "warning", lambda text, *args: warned.append(text % args))
    both = {"cpu_bytes_to_use": "2MiB", "cpu_bytes_to_use_per_rank": "1MiB"}
    Engine(model_config_dir, extra_config=both)
    assert len(warned) == 1
    assert "cpu_bytes_to_use_per_rank=1048576 is not cpu_bytes_to_use=2097152 over 1" in warned[0]
    Engine(model_config_dir, extra_config={**both, "cpu_bytes_to_use": "1MiB"})
    Engine(model_config_dir, extra_config={"cpu_bytes_to_use_per_rank": "1MiB"})
    assert len(warned) == 1


def test_lazy_mode_is_off_unless_asked_for(model_config_dir: Path) -> None:
    assert Engine(model_config_dir).manager.lazy is None
    assert Engine(model_config_dir, extra_config=MODES["lazy"]).manager.lazy is not None
    with pytest.raises(ValueError, match="lazy_offload='yes'; allowed: true or false"):
        SimpleOptions.parse({"lazy_offload": "yes"})


def test_options_of_vllms_connector_are_taken_with_a_word(model_config_dir: Path) -> None:
    assert SimpleOptions.parse({"disk_path": "/data", "kv_offload_backend": "cpu"}).measure_s == 1.0
    with pytest.raises(ValueError, match="kv_offload_backend='disk': there is no disk tier"):
        Engine(model_config_dir, extra_config={"kv_offload_backend": "disk"})

"""Recurrent groups (Mamba, linear attention) in align mode, on vLLM's real scheduler.

``SymbolicEngine`` follows the states as vLLM's worker does (see ``recurrent_states``): a step that
goes on from a wrong state, and a slot that holds another state than its key says, fail at once.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import Phase
from kv_groups import full, grouped_config, mamba, window
from kvferry.engine.rules import GroupKind, GroupRule
from kvferry.engine.types import NO_BLOCK, BlockId
from kvferry.integration.vllm import support, views
from kvferry.integration.vllm.connector import OffloadConnectorBase
from real_scheduler import tokens
from scheduler_machine import run_machine
from symbolic_ranks import BrokenInvariant, SymbolicEngine
from test_groups_scheduler import crowd, hit, make, readable, run
from vllm.v1.core.kv_cache_utils import get_group_id
from vllm.v1.kv_cache_interface import KVCacheSpec

NUM_RUNS = 2000 if os.environ.get("KVFERRY_SLOW") == "1" else 15
SEED = 3
CROWD: dict[str, Any] = {"num_requests": 60, "ended_share": 0.7}
MakeEngine = Callable[..., SymbolicEngine]

MODELS: dict[str, list[KVCacheSpec]] = {
    "full": [full(), mamba()],
    "checkpoints": [mamba(checkpoints=True), full()],
    "two states": [full(), mamba(), mamba()],
    "window": [full(), window(8), mamba()],
    "alone": [mamba()],
}


@pytest.fixture
def make_engine(model_config_dir: Path) -> MakeEngine:
    return partial(make, model_config_dir)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(("blocks_per_chunk", "retention"), [(1, None), (2, None), (1, 8)])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_loaded_is_what_belongs_there(
    make_engine: MakeEngine,
    name: str,
    blocks_per_chunk: int,
    retention: int | None,
    is_async: bool,
) -> None:
    engine = make_engine(
        MODELS[name],
        num_blocks=25 * len(MODELS[name]),
        num_slots=16 * len(MODELS[name]),
        max_batched_tokens=13,
        async_scheduling=is_async,
        retention=retention,
        extra={"blocks_per_chunk": blocks_per_chunk},
    )
    crowd(engine, SEED, **CROWD)
    snapshot = engine.snapshot()
    assert snapshot["loaded_chunks"] > 0, snapshot
    assert snapshot["evicted_chunks"] > 0, snapshot


def test_states_are_stored_where_pieces_end(make_engine: MakeEngine) -> None:
    """Attention has all blocks; of the state there is what vLLM keeps: at the ends of pieces, which
    it cuts at blocks, and behind the last block that a hit can end with."""
    prompt = [*tokens(0, 17), 8]
    whole = make_engine([full(), mamba()])
    whole.add("a", prompt)
    run(whole)
    assert (readable(whole, 0, prompt), readable(whole, 1, prompt)) == ([0, 1, 2, 3], [3])
    pieces = make_engine([full(), mamba()], max_batched_tokens=9)
    pieces.add("a", prompt)
    run(pieces)
    assert (readable(pieces, 0, prompt), readable(pieces, 1, prompt)) == ([0, 1, 2, 3], [1, 3])
    for engine in (whole, pieces):
        engine.reset_gpu_cache()
    assert (hit(whole, prompt), hit(whole, prompt[:15])) == (16, 0)
    assert (hit(pieces, prompt), hit(pieces, prompt[:15])) == (16, 8)


def test_a_hit_loads_one_state(make_engine: MakeEngine) -> None:
    engine = make_engine([full(), mamba()], max_batched_tokens=9)
    prompt = [*tokens(0, 17), 8]
    engine.add("a", prompt)
    run(engine)
    engine.reset_gpu_cache()
    engine.add("b", prompt)
    engine.step()
    (load,) = engine.ranks.open.values()
    assert [len(segment.slots) for segment in load.segments] == [4, 1]
    run(engine)


def test_states_inside_answers_are_stored_too(make_engine: MakeEngine) -> None:
    engine = make_engine([full(), mamba()])
    prompt = tokens(0, 6)
    engine.add("a", prompt, max_tokens=12)
    run(engine)
    answered = [*prompt, *[engine.sampled_token] * 11]
    assert readable(engine, 1, answered) == [0, 1, 2, 3]


def test_a_chunk_of_several_blocks_holds_the_state_at_its_end(make_engine: MakeEngine) -> None:
    """States at 8 and 12 exist; chunks of two blocks end at 8 and 16."""
    engine = make_engine([full(), mamba()], max_batched_tokens=9, extra={"blocks_per_chunk": 2})
    prompt = [*tokens(0, 13), 8]
    engine.add("a", prompt)
    run(engine)
    assert (readable(engine, 0, prompt), readable(engine, 1, prompt)) == ([0], [0])
    engine.reset_gpu_cache()
    assert hit(engine, prompt) == 8


def test_where_vllm_has_lost_the_state_it_is_loaded(make_engine: MakeEngine) -> None:
    """vLLM's own hit ends where every group has what it needs: at 0, though attention has 16."""
    engine = make_engine([full(), mamba()])
    prompt = tokens(0, 18)
    engine.add("a", prompt)
    run(engine)
    pool = engine.scheduler.kv_cache_manager.block_pool
    hashed = [block for block in pool.blocks if block.block_hash is not None]
    (state,) = [block for block in hashed if get_group_id(block.block_hash) == 1]
    assert pool._maybe_evict_cached_block(state)
    engine.add("b", prompt)
    engine.step()
    (load,) = engine.ranks.open.values()
    assert [len(segment.slots) for segment in load.segments] == [4, 1]
    run(engine)


def test_a_failed_load_is_computed_from_the_beginning(make_engine: MakeEngine) -> None:
    for specs in ([full(), mamba()], [mamba()]):
        engine = make_engine(specs)
        prompt = [*tokens(0, 17), 8]
        engine.add("a", prompt)
        run(engine)
        engine.reset_gpu_cache()
        engine.add("b", prompt)
        engine.step()
        (job_id,) = engine.ranks.open
        engine.ranks.report(job_id, 0, error="told to fail")
        run(engine)
        assert engine.snapshot()["failed_loads"] == 1


@pytest.mark.parametrize(
    ("specs", "right"), [([full()], False), ([mamba()], True)], ids=["attention", "states"]
)
def test_the_second_runner_copies_states_before_it_flushes(
    specs: list[KVCacheSpec], right: bool
) -> None:
    runner: Any = SimpleNamespace(use_v2_model_runner=True)
    assert support.writes_before_flush(grouped_config(8, specs), runner) is right


def test_the_request_is_named_where_a_state_fails(make_engine: MakeEngine) -> None:
    """With one group vLLM would go on in front of the block that failed, where no state is."""
    connectors: list[OffloadConnectorBase] = [
        make_engine(specs).connector for specs in ([full()], [mamba()], [full(), mamba()])
    ]
    assert [connector._names_blocks for connector in connectors] == [True, False, False]


@pytest.mark.parametrize(("interval", "states"), [(None, [1, 3, 5, 7]), (0, [7]), (16, [3, 7])])
def test_states_that_vllm_does_not_keep_are_not_stored(
    make_engine: MakeEngine, interval: int | None, states: list[int]
) -> None:
    """They may be overwritten where they are: by default only the last one of a prompt is kept."""
    engine = make_engine([full(), mamba()], retention=interval, max_batched_tokens=9)
    prompt = [*tokens(0, 33), 8]
    engine.add("a", prompt)
    run(engine)
    assert readable(engine, 1, prompt) == states


def a_place_off(patch: pytest.MonkeyPatch) -> None:
    right = views.states_handed_over

    def states_handed_over(*args: Any) -> list[list[BlockId]]:
        attention, states = right(*args)
        return [attention, [*states[1:], NO_BLOCK]]

    patch.setattr(views, "states_handed_over", states_handed_over)


def no_state(patch: pytest.MonkeyPatch) -> None:
    """A hit is taken to need no state."""
    right = GroupRule.needed_from

    def needed_from(self: GroupRule, num_tokens: int) -> int:
        is_state = self.kind is GroupKind.RECURRENT
        return num_tokens if is_state else right(self, num_tokens)

    patch.setattr(GroupRule, "needed_from", needed_from)


@pytest.mark.parametrize(
    ("broken", "number"),
    [(a_place_off, "I1, I3"), (no_state, "I7, I10")],
    ids=["a place off", "no state"],
)
def test_a_broken_core_is_caught(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, broken: Any, number: str
) -> None:
    broken(monkeypatch)
    pools = {"num_blocks": 50, "num_slots": 32}
    with pytest.raises(BrokenInvariant, match=f"^({number})"):
        crowd(make_engine([full(), mamba()], **pools, max_batched_tokens=13), SEED, **CROWD)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_the_invariants_hold_in_any_order(model_config_dir: Path, checkpoints: bool) -> None:
    """The state machine of ``test_scheduler_machine`` with recurrent states beside attention."""
    second = staticmethod(partial(mamba, checkpoints=checkpoints))
    phases = (Phase.generate, Phase.shrink)
    connector = "KVFerryOffloadingConnector"
    run_machine(model_config_dir, connector, NUM_RUNS, *phases, second_group=second)

"""I6 where vLLM's own prefix cache outlives a reset of the connector's.

vLLM answers no to a reset while blocks are in use, and keeps its prefix cache; the connector has
been reset all the same. What vLLM then still serves is from before the reset, and so is all that is
computed from it: none of it may come back to the host cache.
"""

from pathlib import Path
from typing import Any

import pytest
from kvferry.engine.types import Direction
from real_scheduler import Engine, tokens

CONNECTORS: dict[str, dict[str, Any]] = {
    "KVFerrySimpleConnector": {},
    "KVFerryOffloadingConnector": {"offload_prompt_only": False},
}
PROMPT = tokens(0, 8)


@pytest.fixture(params=CONNECTORS)
def engine(request: pytest.FixtureRequest, model_config_dir: Path) -> Engine:
    return Engine(model_config_dir, connector=request.param, extra_config=CONNECTORS[request.param])


def stored_tokens(engine: Engine, prompt: list[int]) -> int:
    """How many of the prompt's tokens the host would serve now."""
    core = engine.manager.core
    (group,) = core.groups
    hashes = engine.request("peek", prompt).block_hashes
    keys = group.keys(hashes, 0, group.num_hashed_chunks(hashes))
    return int(core.ledger.readable(group.group, keys)) * int(group.chunk_tokens)


def reset_in_vain(engine: Engine) -> None:
    """A reset while a request runs: vLLM's own cache stays, the connector's is gone."""
    engine.add("runs", tokens(9, 6), max_tokens=40)
    engine.step()
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.ranks.complete_all()


def test_what_vllm_kept_from_before_is_not_stored_after_it(engine: Engine) -> None:
    engine.add("before", [*PROMPT, 1])
    engine.run()
    reset_in_vain(engine)
    later = [*PROMPT, *tokens(1, 9)]
    engine.add("after", later)
    output = engine.step()
    assert output.scheduled_new_reqs[0].num_computed_tokens == 8  # vLLM's own, old
    engine.run()
    assert stored_tokens(engine, later) == 0
    engine.check_idle()


def test_nor_what_was_computed_from_it(engine: Engine) -> None:
    """Through two requests: the second is served by vLLM what the first computed from old bytes."""
    engine.add("before", [*PROMPT, 1])
    engine.run()
    reset_in_vain(engine)
    later = [*PROMPT, *tokens(1, 9)]
    for name in ("first", "second"):
        engine.add(name, [*later, *tokens(2, 5)])
        for _ in range(3):
            engine.step()
            engine.ranks.complete_all()
    engine.run()
    assert stored_tokens(engine, later) == 0
    engine.check_idle()


def test_a_request_that_was_running_leaves_old_blocks_behind(engine: Engine) -> None:
    """It goes on over the reset, and what it decodes is served by vLLM to another."""
    request = engine.add("runs", [*PROMPT, 1], max_tokens=9)
    engine.step()
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.run()
    engine.add("after", [*request.all_token_ids, *tokens(1, 9)])
    output = engine.step()
    assert output.scheduled_new_reqs[0].num_computed_tokens == 16
    engine.run()
    assert stored_tokens(engine, list(request.all_token_ids)) == 0
    engine.check_idle()


def test_a_load_begun_before_leaves_old_blocks_behind(engine: Engine) -> None:
    engine.add("warm", [*PROMPT, 1])
    engine.run()
    engine.reset_gpu_cache()
    engine.add("loads", [*PROMPT, 2], max_tokens=3)
    engine.step()
    assert engine.ranks.of(Direction.LOAD)
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.run()
    engine.add("after", [*PROMPT, *tokens(1, 9)])
    engine.run()
    assert stored_tokens(engine, PROMPT) == 0
    engine.check_idle()


def test_what_is_computed_anew_is_stored_and_then_served(engine: Engine) -> None:
    """Prompts that share nothing with what is old, also when vLLM serves them a second time, and
    the old one once vLLM has forgotten it."""
    engine.add("before", [*PROMPT, 1])
    engine.run()
    reset_in_vain(engine)
    fresh = tokens(3, 12)
    engine.add("fresh", [*fresh, 1])
    engine.step()
    engine.ranks.complete_all()
    engine.step()
    assert stored_tokens(engine, fresh) == 12
    longer = [*fresh, *tokens(4, 8)]
    engine.add("longer", [*longer, 1])  # vLLM serves its beginning: new bytes
    engine.run()
    assert stored_tokens(engine, longer) == 20
    engine.reset_gpu_cache()
    engine.add("again", [*PROMPT, 2])
    engine.run()
    assert stored_tokens(engine, PROMPT) == 8
    engine.check_idle()

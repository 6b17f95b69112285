"""``min_load_tokens="auto"`` on vLLM's real scheduler: by what loads and prefills have taken."""

from pathlib import Path

import pytest
from kvferry.engine.types import Direction
from kvferry.engine.worth import DECLINED_PER_LOAD
from real_scheduler import Engine, tokens

PREFIX = 120


@pytest.mark.parametrize("connector", ["KVFerryOffloadingConnector", "KVFerrySimpleConnector"])
@pytest.mark.parametrize(
    ("transfer_s", "beside_s", "declined"),
    [
        pytest.param(0.01, 0.0, 0, id="a fast load"),
        pytest.param(5.0, 0.0, 1, id="a load slower than computing"),
        # Beside it others computed for 9 s: that is not the load's time.
        pytest.param(0.01, 9.0, 0, id="a fast load beside a long step"),
    ],
)
def test_a_hit_is_declined_when_loads_take_longer_than_computing(
    model_config_dir: Path, connector: str, transfer_s: float, beside_s: float, declined: int
) -> None:
    engine = Engine(model_config_dir, connector=connector, num_slots=100, num_ranks=2)
    prompt = tokens(0, PREFIX)
    compute(engine, "cold", [*prompt, 8], step_s=1.0)  # 121 tokens a second
    engine.run()
    engine.reset_gpu_cache()

    engine.add("first", [*prompt, 9])  # nothing is declined before a load has been seen
    engine.step()
    engine.now_s += beside_s
    (load,) = engine.ranks.of(Direction.LOAD)
    engine.ranks.complete(load.job_id, seconds=transfer_s)
    engine.run()
    engine.reset_gpu_cache()
    assert engine.snapshot()["hits"] == 1

    engine.add("second", [*prompt, 10])
    engine.run()
    counts = engine.snapshot()
    assert (counts["hits"], counts["declined"]) == (2 - declined, declined)
    engine.check_idle()


def test_one_slow_load_does_not_turn_loads_off_for_good(model_config_dir: Path) -> None:
    engine = Engine(model_config_dir, num_slots=100)
    prompt = tokens(0, PREFIX)
    compute(engine, "cold", [*prompt, 8], step_s=1.0)
    engine.run()
    for i in range(2 * DECLINED_PER_LOAD):
        engine.reset_gpu_cache()
        engine.add(f"r{i}", [*prompt, 9])
        engine.step()
        for load in engine.ranks.of(Direction.LOAD):
            engine.ranks.complete(load.job_id, seconds=0.01 if i else 5.0)
        engine.run()
    counts = engine.snapshot()
    assert (counts["hits"], counts["declined"]) == (DECLINED_PER_LOAD, DECLINED_PER_LOAD)


def compute(engine: Engine, request_id: str, prompt: list[int], *, step_s: float) -> None:
    """One step that takes ``step_s`` and computes the prompt."""
    engine.add(request_id, prompt)
    core = engine.manager.core
    built = core.build

    def timed(num_scheduled_tokens: int = 0) -> object:
        orders = built(num_scheduled_tokens)
        engine.now_s += step_s
        return orders

    core.build = timed
    engine.step()
    core.build = built

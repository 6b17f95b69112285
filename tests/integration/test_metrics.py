"""Stats: what vLLM's logger and Prometheus are told is what the two sides count."""

import os
import pickle
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kvferry.integration.vllm import metrics
from kvferry.integration.vllm.metrics import (
    METRICS,
    OF_RANKS,
    OF_SCHEDULER,
    PREFIX,
    Metric,
    OffloadStats,
    PromMetrics,
    Reporter,
)
from kvferry.integration.vllm.simple import KVFerrySimpleConnector
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from real_scheduler import Engine, tokens
from tiny_models import TinyEngine, build_model, shared_prefix_prompts, tiny_engine
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import RequestStatus

DOCS = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
CONNECTORS = ("KVFerrySimpleConnector", "KVFerryOffloadingConnector")

Series = tuple[str, dict[str, str], str]


def series(of: tuple[Metric, ...]) -> Iterator[Series]:
    """Name, own label and snapshot key of every time series."""
    for metric in of:
        for _, value, source in metric.series():
            yield PREFIX + metric.name, {metric.label: value} if metric.label else {}, source


# -- the real engine ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model("llama", tmp_path_factory.mktemp("models"))


def scraped(name: str, label: dict[str, str], engine: TinyEngine) -> float | None:
    common = {"model_name": engine.llm.llm_engine.model_config.served_model_name, "engine": "0"}
    return REGISTRY.get_sample_value(name, common | label)


@pytest.mark.parametrize("connector", CONNECTORS)
def test_prometheus_shows_what_both_sides_count(llama: Path, connector: str) -> None:
    with tiny_engine(llama, connector=connector, disable_log_stats=False) as engine:
        at_start = {
            (n, *label.values()): scraped(n, label, engine) for n, label, _ in series(METRICS)
        }
        assert set(at_start.values()) == {0.0}
        for _ in range(2):
            engine.generate(shared_prefix_prompts(3, 12))
            while engine.scheduler.has_requests():
                engine.llm.llm_engine.step()
            engine.scheduler.reset_prefix_cache()
        for of, snapshot in (
            (OF_SCHEDULER, engine.connector.snapshot()),
            (OF_RANKS, engine.worker.snapshot()),
        ):
            for name, label, source in series(of):
                assert scraped(name, label, engine) == pytest.approx(snapshot[source]), name
        moved = {
            name
            for name, label, _ in series(METRICS)
            if scraped(name, label, engine) and name.endswith("_total")
        }
    assert moved >= {
        PREFIX + f"{name}_total"
        for name in ("hits", "misses", "stored_chunks", "loaded_chunks", "bytes", "seconds")
    }


@pytest.mark.skipif(not os.environ.get("KVFERRY_SLOW"), reason="slow: KVFERRY_SLOW=1 runs it")
def test_two_ranks_of_a_real_engine_are_added_up(llama: Path) -> None:
    """Each rank holds half the heads, so what both move is what one would."""
    with tiny_engine(llama, disable_log_stats=False, tensor_parallel_size=2) as engine:
        for _ in range(2):
            engine.generate(shared_prefix_prompts(3, 6))
            while engine.scheduler.has_requests():
                engine.llm.llm_engine.step()
            engine.scheduler.reset_prefix_cache()
        snapshot = engine.connector.snapshot()
        name = PREFIX + "bytes_total"
        stored = scraped(name, {"direction": "store"}, engine)
        loaded = scraped(name, {"direction": "load"}, engine)
        host_bytes = scraped(PREFIX + "host_bytes", {}, engine)
    slot_bytes = 4 * 16 * 1024  # four layers
    assert (stored, loaded) == (
        snapshot["stored_chunks"] * slot_bytes,
        snapshot["loaded_chunks"] * slot_bytes,
    )
    assert loaded
    num_slots = sum(snapshot[state] for state in ("free", "ready"))
    assert host_bytes is not None
    assert 0 <= host_bytes - num_slots * slot_bytes < 0.01 * host_bytes  # checksums


# -- names ----------------------------------------------------------------------------------------


def test_the_docs_list_the_metrics_and_their_labels() -> None:
    rows = re.findall(r"^\| `(vllm:\w+)` \|([^|]*)\|", DOCS.read_text(), re.MULTILINE)
    documented = {name: re.findall(r"`(\w+)`", labels) for name, labels in rows}
    assert len(documented) == len(rows)
    assert documented == {
        PREFIX + metric.name: [metric.label, *metric.sources] if metric.label else []
        for metric in METRICS
    }


def test_no_two_series_have_the_same_key() -> None:
    keys = [key for metric in METRICS for key, _, _ in metric.series()]
    assert len(keys) == len(set(keys))


def test_both_engines_of_a_server_have_every_series_at_0() -> None:
    registry = CollectorRegistry()
    prom_metrics(registry)
    for name, label, _ in series(METRICS):
        for engine in "01":
            labels = {"model_name": "m", "engine": engine, **label}
            assert registry.get_sample_value(name, labels) == 0, name


def prom_metrics(registry: CollectorRegistry) -> PromMetrics:
    def made(kind: Any) -> Any:
        return lambda **kwargs: kind(registry=registry, **kwargs)

    config: Any = type("Config", (), {"kv_transfer_config": None})
    types = {kind: made(kind) for kind in (Gauge, Counter, Histogram)}
    return PromMetrics(config, types, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})


# -- adding up ------------------------------------------------------------------------------------


def snapshots(of: tuple[Metric, ...], rng: random.Random, count: int) -> list[dict[str, int]]:
    """Counters that grow now and then, gauges that go up and down."""
    now = {source: 0 for metric in of for source in metric.sources.values()}
    found = []
    for _ in range(count):
        for metric in of:
            for source in metric.sources.values():
                if rng.random() < 0.3:
                    now[source] = rng.randrange(9) + (now[source] if metric.is_counter else 0)
        found.append(dict(now))
    return found


def test_ranks_are_added_up_once_through_vllms_own_path() -> None:
    """Two ranks and the scheduler, 50 steps: aggregated, serialised, logged twice, scraped."""
    seed = 5
    print(f"seed {seed}")
    rng = random.Random(seed)
    ranks = [Reporter(metrics.rank_name(i), OF_RANKS) for i in range(2)]
    scheduler = Reporter(metrics.SCHEDULER, OF_SCHEDULER)
    of_ranks = [snapshots(OF_RANKS, rng, 50) for _ in ranks]
    of_scheduler = snapshots(OF_SCHEDULER, rng, 50)
    registry = CollectorRegistry()
    prom, loggers = prom_metrics(registry), [logging_of_vllm(), logging_of_vllm()]
    for step in range(50):
        outputs = [one.take(seen[step]) for one, seen in zip(ranks, of_ranks, strict=True)]
        stats = aggregated(pickle.loads(pickle.dumps(outputs)))
        own = scheduler.take(of_scheduler[step])
        if own is not None:
            stats = stats.aggregate(own) if stats is not None else own
        if stats is None:
            continue
        data = msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict()))
        for logger in loggers:
            logger.observe(data)
        prom.observe(data, 1)
    for of, last in ((OF_SCHEDULER, [of_scheduler[-1]]), (OF_RANKS, [s[-1] for s in of_ranks])):
        for name, label, source in series(of):
            labels = {"model_name": "m", "engine": "1", **label}
            expected = sum(snapshot[source] for snapshot in last)
            assert registry.get_sample_value(name, labels) == expected, name
            assert registry.get_sample_value(name, {**labels, "engine": "0"}) == 0
    lines = [logged(logger) for logger in loggers]
    assert lines[0] == lines[1]
    for metric in METRICS:
        last = [of_scheduler[-1]] if metric in OF_SCHEDULER else [s[-1] for s in of_ranks]
        for key, _, source in metric.series():
            assert lines[0].get(key, 0) == sum(snapshot[source] for snapshot in last), key


def logging_of_vllm() -> KVConnectorLogging:
    logger = KVConnectorLogging(None)
    logger.connector_cls = KVFerrySimpleConnector
    return logger


def logged(logger: KVConnectorLogging) -> dict[str, float]:
    lines: list[str] = []
    logger.log(lambda text, values: lines.append(values))
    (line,) = lines
    return {name: float(number) for name, number in (part.split("=") for part in line.split(", "))}


def aggregated(stats: list[OffloadStats | None]) -> OffloadStats | None:
    """What vLLM makes of its workers' stats."""
    outputs = [
        ModelRunnerOutput([], {}, kv_connector_output=KVConnectorOutput(kv_connector_stats=one))
        for one in stats
    ]
    merged = KVOutputAggregator(len(outputs)).aggregate(outputs)
    assert merged is not None
    assert merged.kv_connector_output is not None
    found = merged.kv_connector_output.kv_connector_stats
    assert found is None or isinstance(found, OffloadStats)
    return found


def test_nothing_is_reported_when_nothing_has_changed() -> None:
    reporter = Reporter("rank 0", OF_RANKS)
    (snapshot,) = snapshots(OF_RANKS, random.Random(1), 1)
    assert reporter.take(snapshot) is not None
    assert reporter.take(dict(snapshot)) is None


def test_the_log_shows_rates_and_leaves_zeros_out() -> None:
    stats = OffloadStats({"counters": {"bytes_load": 3 * 10**9, "seconds_load": 1.5, "hits": 0}})
    assert stats.reduce() == {"bytes_load": 3 * 10**9, "seconds_load": 1.5, "load_gb_per_s": 2.0}


# -- what is counted, on vLLM's real scheduler ----------------------------------------------------


@pytest.fixture(params=CONNECTORS)
def engine(request: pytest.FixtureRequest, model_config_dir: Path) -> Engine:
    return Engine(
        model_config_dir,
        connector=request.param,
        extra_config={"min_load_tokens": 6},
        num_blocks=20,
    )


def answers(engine: Engine) -> tuple[int, ...]:
    snapshot = engine.snapshot()
    return tuple(int(snapshot[name]) for name in ("hits", "misses", "declined"))


def test_a_request_counts_once_as_a_hit_a_miss_or_declined(engine: Engine) -> None:
    def run(request_id: str, prompt: list[int], **sampling: Any) -> None:
        engine.add(request_id, prompt, **sampling)
        engine.run()
        engine.run()
        engine.reset_gpu_cache()

    prompt = tokens(0, 8)
    run("miss", [*prompt, 1])
    assert answers(engine) == (0, 1, 0)
    run("hit", [*prompt, 2])
    assert answers(engine) == (1, 1, 0)
    run("too short", [*prompt[:4], 1, 1, 1])
    assert answers(engine) == (1, 1, 1)
    run("bypass", [*prompt, 3], prompt_logprobs=1)
    assert answers(engine) == (1, 1, 1)
    run("nothing to ask", [1])
    assert answers(engine) == (1, 1, 1)


def test_a_request_that_waits_for_blocks_is_not_counted_again_and_again(engine: Engine) -> None:
    engine.add("runs", tokens(0, 60), max_tokens=12)
    engine.step()
    engine.add("waits", tokens(1, 40))
    for _ in range(5):
        engine.step()
    assert engine.scheduler.requests["waits"].status is RequestStatus.WAITING
    assert engine.snapshot()["lookups"] > 2
    assert answers(engine) == (0, 1, 0)
    engine.run()
    assert answers(engine) == (0, 2, 0)


def test_loaded_tokens_are_shown_as_served_by_the_host(engine: Engine) -> None:
    engine.add("first", [*tokens(0, 8), 1])
    engine.run()
    engine.run()
    engine.reset_gpu_cache()
    found: dict[CacheHitSource, int] = {}
    make_stats = engine.scheduler.make_stats

    def watched(*args: Any, **kwargs: Any) -> Any:
        made = make_stats(*args, **kwargs)
        found.update(made.connector_prefix_cache_stats.hits_by_source)
        return made

    engine.scheduler.make_stats = watched
    engine.add("again", [*tokens(0, 8), 2])
    engine.run()
    assert found == {CacheHitSource.HOST: 8}


def test_the_schedulers_stats_reach_vllms_own(engine: Engine) -> None:
    reported = OffloadStats()
    make_stats = engine.scheduler.make_stats

    def watched(*args: Any, **kwargs: Any) -> Any:
        made = make_stats(*args, **kwargs)
        if made.kv_connector_stats is not None:
            reported.aggregate(OffloadStats(made.kv_connector_stats))
        return made

    engine.scheduler.make_stats = watched
    for i in range(6):
        engine.add(f"r{i}", tokens(i % 3, 30), max_tokens=3)
        engine.run()
        engine.reset_gpu_cache()
    snapshot = engine.snapshot()
    expected = {key: snapshot[source] for one in OF_SCHEDULER for key, _, source in one.series()}
    assert {key: number for key, number in expected.items() if number} == reported.reduce()
    assert expected["hits"] > 0


def test_a_snapshot_has_what_the_metrics_are_made_of_before_the_first_step(
    engine: Engine,
) -> None:
    assert {source for *_, source in series(OF_SCHEDULER)} <= engine.snapshot().keys()

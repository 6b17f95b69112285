"""vLLM's real OpenAI server with kvferry on, asked over HTTP; and the dashboard over what it says.

The server is started once; what it said before, in between and after is looked at by all tests.
"""

import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from openai_server import Samples, Server, openai_server, running
from tiny_models import BLOCK_TOKENS, build_model, shared_prefix_prompts

DOCS = Path(__file__).resolve().parents[2] / "docs"
DASHBOARD = json.loads((DOCS / "grafana" / "kvferry.json").read_text())
SEED = 9
NUM_PROMPTS = 6
NUM_SLOTS = 16
"""Too few for all prompts."""

SLOT_BYTES = 4 * 16 * 1024  # four layers

NAME = re.compile(r"\bvllm:\w+")
MOVES = {
    "hits_total",
    "misses_total",
    "stored_chunks_total",
    "loaded_chunks_total",
    "evicted_chunks_total",
    "bytes_total",
    "seconds_total",
    "slots",
}
"""What must move here; the others may (a wait, a flush, a job that is not over) or must not."""

AT_REST = {
    "declined_total",
    "failed_jobs_total",
    "failed_transfers_total",
    "skipped_stores_total",
    "corrupt_chunks_total",
    "pinned_bytes",
    "ranks_off",
}
"""Nothing of the kind happens: ``min_load_tokens`` is 0, and a CPU pins nothing."""

SET_AT_START = {"slots", "host_bytes"}


@dataclass(frozen=True)
class Run:
    """``/metrics`` of a fresh server, after every prompt came once, and after the last came again;
    and the answers to that one."""

    fresh: Samples
    once: Samples
    twice: Samples
    answers: list[list[int]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    print(f"seed {SEED}")
    prompts = shared_prefix_prompts(SEED, NUM_PROMPTS, num_families=NUM_PROMPTS)
    config = {
        "kv_connector": "KVFerryOffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "num_cpu_blocks": NUM_SLOTS,
            "min_load_tokens": 0,
            "measure_s": 0,
        },
    }
    model = build_model("llama", tmp_path_factory.mktemp("models"))
    sizes = ["--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", "40"]
    with openai_server(model, config, *sizes, "--max-model-len", "512") as server:
        fresh = server.metrics()
        answers = [server.complete(prompt) for prompt in prompts]
        once = settled(server)
        server.reset_gpu_cache()
        again = server.complete(prompts[-1])
        return Run(fresh, once, settled(server), [answers[-1], again])


def settled(server: Server) -> Samples:
    """The metrics once no job is left: a store may end after its request."""
    return server.metrics_when(lambda now: not value(now, "vllm:kvferry_jobs"))


def value(samples: Samples, name: str, **labels: str) -> float:
    """The sum over the time series with these labels."""
    found = [number for own, number in samples[name] if labels.items() <= own.items()]
    assert found, (name, labels)
    return sum(found)


def documented() -> set[str]:
    return set(re.findall(r"^\| `(vllm:kvferry_\w+)`", (DOCS / "metrics.md").read_text(), re.M))


def exported(samples: Samples) -> set[str]:
    """kvferry's names; a counter's ``_created`` is Prometheus's own addition."""
    ours = {name for name in samples if name.startswith("vllm:kvferry_")}
    return {name for name in ours if not name.endswith("_created")}


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


# -- the server -----------------------------------------------------------------------------------


def test_the_answer_from_the_host_is_the_answer(run: Run) -> None:
    computed, loaded = run.answers
    assert loaded == computed


def test_every_name_of_the_docs_is_exported_and_the_other_way_round(run: Run) -> None:
    assert exported(run.fresh) == documented()


def test_a_fresh_server_shows_every_series_at_0(run: Run) -> None:
    for name in exported(run.fresh) - {f"vllm:kvferry_{one}" for one in SET_AT_START}:
        assert value(run.fresh, name) == 0, name
    states = [labels["state"] for labels, _ in run.fresh["vllm:kvferry_slots"]]
    assert sorted(states) == ["doomed", "free", "reading", "ready", "writing"]


def test_what_happens_moves_and_what_does_not_stays_at_0(run: Run) -> None:
    def moved(before: Samples, after: Samples) -> set[str]:
        return {
            name.removeprefix("vllm:kvferry_")
            for name in exported(after)
            if any(series not in before[name] for series in after[name])
        }

    assert moved(run.fresh, run.twice) >= MOVES
    assert not moved(run.fresh, run.twice) & AT_REST
    assert {"misses_total", "stored_chunks_total"} <= moved(run.fresh, run.once)
    assert value(run.once, "vllm:kvferry_hits_total") == 0
    assert value(run.once, "vllm:kvferry_misses_total") == NUM_PROMPTS
    assert value(run.twice, "vllm:kvferry_hits_total") == 1
    loaded = value(run.twice, "vllm:kvferry_loaded_chunks_total")
    assert loaded > 0
    assert value(run.twice, "vllm:kvferry_bytes_total", direction="load") == loaded * SLOT_BYTES
    stored = value(run.twice, "vllm:kvferry_stored_chunks_total")
    assert value(run.twice, "vllm:kvferry_bytes_total", direction="store") == stored * SLOT_BYTES
    assert stored - value(run.twice, "vllm:kvferry_evicted_chunks_total") <= NUM_SLOTS
    assert value(run.twice, "vllm:kvferry_slots") == NUM_SLOTS


def test_vllm_counts_the_same_tokens_as_kvferry(run: Run) -> None:
    loaded = value(run.twice, "vllm:kvferry_loaded_chunks_total") * BLOCK_TOKENS
    assert value(run.twice, "vllm:external_prefix_cache_hits_total") == loaded
    by_source = "vllm:prompt_tokens_cached_by_source_total"
    assert value(run.twice, by_source, source="host") == loaded
    assert value(run.twice, "vllm:time_to_first_token_seconds_count") == NUM_PROMPTS + 1


# -- the dashboard --------------------------------------------------------------------------------


def test_every_name_in_the_dashboard_is_there(run: Run) -> None:
    named = {name for expression in expressions() for name in NAME.findall(expression)}
    assert named <= set(run.twice)
    assert {name for name in named if "kvferry" in name} == documented()


def test_every_label_in_the_dashboard_is_there(run: Run) -> None:
    """Of each selector: the labels that it names, and with them the values that it asks for."""
    for expression in expressions():
        for name, selector in re.findall(r"(vllm:\w+)\{(.*?)\}", expression):
            wanted = dict(re.findall(r'(\w+)="(\w+)"', selector))
            assert value(run.twice, name, **wanted) >= 0, expression
            labels, _ = run.twice[name][0]
            assert set(re.findall(r"(\w+)=", selector)) <= set(labels), expression
        for grouped in re.findall(r"by \((\w+)\)", expression):
            names = NAME.findall(expression)
            assert all(grouped in labels for name in names for labels, _ in run.twice[name])


def test_the_dashboard_can_be_imported() -> None:
    """Into any Grafana: no data source, id or name of one installation is in it."""
    assert DASHBOARD["id"] is None
    assert DASHBOARD["schemaVersion"] >= 36
    variables = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
    assert {"datasource", "model_name", "engine"} == set(variables)
    assert variables["datasource"]["type"] == "datasource"
    source = {"type": "prometheus", "uid": "${datasource}"}
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in panels():
        assert panel["datasource"] == source
        assert all(target["datasource"] == source for target in panel["targets"])
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
    for expression in expressions():
        selectors = expression.count("vllm:")
        assert expression.count('model_name=~"$model_name", engine=~"$engine"') == selectors


def test_the_docs_explain_every_panel_in_its_order() -> None:
    text = (DOCS / "dashboard.md").read_text()
    explained = re.findall(r"^(?:## (.+)|\| \*\*(.+?)\*\* \|)", text, re.M)
    titles = [panel["title"] for panel in DASHBOARD["panels"]]
    assert [heading or panel for heading, panel in explained] == titles


# -- how it is ended ------------------------------------------------------------------------------

PARENT = """
import subprocess, sys
print("group", flush=True)
subprocess.Popen([sys.executable, "-P", "-c", "import signal; signal.pause()"])
print("{said}", flush=True)
{then}
"""


def group_of(said: str, then: str, start_s: float) -> Any:
    command = [sys.executable, "-P", "-c", PARENT.format(said=said, then=then)]
    return running(command, dict(os.environ), "ready", start_s)


def test_no_process_is_left_when_a_test_fails() -> None:
    """``running`` looks itself whether anyone still holds the pipe that they all write to."""
    pause = "import signal; signal.pause()"
    with pytest.raises(ZeroDivisionError), group_of("ready", pause, 30.0):
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("then", "start_s", "told"),
    [("raise SystemExit('no model')", 30.0, r"it ended:(.|\n)*no model"), ("input()", 0.0, "not")],
)
def test_a_process_that_does_not_get_ready_is_told_of(then: str, start_s: float, told: str) -> None:
    with pytest.raises(AssertionError, match=told), group_of("not yet", then, start_s):
        pass

"""What users see of ``kvferry.integration.vllm``: its names, and what a ``snapshot`` tells."""

import subprocess
import sys
from pathlib import Path

import pytest
from real_scheduler import Engine
from tiny_models import build_model, tiny_engine

CONNECTORS = ["KVFerrySimpleConnector", "KVFerryOffloadingConnector"]

OF_SCHEDULER = {
    "free",
    "writing",
    "ready",
    "reading",
    "doomed",
    "leases",
    "jobs",
    "fences",
    "requests",
    "lookups",
    "hits",
    "stored_chunks",
    "loaded_chunks",
    "evicted_chunks",
    "failed_jobs",
}
OF_WORKER = {
    "jobs",
    "queued",
    "stored_bytes",
    "loaded_bytes",
    "failed_jobs",
    "arena_bytes",
    "pinned_bytes",
}

PUBLIC_NAMES = """
from types import ModuleType
import kvferry.integration.vllm as public
given = {name for name, value in vars(public).items() if not isinstance(value, ModuleType)}
print(*sorted(name for name in given if not name.startswith("_")))
print(*sorted(public.__all__))
"""


def test_the_package_exports_the_connectors_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a process of its own: tests import modules, which then are attributes of the package."""
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    done = subprocess.run(
        [sys.executable, "-P", "-c", PUBLIC_NAMES], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    there, exported = (line.split() for line in done.stdout.splitlines()[-2:])
    assert there == sorted(CONNECTORS)
    assert exported == sorted(CONNECTORS)


@pytest.mark.parametrize("connector", CONNECTORS)
def test_the_schedulers_snapshot(model_config_dir: Path, connector: str) -> None:
    engine = Engine(model_config_dir, connector=connector, num_slots=7)
    snapshot = engine.connector.snapshot()
    assert snapshot.keys() >= OF_SCHEDULER
    assert {type(value) for value in snapshot.values()} <= {int, float}
    assert snapshot["free"] == 7
    shown = repr(engine.connector)
    assert all(f"{name}={snapshot[name]}" in shown for name in OF_SCHEDULER)


@pytest.mark.parametrize("connector", CONNECTORS)
def test_the_workers_snapshot(tmp_path: Path, connector: str) -> None:
    with tiny_engine(build_model("llama", tmp_path), connector=connector) as engine:
        engine.generate([list(range(3, 103))])
        engine.drain()
        snapshot, shown = engine.worker.snapshot(), repr(engine.worker)
        stored = engine.connector.snapshot()["stored_chunks"]
        assert snapshot.keys() >= OF_WORKER
        assert {type(value) for value in snapshot.values()} <= {int, float}
        assert all(f"{name}={snapshot[name]}" in shown for name in OF_WORKER)
        assert snapshot["arena_bytes"] > 0
        assert snapshot["stored_bytes"] > 0
        assert stored == 3

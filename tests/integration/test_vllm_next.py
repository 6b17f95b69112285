"""Our scheduler halves and the spec on the next vLLM's own code, as far as it runs uninstalled.

Its Python files go before the installed release's on the path of a second pytest. What needs its
compiled parts, the engine itself, does not run; its scheduler, block pool and offloading code do.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_sources import NEXT, NEXT_FOLDER, NO_NEXT

pytestmark = pytest.mark.skipif(not NEXT_FOLDER.exists(), reason=NO_NEXT)

HERE = Path(__file__).resolve().parent

RUNS = {
    # With positions 0.33 orders a running request's chunks otherwise: see docs/choosing.md.
    "test_spec_manager.py": "not placed or unplaced",
    "test_spec_worker.py": "",
    # From 0.33 on the scheduler frees blocks late while a step is in flight, so that a reset of
    # running requests raises there, whatever the connector.
    "test_guard.py": "not (preempted and async)",
    "test_scenarios_scheduler.py": "not ((s4 or s5) and async)",
    "test_scenarios_failures.py": "",
}


@pytest.mark.parametrize("name", RUNS)
def test_on_the_next_vllm(name: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / name)]
    ran = subprocess.run(
        [*command, "-k", RUNS[name]] if RUNS[name] else command,
        env={**os.environ, "PYTHONPATH": str(NEXT_FOLDER.parent), "PYTHONSAFEPATH": "1"},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ran.returncode == 0, ran.stdout[-6000:]
    assert "passed" in ran.stdout


def test_the_path_leads_to_the_next_vllm() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", "import vllm; print(vllm.__file__)"],
        env={**os.environ, "PYTHONPATH": str(NEXT_FOLDER.parent), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert NEXT in ran.stdout.splitlines()[-1]

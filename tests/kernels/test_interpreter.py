"""Runs the tests in ``interpreted`` with Triton's interpreter, which takes a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"


@pytest.mark.parametrize("name", ["copy", "pack", "checksum"])
def test_suite_passes_in_the_interpreter(name):
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
        str(FOLDER / f"test_{name}_interpreted.py"),
    ]  # fmt: skip
    environment = os.environ | {
        "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"
    }  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-4000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout

"""The launches of the CUDA device in Triton's interpreter, against their references."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "interpreted_moves.py"


def test_kernels_as_the_device_launches_them_do_what_their_references_do():
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(SCRIPT.parent),
        "PYTHONSAFEPATH": "1",
    }
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-8000:]
    assert "launched" in done.stdout

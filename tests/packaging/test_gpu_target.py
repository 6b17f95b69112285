"""``make test-gpu`` fails where there is no GPU, and never passes by skipping."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
WAIT_S = 120.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("found", [False, True], ids=["no driver", "a driver, no CUDA in torch"])
def test_it_fails_without_a_gpu(tmp_path: Path, found: bool) -> None:
    if shutil.which("make") is None:
        pytest.skip("needs make")
    if found:
        driver = tmp_path / "nvidia-smi"
        driver.write_text("#!/bin/sh\necho 'GPU 0: of a test'\n")
        driver.chmod(0o755)
    run = subprocess.run(
        ["make", "test-gpu", f"PYTHON={sys.executable}", "ARGS=-q -p no:cacheprovider -k gpu"],
        cwd=ROOT,
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    said = run.stdout + run.stderr
    assert run.returncode != 0, said
    assert ("a GPU is required" if found else "no NVIDIA GPU here") in said

"""A second vLLM engine starts in a process whose CPU device has loaded numba."""

import subprocess
import sys

import pytest

pytest.importorskip("numba", reason="numba is not installed")

SCAN = """
import sys
from kvferry.engine.devices.cpu import CpuDevice
device = CpuDevice()
for module in list(sys.modules.values()):
    for value in list(getattr(module, "__dict__", {}).values()):
        if module.__name__.startswith("llvmlite") and hasattr(value, "__dict__"):
            vars(value).get("kernel")
device.close(timeout_s=10.0)
"""


def test_a_look_through_all_modules_passes_over_llvmlite() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", SCAN], capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()

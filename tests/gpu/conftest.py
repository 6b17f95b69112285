"""Tests that need an NVIDIA GPU: skipped, with the reason, where there is none.

With ``KVFERRY_REQUIRE_GPU`` set (``make test-gpu`` sets it) a missing GPU is an error instead: what
should run on one must not pass by skipping.
"""

import os
from pathlib import Path

import pytest
import torch
from kvferry.kernels.config import PLAIN, STAGED, CopyConfig

pytest.register_assert_rewrite("suite_copy", "suite_pack", "suite_checksum")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what lies in this folder; the hook sees the tests of a whole run."""
    if torch.cuda.is_available():
        return
    if os.environ.get("KVFERRY_REQUIRE_GPU"):
        raise pytest.UsageError(
            f"a GPU is required, but torch {torch.__version__} finds none: run these tests with a "
            "Python whose torch is built for CUDA (make test-gpu PYTHON=...)"
        )
    reason = pytest.mark.skip(reason="needs an NVIDIA GPU: torch.cuda finds none")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(reason)


@pytest.fixture
def device() -> str:
    """Where the pages lie; host memory is pinned."""
    return "cuda:0"


@pytest.fixture(params=[PLAIN, STAGED], ids=["plain", "staged"])
def config(request: pytest.FixtureRequest) -> CopyConfig:
    """Both ways through a multiprocessor: registers, and asynchronous copies."""
    chosen: CopyConfig = request.param
    return chosen

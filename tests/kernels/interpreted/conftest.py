"""These tests run in Triton's interpreter, chosen for a whole process before Triton is imported.

``test_interpreter.py`` runs them in a process of their own; anywhere else they are not collected.
"""

import os

import pytest
from kvferry.kernels.config import PLAIN, CopyConfig

pytest.register_assert_rewrite("suite_copy", "suite_pack", "suite_checksum")

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def device() -> str:
    """Where the pages lie."""
    return "cpu"


@pytest.fixture
def config() -> CopyConfig:
    """One will do: the interpreter knows no stages."""
    return PLAIN

"""These tests run in Triton's interpreter, chosen for a whole process before Triton is imported.

``test_interpreter.py`` runs them in a process of their own; anywhere else they are not collected.
"""

import os

import pytest

pytest.register_assert_rewrite("suite_copy", "suite_pack", "suite_checksum")

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def device() -> str:
    """Where the pages lie."""
    return "cpu"

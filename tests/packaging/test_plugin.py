"""vLLM finds the connectors by the plugin's entry point, and by the module's path."""

import importlib.metadata
import subprocess
import sys

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

FIND_BY_PLUGIN = """
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.plugins import load_general_plugins
load_general_plugins()
config = KVTransferConfig(kv_connector="KVFerrySimpleConnector", kv_role="kv_both")
print(KVConnectorFactory.get_connector_class(config).__module__)
"""

FIND_BY_PATH = """
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
config = KVTransferConfig(
    kv_connector="KVFerrySimpleConnector",
    kv_role="kv_both",
    kv_connector_module_path="kvferry.integration.vllm",
)
print(KVConnectorFactory.get_connector_class(config).__module__)
"""


@pytest.mark.parametrize(
    ("code", "plugins"), [(FIND_BY_PLUGIN, "kvferry"), (FIND_BY_PATH, "none-of-these")]
)
def test_a_fresh_process_finds_the_connector(
    code: str, plugins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", plugins)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "kvferry.integration.vllm.simple"


def test_registering_twice_changes_nothing() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    (entry,) = (
        entry
        for entry in importlib.metadata.entry_points(group="vllm.general_plugins")
        if entry.name == "kvferry"
    )
    register = entry.load()
    register()
    known = dict(KVConnectorFactory._registry)
    register()
    assert dict(KVConnectorFactory._registry) == known
    assert "KVFerrySimpleConnector" in known

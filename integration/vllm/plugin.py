"""The ``vllm.general_plugins`` entry point: makes the connectors known to vLLM by name."""

_CONNECTORS = {
    "KVFerryOffloadingConnector": "kvferry.integration.vllm.offloading",
    "KVFerrySimpleConnector": "kvferry.integration.vllm.simple",
}


def register() -> None:
    """Register the connectors. vLLM calls it in every process, and may do so more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name, module in _CONNECTORS.items():
        # The factory raises on a name it knows, and has no public way to ask.
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, module, name)

"""The ``vllm.general_plugins`` entry point: makes the connectors known to vLLM by name."""

import logging

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
    ours = logging.getLogger("kvferry")
    if not ours.hasHandlers():  # else somebody has set up logging for us, or for everything
        ours.setLevel(logging.DEBUG)
        ours.addHandler(_ToVLLM())


class _ToVLLM(logging.Handler):
    """Hands our lines to vLLM's logger, for its level and handlers.

    vLLM sets up that logger alone, in some processes after the plugins were loaded; and what has
    no handler and is no warning is lost.
    """

    def emit(self, record: logging.LogRecord) -> None:
        theirs = logging.getLogger("vllm")
        if theirs.isEnabledFor(record.levelno):
            theirs.handle(record)

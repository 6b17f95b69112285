"""kvferry for vLLM: connectors to name in ``--kv-transfer-config``."""

from .simple import KVFerrySimpleConnector

__all__ = ["KVFerrySimpleConnector"]

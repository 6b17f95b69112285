"""kvferry for vLLM: connectors to name in ``--kv-transfer-config``."""

from .offloading import KVFerryOffloadingConnector
from .simple import KVFerrySimpleConnector

__all__ = ["KVFerryOffloadingConnector", "KVFerrySimpleConnector"]

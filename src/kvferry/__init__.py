"""kvferry: a KV-cache offload engine for vLLM."""

__version__ = "0.1.0"

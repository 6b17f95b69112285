"""What every engine's process needs, imported once: importing vLLM takes longer than a small engine
takes to start. The server that forks the processes imports this; nothing in here touches a device.
"""

from ..demo.engine import prepare_environment

prepare_environment()

import vllm.v1.engine.llm_engine  # noqa: E402, F401
from vllm import LLM  # noqa: E402, F401

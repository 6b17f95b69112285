"""Environment of the tests that run vLLM: set before anything imports it."""

import os

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_HOST_IP="127.0.0.1",
    PYTHONHASHSEED="0",
    OMP_NUM_THREADS="1",  # hybrid models are not deterministic with more
)

from functools import partial
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def model_config_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Llama ``config.json``: all that a scheduler reads of a model."""
    from real_scheduler import write_model_config

    return write_model_config(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=["sync", "async"])
def async_scheduling(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "async")


@pytest.fixture(params=["simple", "offloading"])
def make_engine(request: pytest.FixtureRequest, model_config_dir: Path) -> Any:
    """Makes a ``real_scheduler.Engine`` with either connector."""
    from real_scheduler import CONNECTORS, Engine

    return partial(Engine, model_config_dir, **CONNECTORS[request.param])

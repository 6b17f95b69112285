"""Byte counts of ``kvferry plan`` against what vLLM's CPU engine really allocates."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kvferry.profiling.plan_groups import block_tokens_of, groups_of
from kvferry.profiling.plan_model import read_model
from kvferry.profiling.plan_recurrent import LayerState

sys.path.insert(0, str(Path(__file__).parent))
from tiny_configs import TINY

pytest.importorskip("vllm")

BLOCK_TOKENS = 32


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    for name, config in TINY.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
    return {name: root / name for name in TINY}


@pytest.fixture(scope="module")
def engine(folders: dict[str, Path]) -> dict[str, Any]:
    """What the engine holds for each model: all in one process, which imports vLLM once."""
    script = Path(__file__).parent / "engine_sizes.py"
    command = [sys.executable, "-P", str(script), str(BLOCK_TOKENS), *map(str, folders.values())]
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    answer = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
    assert answer.returncode == 0, answer.stderr[-4000:]
    by_folder = json.loads(answer.stdout.strip().splitlines()[-1])
    return {name: by_folder[str(folder)] for name, folder in folders.items()}


@pytest.mark.parametrize("name", TINY)
def test_the_engine_allocates_what_was_planned(
    name: str, engine: dict[str, Any], folders: dict[str, Path]
) -> None:
    real = engine[name]
    # The engine may choose blocks of its own (16 tokens for MLA on a CPU): a plan is told them.
    (block_tokens,) = {one["block_tokens"] for one in real["groups"]}
    # On some processors states are float32 unless asked otherwise.
    dtype = next((one["state_dtype"] for one in real["groups"] if one["state_bytes"]), None)
    layers = tuple(
        replace(one, head_dtype=dtype) if isinstance(one, LayerState) and dtype else one
        for one in read_model(str(folders[name])).layers
    )
    if dtype is not None:
        assert block_tokens == block_tokens_of(layers, BLOCK_TOKENS, 1, item_bytes=2)
        assert block_tokens > BLOCK_TOKENS  # or nothing was raised
    groups = groups_of(layers, block_tokens, 1, item_bytes=2)
    assert sorted((one.num_layers, one.page_bytes, one.state_bytes) for one in groups) == sorted(
        (one["layers"], one["page_bytes"], one["state_bytes"]) for one in real["groups"]
    )
    # Groups share the memory: a block costs what it takes in the largest of them.
    largest = max(one.block_bytes for one in groups)
    assert real["allocated_bytes"] == largest * real["num_blocks"]

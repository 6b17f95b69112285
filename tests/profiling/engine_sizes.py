"""Run in a process of its own: what vLLM's CPU engine really allocates for each model folder.

Prints one line of JSON: ``{folder: {"groups": [...], "block_bytes": ..., "num_blocks": ...}}``.
"""

import json
import os
import sys
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}

NUM_BLOCKS = 32


def _state_of(spec: Any) -> dict[str, object]:
    """What a recurrent layer really keeps in its padded page; nothing for the others."""
    if type(spec).__name__ != "MambaSpec":
        return {"state_bytes": 0}
    return {
        "state_bytes": spec.state_content_size_bytes,
        "state_dtype": str(spec.dtypes[-1]).removeprefix("torch."),
    }


def sizes_of(folder: str, block_tokens: int) -> dict[str, object]:
    """Start the engine on a model without weights and look at what it holds."""
    from vllm import LLM

    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        load_format="dummy",
        enforce_eager=True,
        dtype="bfloat16",
        block_size=block_tokens,
        num_gpu_blocks_override=NUM_BLOCKS,
        max_model_len=128,
    )
    core = llm.llm_engine.engine_core.engine_core
    config = core.scheduler.kv_cache_config
    runner = core.model_executor.driver_worker.worker.model_runner
    caches = [
        one
        for cache in runner.kv_caches  # of a recurrent layer a view for each part of its state
        for one in (cache if isinstance(cache, list | tuple) else [cache])
    ]
    storages = {
        cache.untyped_storage().data_ptr(): cache.untyped_storage().nbytes() for cache in caches
    }
    found = {
        "groups": [
            {
                "layers": len(group.layer_names),
                "page_bytes": group.kv_cache_spec.page_size_bytes,
                "block_tokens": group.kv_cache_spec.block_size,
                "spec": type(group.kv_cache_spec).__name__,
                **_state_of(group.kv_cache_spec),
            }
            for group in config.kv_cache_groups
        ],
        "allocated_bytes": sum(storages.values()),
        "num_blocks": config.num_blocks,
    }
    llm.llm_engine.engine_core.shutdown()
    return found


if __name__ == "__main__":
    block_tokens = int(sys.argv[1])
    result = {folder: sizes_of(folder, block_tokens) for folder in sys.argv[2:]}
    print("\n" + json.dumps(result))

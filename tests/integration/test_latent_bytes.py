"""Latent attention (MLA): the real scheduler, the real worker half, and every byte compared.

vLLM's CPU platform turns prefix caching off for such models, so its engine cannot show this. Here
the forward pass is replaced: into caches that vLLM allocates for DeepSeek's shapes it writes bytes
that follow from all tokens up to a place, and first it checks those of every place before it.
"""

import zlib
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kvferry.engine.messages import StepOrders
from kvferry.engine.types import Rank
from kvferry.integration.vllm.caches import layout_from
from kvferry.integration.vllm.config import OffloadingOptions
from kvferry.integration.vllm.metadata import ReportsMetadata
from kvferry.integration.vllm.worker import OffloadWorker
from real_runs import count_host_tokens
from real_scheduler import Engine
from tiny_models import shared_prefix_prompts
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.utils import allocate_kv_cache

SEED = 26
NUM_REQUESTS = 60
BLOCK_TOKENS = 16
NUM_BLOCKS = 60
NUM_SLOTS = 150
LATENT = 576
LAYERS = ["layer.0", "layer.1", "layer.2"]


def latent_config() -> KVCacheConfig:
    spec = MLAAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=LATENT, dtype=torch.bfloat16
    )
    page = spec.page_size_bytes
    tensor = KVCacheTensor(page * NUM_BLOCKS * len(LAYERS), LAYERS, page * NUM_BLOCKS, page)
    return KVCacheConfig(NUM_BLOCKS, [tensor], [KVCacheGroupSpec(LAYERS, spec)])


def written_for(tokens: list[int]) -> np.ndarray:
    """``[len(tokens), layers, LATENT]``: what each place holds, by all tokens up to it."""
    chain = accumulate(tokens, lambda crc, token: zlib.crc32(token.to_bytes(4), crc), initial=0)
    seeds = np.array(list(chain)[1:], dtype=np.uint64)[:, None, None]
    layers = np.arange(len(LAYERS), dtype=np.uint64)[None, :, None]
    places = np.arange(1, LATENT + 1, dtype=np.uint64)[None, None, :]
    return ((seeds * places + layers * np.uint64(40503)) >> np.uint64(7)).astype(np.uint16)


class LatentRank:
    """A rank whose transfers are real, in the place of ``FakeRanks``."""

    def __init__(self, config: KVCacheConfig) -> None:
        caches = allocate_kv_cache(config, torch.device("cpu"), layout=KVCacheLayout.LBHNC)
        options = OffloadingOptions.parse({"num_cpu_blocks": NUM_SLOTS, "measure_s": 0})
        self.worker = OffloadWorker(layout_from(caches, config), options, Rank(0), 1)
        self.caches = [
            caches[name].view(torch.int16).numpy().view(np.uint16).reshape(-1, BLOCK_TOKENS, LATENT)
            for name in LAYERS
        ]
        self.orders = StepOrders()
        self.num_checked = 0

    def take(self, orders: StepOrders) -> None:
        self.orders = orders
        self.worker.begin(orders)
        self.worker.mark_loads()

    def forward(self, tokens: list[int], start: int, blocks: list[int]) -> None:
        """Compute all places from ``start`` on, reading those before it."""
        content = written_for(tokens)
        for place in range(len(tokens)):
            block, offset = blocks[place // BLOCK_TOKENS], place % BLOCK_TOKENS
            for layer, cache in enumerate(self.caches):
                if place < start:
                    assert np.array_equal(cache[block, offset], content[place, layer]), place
                else:
                    cache[block, offset] = content[place, layer]
        self.num_checked += start

    def output(self) -> KVConnectorOutput:
        self.worker.start_loads(self.orders)
        self.worker.start_stores(self.orders)
        self.worker.poll(self.orders)
        finished, _ = self.worker.take_finished_loads()
        reports = self.worker.take_reports()
        return KVConnectorOutput(
            finished_recving=finished or None,
            invalid_block_ids=self.worker.take_failed_blocks(),
            kv_connector_worker_meta=ReportsMetadata(reports) if reports.reports else None,
        )

    def complete_all(self) -> None:
        """Nothing: transfers end by themselves."""


class LatentEngine(Engine):
    """The real scheduler over one ``LatentRank``; counts what the host serves."""

    def __init__(self, model: Path, connector: str) -> None:
        config = latent_config()
        super().__init__(
            model,
            connector=connector,
            block_tokens=BLOCK_TOKENS,
            num_blocks=NUM_BLOCKS,
            num_slots=NUM_SLOTS,
            max_batched_tokens=128,
            kv_cache_config=config,
            extra_config={"min_load_tokens": 0},
        )
        self.rank = LatentRank(config)
        self.ranks: Any = self.rank
        self.num_preemptions = 0

    def _update(self, output: SchedulerOutput, samples: dict[str, bool]) -> None:
        self.num_preemptions += len(output.preempted_req_ids or ())
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            end = request.num_computed_tokens  # the scheduler has already counted this step
            tokens = list(request.all_token_ids[:end])
            self.rank.forward(tokens, end - num_scheduled, self.blocks_of(request_id))
        super()._update(output, samples)


@pytest.mark.parametrize("connector", ["KVFerryOffloadingConnector", "KVFerrySimpleConnector"])
def test_latents_are_the_same_bytes_after_a_trip_through_the_host(
    connector: str, model_config_dir: Path
) -> None:
    print(f"seed {SEED}")
    prompts = shared_prefix_prompts(SEED, NUM_REQUESTS, longest=320)
    prompts = [[token % 64 for token in prompt] for prompt in prompts]
    engine = LatentEngine(model_config_dir, connector)
    try:
        from_host = count_host_tokens(engine)
        for index, prompt in enumerate(prompts):
            engine.add(f"r{index}", prompt, max_tokens=24)
        engine.run(max_steps=50_000)
        engine.check_idle()
        snapshot = engine.snapshot()
    finally:
        engine.rank.worker.close()
    print(f"{engine.num_preemptions} preemptions, {snapshot}")
    num_prompt_tokens = sum(map(len, prompts))
    assert from_host.total >= 0.3 * num_prompt_tokens
    assert snapshot["failed_jobs"] == 0
    assert snapshot["evicted_chunks"] > 0
    assert engine.num_preemptions > 0
    assert engine.rank.num_checked > num_prompt_tokens

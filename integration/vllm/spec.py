"""``KVFerryOffloadingSpec``: our ledger and transfer engine under vLLM's ``OffloadingConnector``.

    "kv_connector": "OffloadingConnector",
    "kv_connector_extra_config": {"spec_name": "KVFerryOffloadingSpec",
                                  "spec_module_path": "kvferry.integration.vllm.spec", ...}

What to match, store and flush is then vLLM's decision, and so is the bypass guard. vLLM's worker
asserts that no transfer fails: integrity checks are off here, and a broken one stops the engine.
"""

from typing import Any, Final

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingMetricMetadata,
    OffloadingSpec,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from ...engine.layout import SLOT_ALIGNMENT_BYTES
from ...engine.types import Rank
from . import option_values, worker
from .spec_manager import KVFerryOffloadingManager
from .spec_worker import KVFerryOffloadingWorker

__all__ = ["KVFerryOffloadingManager", "KVFerryOffloadingSpec", "KVFerryOffloadingWorker"]

OPTIONS: Final = frozenset(
    {
        "cpu_bytes_to_use",
        "cpu_bytes_to_use_per_rank",
        "num_cpu_blocks",
        "eviction_policy",
        "cache_policy_module_path",
        "store_threshold",
        "max_tracker_size",
    }
)
"""What is read here, of ``kv_connector_extra_config``."""

VLLM_OPTIONS: Final = frozenset(
    {
        "spec_name",
        "spec_module_path",
        "block_size",
        "blocks_per_chunk",
        "offload_prompt_only",
        "self_describing_kv_events",
        "sync_load_budget_bytes",  # from 0.33 on
    }
)
"""What vLLM's connector reads for itself; its meaning is vLLM's."""


class KVFerryOffloadingSpec(OffloadingSpec):
    """Made by vLLM in the scheduler's process and in every worker's, from the same options."""

    def __init__(self, config: OffloadingConfig) -> None:
        """Raises ValueError for an option that is unknown, bad, or not supported here."""
        super().__init__(config)
        self._check_options()
        self.num_chunks, self.slot_bytes = self._capacity()
        self._manager: KVFerryOffloadingManager | None = None
        self._worker: KVFerryOffloadingWorker | None = None

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """Those of vLLM's CPU cache: the manager reports the same names."""
        from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

        return CPUOffloadingSpec.build_metric_definitions(extra_config)

    @classmethod
    def config_info_keys(cls, extra_config: dict[str, Any]) -> tuple[str, ...]:
        """The labels of vLLM's info metric (0.33); none before."""
        info = _info_type()
        return tuple(info.config_info_keys()) if info is not None else ()

    def get_manager(self) -> KVFerryOffloadingManager:
        if self._manager is None:
            info = _info_type()
            facts = (self.config, self.num_chunks, self.slot_bytes * self._num_ranks)
            self._manager = KVFerryOffloadingManager(
                self.num_chunks,
                cache_policy=self.extra_config.get("eviction_policy", "lru"),
                cache_policy_module_path=self.extra_config.get("cache_policy_module_path"),
                enable_events=self.kv_events_config.enable_kv_cache_events,
                store_threshold=self._count("store_threshold", 0),
                max_tracker_size=self._count("max_tracker_size", 64_000),
                info=info.from_config(*facts) if info is not None else None,
            )
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> KVFerryOffloadingWorker:
        """Raises ValueError for a device or a cache that is not supported."""
        if self._worker is None:
            if self.num_chunks < 1:
                raise ValueError("the KV cache has no blocks, so there is nothing to offload")
            self._worker = KVFerryOffloadingWorker(
                kv_caches,
                self.blocks_per_chunk,
                self.num_chunks,
                None if "num_cpu_blocks" in self.extra_config else self.slot_bytes,
                worker.device_of(kv_caches.tensors[0].tensor),
                Rank(self.config.parallel.rank),
            )
        return self._worker

    @property
    def _num_ranks(self) -> int:
        return max(1, self.config.parallel.world_size)

    def _check_options(self) -> None:
        if self.config.canonical_layout:
            raise ValueError(
                "kv_connector_extra_config: canonical_layout is not supported by "
                "KVFerryOffloadingSpec: its host memory is private to each rank, and nobody else "
                "reads it; allowed: to leave it out"
            )
        allowed = OPTIONS | VLLM_OPTIONS
        for name in self.extra_config:
            if name not in allowed and name != "canonical_layout":
                raise ValueError(
                    f"kv_connector_extra_config has the key {name!r} (value "
                    f"{self.extra_config[name]!r}), which KVFerryOffloadingSpec does not know; "
                    f"allowed: {', '.join(sorted(allowed))}"
                )
        if self.config.parallel.pp_size > 1 and "num_cpu_blocks" not in self.extra_config:
            raise ValueError(
                "pipeline parallelism with KVFerryOffloadingSpec: ranks with different layers "
                "divide bytes into different numbers of chunks; allowed: to set num_cpu_blocks"
            )

    def _capacity(self) -> tuple[int, int]:
        """How many chunks a rank holds, and the bytes of one; the same numbers in every process."""
        bytes_per_chunk = self.config.worker_kv_bytes_per_block * self.blocks_per_chunk
        slot_bytes = -(-bytes_per_chunk // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES
        if slot_bytes == 0:
            return 0, 0
        if "num_cpu_blocks" in self.extra_config:
            return self._count("num_cpu_blocks", 1, least=1), slot_bytes
        name = "cpu_bytes_to_use"
        if "cpu_bytes_to_use_per_rank" in self.extra_config:
            name = "cpu_bytes_to_use_per_rank"
        given = self.extra_config.get(name)
        if given is None:
            raise ValueError(
                "kv_connector_extra_config names no size; allowed: cpu_bytes_to_use, "
                "cpu_bytes_to_use_per_rank or num_cpu_blocks"
            )
        # vLLM's --kv-offloading-size comes as a float that need not be whole.
        total = option_values.size(name, int(given) if isinstance(given, float) else given)
        num_chunks = total // slot_bytes
        if name == "cpu_bytes_to_use":
            num_chunks = total // self._num_ranks // slot_bytes
        if num_chunks < 1:
            raise ValueError(
                f"kv_connector_extra_config: {name}={given!r} is less than one chunk on each of "
                f"{self._num_ranks} ranks; allowed: at least {slot_bytes} bytes a rank"
            )
        return num_chunks, slot_bytes

    def _count(self, name: str, default: int, least: int = 0) -> int:
        value = self.extra_config.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(
                f"kv_connector_extra_config: {name}={value!r}; allowed: an integer from {least} on"
            )
        return value


def _info_type() -> Any:
    """What vLLM tells about a CPU cache from 0.33 on; None before."""
    from vllm.v1.kv_offload.cpu import common

    return getattr(common, "CPUOffloadingInfo", None)

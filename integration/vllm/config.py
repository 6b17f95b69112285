"""``kv_connector_extra_config`` -> frozen, validated options.

Names follow vLLM's own connectors where the meaning is the same. Whatever is wrong is a
``ValueError`` that names the key, what was given and what is allowed, before anything is allocated.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from vllm.logger import init_logger

from ...engine.core_options import CoreOptions
from . import option_values as values
from .foreign_options import without_foreign

logger = init_logger(__name__)

GIB = 1024**3

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""vLLM's physical layouts: layer, block, head, token, content."""

Integrity = Literal["full", "sample", "off"]


def _parsed_by(parser: values.Parser) -> dict[str, values.Parser]:
    return {"parse": parser}


@dataclass(frozen=True, slots=True)
class Options:
    """What a user can set in ``kv_connector_extra_config`` for either connector.

    ``cpu_bytes_to_use`` is for the whole server and is split over its ranks; ``num_cpu_blocks``
    (slots, of any size) and ``cpu_bytes_to_use_per_rank`` win over it, in this order.
    ``min_load_tokens``: a shorter hit is not loaded; None ("auto") decides by measured rates.
    ``integrity`` None leaves the choice to the device. ``measure_s`` bounds the time for measuring
    transfer strategies at the first start on a device. ``kv_cache_layout`` is a layout that vLLM is
    asked to prefer.
    """

    cpu_bytes_to_use: int = field(default=8 * GIB, metadata=_parsed_by(values.size))
    cpu_bytes_to_use_per_rank: int | None = field(default=None, metadata=_parsed_by(values.size))
    num_cpu_blocks: int | None = field(default=None, metadata=_parsed_by(values.count))
    transfer_deadline_s: float = field(default=60.0, metadata=_parsed_by(values.seconds))
    min_load_tokens: int | None = field(
        default=None, metadata=_parsed_by(values.auto_or(values.count_or_zero))
    )
    integrity: Integrity | None = field(
        default=None, metadata=_parsed_by(values.one_of("full", "sample", "off"))
    )
    measure_s: float = field(default=1.0, metadata=_parsed_by(values.seconds_or_zero))
    kv_cache_layout: str = field(
        default="auto", metadata=_parsed_by(values.one_of("auto", *LAYOUTS))
    )

    @classmethod
    def parse(cls, extra_config: Mapping[str, Any]) -> Self:
        """Raises ValueError naming the first unknown key, bad value, or refused option of vLLM's.

        Options of vLLM's connectors that make no difference here are warned of and left out.
        """
        extra_config = without_foreign(extra_config)
        fields = {known.name: known for known in dataclasses.fields(cls)}
        for key, given in extra_config.items():
            if key not in fields:
                raise ValueError(
                    f"kv_connector_extra_config has the unknown key {key!r} (value {given!r}); "
                    f"allowed: {', '.join(sorted(fields))}"
                )
        return cls(
            **{
                key: fields[key].metadata["parse"](key, given)
                for key, given in extra_config.items()
            }
        )

    def bytes_per_rank(self, num_ranks: int) -> int:
        """The host memory of one rank, when ``num_cpu_blocks`` does not say it."""
        if self.cpu_bytes_to_use_per_rank is not None:
            return self.cpu_bytes_to_use_per_rank
        return self.cpu_bytes_to_use // num_ranks

    def warn_of_two_sizes(self, extra_config: Mapping[str, Any], num_ranks: int) -> None:
        """Say which size counts where ``extra_config`` gives two that disagree."""
        per_rank, total = self.cpu_bytes_to_use_per_rank, self.cpu_bytes_to_use
        if per_rank is None or "cpu_bytes_to_use" not in extra_config:
            return
        if per_rank != total // num_ranks:
            logger.warning(
                "cpu_bytes_to_use_per_rank=%d is not cpu_bytes_to_use=%d over %d ranks: every rank "
                "takes cpu_bytes_to_use_per_rank.",
                per_rank,
                total,
                num_ranks,
            )

    def num_slots(self, bytes_per_slot: int, num_ranks: int) -> int:
        """How many slots one rank gets. Raises ValueError when it is not even one."""
        if self.num_cpu_blocks is not None:
            return self.num_cpu_blocks
        given = self.bytes_per_rank(num_ranks)
        if given < bytes_per_slot:
            name, total = "cpu_bytes_to_use", self.cpu_bytes_to_use
            if self.cpu_bytes_to_use_per_rank is not None:
                name, total = "cpu_bytes_to_use_per_rank", self.cpu_bytes_to_use_per_rank
            raise ValueError(
                f"{name}={total} gives {given} bytes to each of {num_ranks} ranks, less than one "
                f"slot; allowed: at least {bytes_per_slot} bytes a rank"
            )
        return given // bytes_per_slot

    def num_blocks_per_chunk(self, block_tokens: int) -> int:
        """How many of vLLM's blocks of ``block_tokens`` make a chunk."""
        return 1

    @property
    def describes_events(self) -> bool:
        """Whether a KV event says which blocks and tokens a chunk holds."""
        return True

    def core_options(self) -> CoreOptions:
        """What the scheduling core is told."""
        return CoreOptions(min_load_tokens=self.min_load_tokens)


@dataclass(frozen=True, slots=True)
class SimpleOptions(Options):
    """Options of ``KVFerrySimpleConnector``.

    ``lazy_offload``: a block is stored when vLLM is about to evict it, not as soon as it is full.
    """

    lazy_offload: bool = field(default=False, metadata=_parsed_by(values.flag))


@dataclass(frozen=True, slots=True)
class OffloadingOptions(Options):
    """Options of ``KVFerryOffloadingConnector``.

    ``block_size`` is a chunk's length in tokens, ``blocks_per_chunk`` in vLLM's blocks; at most one
    of them is given. ``store_threshold``: a chunk is stored the n-th time that it is offered, of
    ``max_tracker_size`` chunks whose offers are remembered. ``self_describing_kv_events``: a KV
    event says which blocks and tokens a chunk holds, and not its key alone.
    """

    block_size: int | None = field(default=None, metadata=_parsed_by(values.count))
    blocks_per_chunk: int | None = field(default=None, metadata=_parsed_by(values.count))
    eviction_policy: str = field(default="lru", metadata=_parsed_by(values.text))
    offload_prompt_only: bool = field(default=True, metadata=_parsed_by(values.flag))
    store_threshold: int = field(default=1, metadata=_parsed_by(values.count_or_zero))
    max_tracker_size: int = field(default=64_000, metadata=_parsed_by(values.count))
    self_describing_kv_events: bool = field(default=False, metadata=_parsed_by(values.flag))

    def __post_init__(self) -> None:
        if self.block_size is not None and self.blocks_per_chunk is not None:
            raise ValueError(
                f"kv_connector_extra_config has block_size={self.block_size} and "
                f"blocks_per_chunk={self.blocks_per_chunk}; allowed: one of them"
            )

    def num_blocks_per_chunk(self, block_tokens: int) -> int:
        """How many of vLLM's blocks of ``block_tokens`` make a chunk. Raises ValueError when
        ``block_size`` is no multiple of them."""
        if self.block_size is None:
            return self.blocks_per_chunk or 1
        if self.block_size % block_tokens:
            raise ValueError(
                f"kv_connector_extra_config: block_size={self.block_size}; allowed: a multiple of "
                f"{block_tokens}, the tokens of a KV cache block"
            )
        return self.block_size // block_tokens

    @property
    def describes_events(self) -> bool:
        return self.self_describing_kv_events

    def core_options(self) -> CoreOptions:
        return CoreOptions(
            min_load_tokens=self.min_load_tokens,
            policy=self.eviction_policy,
            prompt_only=self.offload_prompt_only,
            store_threshold=max(1, self.store_threshold),  # 0 is vLLM's word for "at once"
            max_tracked_offers=self.max_tracker_size,
        )

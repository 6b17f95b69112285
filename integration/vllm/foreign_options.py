"""Options of vLLM's two offloading connectors that ours do not have, and what becomes of them.

A user changes the connector's name and keeps the rest of the configuration. What means the same
here is an option of ours (``config``). The rest stands in this table, with the reason: it is
ignored with a warning where the cache is the same without it, and refused where it would not be.
``docs/choosing.md`` shows the table; a test holds both against vLLM's sources.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from vllm.logger import init_logger

logger = init_logger(__name__)


class Treatment(enum.StrEnum):
    """What happens to an option that is not ours."""

    IGNORED = "ignored with a warning"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Foreign:
    """``harmless`` is a value that changes nothing, and is taken without a word."""

    treatment: Treatment
    reason: str
    harmless: Any = None


_DISK = "there is no disk tier; vLLM ignores it as well, unless kv_offload_backend is 'disk'"
_SPEC = (
    "it chooses what runs under vLLM's OffloadingConnector; to use KVFerryOffloadingSpec keep that "
    "connector's name"
)
_TIERS = "there is one tier, host memory; with secondary tiers stay on vLLM's TieringOffloadingSpec"

FOREIGN_OPTIONS: Final[Mapping[str, Foreign]] = MappingProxyType(
    {
        "kv_offload_backend": Foreign(
            Treatment.REFUSED, "there is no disk tier; allowed: 'cpu'", harmless="cpu"
        ),
        "disk_path": Foreign(Treatment.IGNORED, _DISK),
        "disk_capacity_bytes": Foreign(Treatment.IGNORED, _DISK),
        "disk_buffer_slots": Foreign(Treatment.IGNORED, _DISK),
        "use_page_cache": Foreign(Treatment.IGNORED, _DISK),
        "sync_load_budget_bytes": Foreign(
            Treatment.IGNORED,
            "every load runs beside the model; none is waited for within a step",
            harmless=0,
        ),
        "tier_poll_interval_s": Foreign(Treatment.IGNORED, "there is no second tier to poll"),
        "backpressure": Foreign(Treatment.REFUSED, _TIERS),
        "secondary_tiers": Foreign(Treatment.REFUSED, _TIERS),
        "spec_name": Foreign(Treatment.REFUSED, _SPEC),
        "spec_module_path": Foreign(Treatment.REFUSED, _SPEC),
        "canonical_layout": Foreign(
            Treatment.REFUSED,
            "host memory is private to each rank, so nobody reads it under another layout",
            harmless=False,
        ),
        "cache_policy_module_path": Foreign(
            Treatment.REFUSED,
            "vLLM's policies are written for its own cache; allowed: eviction_policy with the name "
            "of one of ours or a path 'package.module:Name'",
        ),
    }
)


def without_foreign(extra_config: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are left for ``Options.parse``; warns of what is ignored.

    Raises ValueError for what is refused.
    """
    own = {}
    for name, given in extra_config.items():
        foreign = FOREIGN_OPTIONS.get(name)
        if foreign is None:
            own[name] = given
        elif foreign.harmless is not None and given == foreign.harmless:
            continue
        elif foreign.treatment is Treatment.REFUSED:
            raise ValueError(f"kv_connector_extra_config: {name}={given!r}: {foreign.reason}")
        else:
            said = "kv_connector_extra_config: %s is ignored: %s"
            logger.warning_once(said, name, foreign.reason)
    return own

"""Where one live request stands."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from .admission import NO_CLAIM, Claim
from .leases import ReadLease

NEVER = 1 << 62
"""More tokens than any request has."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request asks for by itself, in tokens."""

    max_load_tokens: int = NEVER
    max_store_tokens: int = NEVER


NO_LIMITS = Limits()


@dataclass(slots=True)
class TrackedRequest:
    """``hashes`` is the request's own list of block hashes, which grows."""

    hashes: Sequence[bytes]
    num_prompt_tokens: int
    num_local_tokens: int
    """What vLLM's own cache served: these blocks are read, not written."""
    limits: Limits
    num_offered: list[int]
    """Per group, the chunks already offered for storing; storing starts behind them."""
    next_due_tokens: int = 0
    """With fewer tokens computed there is nothing to offer."""
    hit_tokens: int = 0
    """End of the last match, in tokens from the beginning; 0 when there was none."""
    claim: Claim = NO_CLAIM
    """The GPU blocks that the load of the last match needs."""
    outcome: str = ""
    """What the last lookup came to, until the request is given its blocks: counted then, once."""
    pins: tuple[ReadLease, ...] = ()
    """The hit's chunks, where the manager holds them until they are loaded."""
    loading: bool = False
    """A load into its blocks is in flight or has failed, and it has not gone on to compute yet."""
    stale: bool = False
    """Part of what it computed is from before a reset, or was computed from that."""


@dataclass(slots=True)
class Patience:
    """How long a request has waited for chunks that others are moving.

    ``until_job``: it waits only for jobs that were there when it began to wait, so that those which
    start meanwhile cannot hold it up for ever.
    """

    since_s: float
    until_job: int = field(default=0)

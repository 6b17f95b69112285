"""Whether one more load may begin: those that hold GPU blocks for loads must not block each other.

vLLM keeps requests that load, or have loaded and not computed yet, in a queue of their own, and
takes them from its head only. They hold blocks and are never preempted there. The blocks that each
still needs are reserved when the next one is let in, but for groups with a window by a count that
can be too low (the cap on what a request holds is compared with a block table that still counts
the blocks behind the window). Then the head waits for blocks that those behind it hold, for ever.
(Seen: three groups, two with windows, a pool of 42 blocks.) So a request is asked to wait unless
each of them could still have all that it needs, were nothing else running.

One that waits is passed over by vLLM, not queued behind. Were those behind it let in meanwhile, a
long one could wait for as long as short ones keep coming: so nobody overtakes it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .geometry import GroupGeometry
from .rules import GroupKind
from .types import RequestId


@dataclass(frozen=True, slots=True)
class GpuPool:
    """What vLLM's block pool has for requests: ``num_blocks`` of them, for all groups together.

    ``step_tokens``: the most tokens of one request that are scheduled and not settled;
    ``lookahead_tokens``: what speculative decoding computes behind a request's own tokens.
    """

    num_blocks: float = math.inf
    step_tokens: int = 0
    lookahead_tokens: int = 0


class Claim(NamedTuple):
    """Blocks that a request holds while it loads, and that it needs, those included, to compute."""

    num_held: int
    num_needed: int


NO_CLAIM = Claim(0, 0)


class LoadAdmission:
    """The claims of all requests that load or have loaded and not gone on to compute."""

    def __init__(self, groups: Sequence[GroupGeometry], pool: GpuPool) -> None:
        self._groups = groups
        self._pool = pool
        self._claims: dict[RequestId, Claim] = {}
        self._next: RequestId | None = None
        """Was asked to wait, and is to be let in before all others."""
        self._is_next_here = False
        """Whether it has asked again in the step being built."""

    def claim(self, num_tokens: int, loaded_tokens: int) -> Claim:
        """What a request of ``num_tokens`` claims when it starts with its first ``loaded_tokens``
        on the GPU: upper bounds."""
        pool = self._pool
        num_ahead = pool.step_tokens + pool.lookahead_tokens
        return Claim(
            sum(_most_blocks(geometry, loaded_tokens, 0) for geometry in self._groups),
            sum(
                _most_blocks(geometry, num_tokens + pool.lookahead_tokens, num_ahead)
                for geometry in self._groups
            ),
        )

    def allows(self, request_id: RequestId, claim: Claim) -> bool:
        """Whether every claim, this one too, could still be met, and nobody waits before it.

        One alone is vLLM's to judge.
        """
        if not self._claims:
            return True
        if self._next is None and not self._fits(claim):
            self._next = request_id
        if self._next is None:
            return True
        if self._next != request_id:
            return False
        self._is_next_here = True
        return self._fits(claim)

    def _fits(self, claim: Claim) -> bool:
        claims = [claim, *self._claims.values()]
        num_held = sum(one.num_held for one in claims)
        return num_held + max(one.num_needed - one.num_held for one in claims) <= (
            self._pool.num_blocks
        )

    def step_built(self) -> None:
        """The step being built is complete: who did not ask in it does not wait any more."""
        if not self._is_next_here:
            self._next = None
        self._is_next_here = False

    def began(self, request_id: RequestId, claim: Claim) -> None:
        self._claims[request_id] = claim
        if self._next == request_id:
            self._next = None

    def over(self, request_id: RequestId) -> None:
        """It computes, holds no blocks any more, or has ended."""
        self._claims.pop(request_id, None)


def _most_blocks(geometry: GroupGeometry, num_tokens: int, num_ahead: int) -> int:
    """The most blocks that one request of ``num_tokens`` holds in this group, when at most
    ``num_ahead`` of them lie behind the last that has settled."""
    num_blocks = -(-num_tokens // geometry.block_tokens)
    window = geometry.rule.window_tokens
    if geometry.rule.kind is GroupKind.RECURRENT:
        # A state to go on from and a checkpoint; the states in between are given back.
        window = 2 * geometry.block_tokens
    if window is None:
        return num_blocks
    in_reach = window + geometry.rule.retained_tokens + num_ahead
    # One more, since what is in reach may begin inside a block.
    return min(num_blocks, -(-in_reach // geometry.block_tokens) + 1)

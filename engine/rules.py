"""Which chunks a hit needs and which are worth storing, per kind of KV cache group. Pure functions.

A hit of N tokens means that computing goes on with token N. What token N and its followers can look
back at decides what must be there, and that differs by kind of group:

- FULL (also MLA): every token before N;
- WINDOW: the last ``window_tokens - 1`` before N, and ``retained_tokens`` more where the engine
  keeps them (speculative decoding computes a few tokens again);
- LOCAL: the tokens of N's own attention chunk, so none when N begins one;
- RECURRENT: the state after token N - 1, which lies in the block that ends there.

A *draft* group belongs to the draft model of speculative decoding. Its last chunk is written with
guessed tokens, so a hit needs one chunk more than it uses, and the last chunk is not stored while
the request is decoding.

Hits end on *boundaries*: common multiples of the groups' chunk sizes, so that every group is loaded
in whole chunks. Each group may shorten the hit, which can invalidate what another group found; the
answer is the longest boundary that all of them can serve. Tokens before ``start_tokens`` are on the
GPU already, and with them whatever a hit there needed; since none of the kinds looks further back
when N grows, only chunks from ``start_tokens`` on are asked for.
"""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .types import GroupId


class GroupKind(enum.Enum):
    """How far a token looks back."""

    FULL = "full attention"
    WINDOW = "sliding window"
    LOCAL = "chunked local attention"
    RECURRENT = "recurrent state"


@dataclass(frozen=True, slots=True)
class GroupRule:
    """One KV cache group. ``window_tokens``: the window of WINDOW, the attention chunk of LOCAL."""

    group: GroupId
    kind: GroupKind
    chunk_tokens: int
    window_tokens: int | None = None
    retained_tokens: int = 0
    draft: bool = False

    def __post_init__(self) -> None:
        windowed = self.kind in (GroupKind.WINDOW, GroupKind.LOCAL)
        if self.chunk_tokens < 1 or self.retained_tokens < 0:
            raise ValueError(f"{self}: allowed: chunk_tokens from 1, retained_tokens from 0")
        sound = self.window_tokens is None or self.window_tokens >= 1
        if windowed != (self.window_tokens is not None) or not sound:
            raise ValueError(
                f"{self}: allowed: window_tokens of at least 1 for a window or local attention, "
                "None for the others"
            )

    def needed_from(self, num_tokens: int) -> int:
        """The first token that a hit of ``num_tokens`` needs; never falls as that grows."""
        if self.kind is GroupKind.FULL:
            return 0
        if self.kind is GroupKind.RECURRENT:
            return max(0, num_tokens - 1)
        window = self.window_tokens or 1
        if self.kind is GroupKind.LOCAL:
            return num_tokens // window * window
        return max(0, num_tokens - window + 1 - self.retained_tokens)

    def needed_chunks(self, start_tokens: int, num_tokens: int) -> range:
        """The chunks to load for a hit of ``num_tokens`` when ``start_tokens`` are on the GPU."""
        first = max(start_tokens, self.needed_from(num_tokens)) // self.chunk_tokens
        return range(first, max(first, num_tokens // self.chunk_tokens))

    def storable_chunks(self, num_tokens: int, *, decoding: bool) -> int:
        """How many leading chunks of ``num_tokens`` computed tokens have their final content."""
        whole = num_tokens // self.chunk_tokens
        return max(0, whole - 1) if self.draft and decoding else whole

    def worth_storing(self, chunk: int, boundary_tokens: int) -> bool:
        """Whether a hit at any multiple of ``boundary_tokens`` could need ``chunk``."""
        end = (chunk + 1 - self.draft) * self.chunk_tokens
        nearest = -(-max(end, 1) // boundary_tokens) * boundary_tokens
        return self.needed_from(nearest) // self.chunk_tokens <= chunk


class GroupView(Protocol):
    """What of one request's chunks is in the host cache, in one group. Asking changes nothing."""

    @property
    def num_chunks(self) -> int:
        """How many leading chunks have a key."""

    def leading(self, first: int, last: int, *, pending: bool) -> int:
        """How many chunks from ``first`` on, before ``last``, are there without a gap.

        With ``pending``, chunks that are still being written count as there.
        """

    def trailing(self, first: int, last: int, *, pending: bool) -> int:
        """The same backwards: how many chunks before ``last``, down to ``first``, without a gap."""


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest hits, in tokens from the prompt's beginning, at least ``start_tokens``.

    ``ready_tokens`` can be loaded now; ``pending_tokens`` once all that is being written is there.
    Where it is the larger, waiting is worth something.
    """

    ready_tokens: int
    pending_tokens: int

    @property
    def pending(self) -> bool:
        return self.pending_tokens > self.ready_tokens


def boundary_of(rules: Sequence[GroupRule]) -> int:
    """The distance of hit boundaries in tokens: the least common multiple of the chunk sizes."""
    if not rules:
        raise ValueError("no KV cache groups; allowed: at least one")
    return math.lcm(*(rule.chunk_tokens for rule in rules))


def longest_hit(
    rules: Sequence[GroupRule],
    views: Sequence[GroupView],
    start_tokens: int,
    limit_tokens: int,
    *,
    ask_pending: bool = True,
) -> Hit:
    """The longest hit that all groups can serve; ``views`` is ``[len(rules)]``, in the same order.

    Without ``ask_pending`` what is being written counts as absent in both answers.

    ``limit_tokens`` is the most that may be hit (the prompt without its last token, or less where
    the request asks for less). No hit gives ``start_tokens``.
    """
    ready = _agree(rules, views, start_tokens, limit_tokens, pending=False)
    if not ask_pending:
        return Hit(ready, ready)
    return Hit(ready, _agree(rules, views, start_tokens, limit_tokens, pending=True))


def _agree(
    rules: Sequence[GroupRule],
    views: Sequence[GroupView],
    start_tokens: int,
    limit_tokens: int,
    *,
    pending: bool,
) -> int:
    """Shorten the hit group by group until none shortens it further."""
    boundary = boundary_of(rules)
    hit = limit_tokens // boundary * boundary
    # Full groups first: whatever they can serve, they can serve any shorter hit too, so that one
    # look at each is enough.
    order = sorted(range(len(rules)), key=lambda i: rules[i].kind is not GroupKind.FULL)
    unsure = order
    while unsure and hit > start_tokens:
        before = hit
        for i in unsure:
            serve = _full if rules[i].kind is GroupKind.FULL else _windowed
            hit = serve(rules[i], views[i], start_tokens, hit, boundary, pending)
        shortened = hit < before
        unsure = [i for i in order if shortened and rules[i].kind is not GroupKind.FULL]
    return max(hit, start_tokens)


def _full(
    rule: GroupRule, view: GroupView, start: int, hit: int, boundary: int, pending: bool
) -> int:
    """The longest boundary up to ``hit`` whose every chunk is there."""
    first = start // rule.chunk_tokens
    last = min(hit // rule.chunk_tokens + rule.draft, view.num_chunks)
    there = view.leading(first, last, pending=pending) if last > first else 0
    end = (first + there - rule.draft) * rule.chunk_tokens
    return min(hit, end // boundary * boundary)


def _windowed(
    rule: GroupRule, view: GroupView, start: int, hit: int, boundary: int, pending: bool
) -> int:
    """The longest boundary up to ``hit`` at whose left all needed chunks are there."""
    while hit > start:
        last = hit // rule.chunk_tokens + rule.draft
        first = rule.needed_chunks(start, hit).start
        end = min(last, view.num_chunks)
        # A chunk without a key is a gap like any other.
        gap = end if end < last else last - view.trailing(first, last, pending=pending)
        if end == last and gap <= first:
            return hit
        # No hit may need the chunk before the gap's end: the next one must end in front of it.
        missing = gap if end < last else gap - 1
        hit = min(hit - boundary, (missing - rule.draft) * rule.chunk_tokens // boundary * boundary)
    return hit

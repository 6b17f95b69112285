"""How a KV cache group is cut into chunks, and how a request's chunks look in the ledger."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from .ledger import Ledger
from .rules import GroupRule
from .types import GroupId, Key


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """One KV cache group: its rule, and sizes in tokens.

    ``hash_tokens`` is the granularity of the request's block hashes; a chunk's key is the hash of
    its last ``hash_tokens`` tokens, which carries all tokens before them.
    """

    rule: GroupRule
    block_tokens: int
    hash_tokens: int

    def __post_init__(self) -> None:
        if min(self.block_tokens, self.hash_tokens) < 1:
            raise ValueError(f"sizes of a group must be at least 1; given {self}")
        for name, whole, part in (
            ("block_tokens", self.block_tokens, self.hash_tokens),
            ("chunk_tokens", self.chunk_tokens, self.block_tokens),
        ):
            if whole % part:
                raise ValueError(
                    f"group {self.group}: {name} is {whole}; allowed: a multiple of {part}"
                )

    @property
    def group(self) -> GroupId:
        return self.rule.group

    @property
    def chunk_tokens(self) -> int:
        return self.rule.chunk_tokens

    @property
    def blocks_per_chunk(self) -> int:
        return self.rule.chunk_tokens // self.block_tokens

    def keys(self, hashes: Sequence[bytes], first: int, last: int) -> Sequence[Key]:
        """Keys of the chunks ``first <= i < last``; all of them must be hashed."""
        step = self.rule.chunk_tokens // self.hash_tokens
        return cast("Sequence[Key]", hashes[(first + 1) * step - 1 : last * step : step])

    def num_hashed_chunks(self, hashes: Sequence[bytes]) -> int:
        return len(hashes) * self.hash_tokens // self.rule.chunk_tokens


class LedgerView:
    """A request's chunks of one group as ``rules.longest_hit`` asks for them. Changes nothing."""

    __slots__ = ("_first", "_group", "_keys", "_ledger", "num_chunks")

    def __init__(
        self, ledger: Ledger, geometry: GroupGeometry, hashes: Sequence[bytes], start_tokens: int
    ) -> None:
        self._ledger = ledger
        self._group = geometry.group
        self._first = start_tokens // geometry.chunk_tokens
        self.num_chunks = geometry.num_hashed_chunks(hashes)
        # Nothing before ``start_tokens`` is asked for, so no key is made of it.
        self._keys = geometry.keys(hashes, self._first, self.num_chunks)

    def leading(self, first: int, last: int, *, pending: bool) -> int:
        return self._run(self._keys[first - self._first : last - self._first], pending)

    def trailing(self, first: int, last: int, *, pending: bool) -> int:
        return self._run(self._keys[first - self._first : last - self._first][::-1], pending)

    def _run(self, keys: Sequence[Key], pending: bool) -> int:
        """How many of ``keys`` are there without a gap."""
        there = self._ledger.readable(self._group, keys)
        while pending and there < len(keys) and self._ledger.writing(self._group, keys[there]):
            # A long store under way is walked key by key: looking for readable ones behind each
            # would cost the rest of the prompt every time.
            while there < len(keys) and self._ledger.writing(self._group, keys[there]):
                there += 1
            there += self._ledger.readable(self._group, keys, there)
        return there

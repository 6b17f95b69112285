"""The words that both halves of the engine share: ids, keys, directions.

Nothing here imports torch or vLLM, so the scheduler half stays plain Python.
"""

import enum
import sys
from array import array
from collections.abc import Sequence
from typing import Final, NewType

JobId = NewType("JobId", int)
BlockId = NewType("BlockId", int)
SlotId = NewType("SlotId", int)
GroupId = NewType("GroupId", int)
Rank = NewType("Rank", int)
RequestId = NewType("RequestId", str)

Key = NewType("Key", bytes)
"""What a chunk is found by within one KV cache group: the hash of its last block."""

NO_BLOCK: Final = BlockId(-1)
"""Stands in a segment's block list where a chunk has no block (partial chunk, outside a window)."""


NO_JOB: Final = JobId(-1)
"""The id of an order that no job stands behind: a load to be reported as failed, not made."""


class Direction(enum.StrEnum):
    """Which way a job moves bytes."""

    STORE = "store"  # GPU to host
    LOAD = "load"  # host to GPU


def seed_of(group: GroupId, key: Key) -> int:
    """The checksum seed of a chunk: a signed 64-bit integer made from its key and group.

    The key is a cryptographic hash in vLLM, so its first eight bytes are as good as all of it.
    """
    word = int.from_bytes(key[:8].ljust(8, b"\0"), "little", signed=True)
    return word ^ group


def key_start(group: GroupId, seed: int) -> str:
    """The first eight bytes, in hex, of the key that ``seed_of`` made this seed from."""
    return (seed ^ group).to_bytes(8, "little", signed=True).hex()


def seeds_of(group: GroupId, keys: Sequence[Key]) -> tuple[int, ...]:
    """``seed_of`` each of ``keys``; fast where they are all equally long and of whole words."""
    if not keys:
        return ()
    num_words, rest = divmod(len(keys[0]), 8)
    if rest or not num_words or len(set(map(len, keys))) > 1:
        return tuple(seed_of(group, key) for key in keys)
    words = array("q", b"".join(keys))
    if sys.byteorder == "big":
        words.byteswap()
    first = words[::num_words]
    return tuple(word ^ group for word in first) if group else tuple(first)

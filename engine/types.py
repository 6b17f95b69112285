"""The words that both halves of the engine share: ids, keys, directions.

Nothing here imports torch or vLLM, so the scheduler half stays plain Python.
"""

import enum
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

"""Pure plans: (where a request stands, what the ledger holds) -> what to load and what to store.

Nothing here changes anything. Block tables are one group's, ``NO_BLOCK`` where there is none.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .geometry import GroupGeometry
from .requests import TrackedRequest
from .rules import GroupKind
from .types import NO_BLOCK, BlockId, JobId, Key

Tables = Sequence[Sequence[BlockId]]
"""Block tables of a request, ``[num_groups]``, in the order of the core's groups."""

_ANY_BLOCK = [BlockId(0)]


@dataclass(frozen=True, slots=True)
class Part:
    """Chunks of one group and their blocks, ``[num_chunks * blocks_per_chunk]``."""

    geometry: GroupGeometry
    keys: tuple[Key, ...]
    blocks: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class PlannedStore:
    """The chunks that a store job will bring to the host, and where they lie."""

    job_id: JobId
    parts: tuple[Part, ...]


def plan_load(
    geometry: GroupGeometry,
    hashes: Sequence[bytes],
    table: Sequence[BlockId],
    start_tokens: int,
    end_tokens: int,
) -> Part:
    """What a hit of ``end_tokens`` loads when ``start_tokens`` are on the GPU already.

    Blocks that lie before ``start_tokens`` are left alone: others may be reading them.
    """
    size = geometry.blocks_per_chunk
    first = geometry.rule.needed_chunks(start_tokens, end_tokens).start
    last = -(-end_tokens // geometry.chunk_tokens)
    begin = -(-start_tokens // geometry.block_tokens)
    end = -(-end_tokens // geometry.block_tokens)
    chosen: list[BlockId] = [
        table[i] if begin <= i < end and i < len(table) else NO_BLOCK
        for i in range(first * size, last * size)
    ]
    keys = geometry.keys(hashes, first, last)
    loaded = [i for i in range(len(keys)) if chosen[i * size : (i + 1) * size] != [NO_BLOCK] * size]
    if len(loaded) < len(keys):
        chosen = [block for i in loaded for block in chosen[i * size : (i + 1) * size]]
        keys = [keys[i] for i in loaded]
    return Part(geometry, tuple(keys), tuple(chosen))


def wanted(
    groups: Sequence[GroupGeometry],
    request: TrackedRequest,
    hit_tokens: int,
    tables: Tables | None = None,
) -> list[Part]:
    """What a hit of ``hit_tokens`` loads, per group; without ``tables`` only the keys count."""
    start = request.num_local_tokens
    parts = []
    for i, geometry in enumerate(groups):
        table = tables[i] if tables else _ANY_BLOCK * -(-hit_tokens // geometry.block_tokens)
        parts.append(plan_load(geometry, request.hashes, table, start, hit_tokens))
    return parts


def prefix_keys(
    groups: Sequence[GroupGeometry], request: TrackedRequest, num_tokens: int
) -> set[Key]:
    """The keys of a request's own chunks among its first ``num_tokens``, of all groups: without
    them its later chunks are of no use."""
    return {
        key
        for geometry in groups
        for key in geometry.keys(
            request.hashes,
            0,
            min(num_tokens // geometry.chunk_tokens, geometry.num_hashed_chunks(request.hashes)),
        )
    }


def sources(
    geometry: GroupGeometry,
    keys: Sequence[Key],
    absent: Sequence[int],
    table: Sequence[BlockId],
    first: int,
    boundary_tokens: int,
) -> dict[Key, Sequence[BlockId]]:
    """Where the chunks worth storing lie, of those that are ``absent`` from the host.

    ``keys`` are those of the chunks from ``first`` on; ``absent`` indexes them. Left out are chunks
    that no hit can use, and those whose blocks are gone (out of a window, or not allocated).
    """
    size = geometry.blocks_per_chunk
    rule = geometry.rule
    blocks_of = table[first * size : (first + len(keys)) * size]
    if rule.kind is GroupKind.FULL and NO_BLOCK not in blocks_of:
        # Every chunk is worth storing, and none is gone: the usual case, in a few passes in C.
        chunks = list(zip(*[iter(blocks_of)] * size, strict=False))  # a last part is left out
        if len(absent) == len(keys) == len(chunks):
            return dict(zip(keys, chunks, strict=True))
        if len(chunks) < len(keys):
            absent = [i for i in absent if i < len(chunks)]
        return dict(
            zip(map(keys.__getitem__, absent), map(chunks.__getitem__, absent), strict=True)
        )
    found: dict[Key, Sequence[BlockId]] = {}
    for i in absent:
        chunk = first + i
        blocks = table[chunk * size : (chunk + 1) * size]
        if len(blocks) < size or not rule.worth_storing(chunk, boundary_tokens):
            continue
        if NO_BLOCK in blocks:
            # No hit that ends behind the chunk looks back further than this, so what is missing
            # before it will never be asked for.
            needed = rule.needed_from((chunk + 1) * geometry.chunk_tokens)
            begin = max(0, needed // geometry.block_tokens - chunk * size)
            if begin >= size or NO_BLOCK in blocks[begin:]:
                continue
        found[keys[i]] = blocks
    return found

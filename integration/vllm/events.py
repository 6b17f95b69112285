"""KV events: what of the host cache can be found, for whoever listens to vLLM's events.

A chunk is announced when every rank holds it, and taken back when it can no longer be found:
evicted, lost to a failed transfer, or forgotten in a reset. What an announcement says of its tokens
is noted when the store is planned, since the request may have ended when it is done; it is kept
until then, and of a chunk of several blocks their hashes are kept until it is taken back.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from ...engine.changes import Change
from ...engine.geometry import GroupGeometry
from ...engine.jobs import Ended
from ...engine.planner import Part, PlannedStore
from ...engine.types import NO_BLOCK, GroupId, JobId, Key, RequestId
from . import views

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

LOCAL = "LOCAL"
"""Where the host memory is, seen from the publisher."""


@dataclass(frozen=True, slots=True)
class Description:
    """One chunk in a listener's terms: its blocks, first to last, ``[num_blocks]``.

    ``token_ids`` is ``[num_blocks * block_size]``; ``extra_keys`` is what else the hashes are made
    of, or None.
    """

    hashes: tuple[bytes, ...]
    parent: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None
    lora_name: str | None
    extra_keys: list[Any] | None
    session_id: str | None


class KVEvents:
    """Notes what is stored, and turns the core's changes into vLLM's events. One thread."""

    def __init__(
        self,
        groups: Iterable[GroupGeometry],
        kv_cache_config: "KVCacheConfig",
        *,
        describe: bool,
    ) -> None:
        """Without ``describe`` an event names a chunk's key, nothing of its blocks or tokens."""
        specs = {
            one.group: kv_cache_config.kv_cache_groups[one.group].kv_cache_spec for one in groups
        }
        self._kinds = {group: get_kv_cache_spec_kind(spec).value for group, spec in specs.items()}
        self._windows = {
            group: get_kv_cache_spec_sliding_window(spec) for group, spec in specs.items()
        }
        self._describe = describe
        self._requests: dict[RequestId, Request] = {}
        self._planned: dict[JobId, dict[tuple[GroupId, Key], Description]] = {}
        self._hashes: dict[tuple[GroupId, Key], tuple[bytes, ...]] = {}
        self._events: list[KVCacheEvent] = []

    def follow(self, request: "Request") -> None:
        """The request may store from now on; a new object under a known id replaces the old one."""
        if self._describe:
            self._requests[views.request_id_of(request)] = request

    def forget(self, request_id: RequestId) -> None:
        self._requests.pop(request_id, None)

    def planned(self, request_id: RequestId, store: PlannedStore | None) -> None:
        """A store was planned: note what it will have to be announced as."""
        request = self._requests.get(request_id)
        if store is None or request is None:
            return
        self._planned[store.job_id] = {
            (part.geometry.group, key): described
            for part in store.parts
            for key, described in zip(part.keys, describe(request, part), strict=True)
        }

    def planned_without_request(self, store: PlannedStore) -> None:
        """A lazy store was planned: of its blocks the hash and the size are known, no tokens."""
        if self._describe:
            self._planned[store.job_id] = {
                (part.geometry.group, key): _nameless(key, part.geometry.block_tokens)
                for part in store.parts
                for key in part.keys
            }

    def happened(self, changes: Iterable[Change], ended: Iterable[Ended] = ()) -> None:
        """The core's changes since the last call, and the jobs that ended with them."""
        described: dict[tuple[GroupId, Key], Description] = {}
        for end in ended:
            described.update(self._planned.pop(end.job_id, {}))
        for change in changes:
            if change.readable:
                chunks = [(change.group, key) for key in change.keys]
                self._events.extend(self._stored(chunk, described.get(chunk)) for chunk in chunks)
            else:
                self._events.append(self._removed(change))

    def take(self) -> list[KVCacheEvent]:
        """The events since the last call."""
        taken, self._events = self._events, []
        return taken

    @property
    def num_noted(self) -> int:
        """How many requests, stores and chunks are remembered."""
        return len(self._requests) + len(self._planned) + len(self._hashes)

    def _stored(self, chunk: tuple[GroupId, Key], about: Description | None) -> BlockStored:
        group, key = chunk
        if about is not None and len(about.hashes) > 1:
            self._hashes[chunk] = about.hashes
        return BlockStored(
            block_hashes=_published(about.hashes if about is not None else (key,)),
            parent_block_hash=_published((about.parent,))[0] if about and about.parent else None,
            token_ids=list(about.token_ids) if about is not None else [],
            block_size=about.block_size if about is not None else 0,
            lora_id=about.lora_id if about is not None else None,
            medium=MEDIUM_CPU,
            lora_name=about.lora_name if about is not None else None,
            extra_keys=about.extra_keys if about is not None else None,
            group_idx=group,
            kv_cache_spec_kind=self._kinds[group],
            kv_cache_spec_sliding_window=self._windows[group],
            locality=LOCAL,
            session_id=about.session_id if about is not None else None,
        )

    def _removed(self, change: Change) -> BlockRemoved:
        hashes = [
            one for key in change.keys for one in self._hashes.pop((change.group, key), (key,))
        ]
        return BlockRemoved(
            block_hashes=_published(hashes),
            medium=MEDIUM_CPU,
            group_idx=change.group,
            locality=LOCAL,
        )


def _nameless(key: Key, block_size: int) -> Description:
    return Description((key,), None, (), block_size, None, None, None, None)


def describe(request: "Request", part: Part) -> list[Description]:
    """What the chunks of a planned store hold; ``[len(part.keys)]``.

    Of a chunk that a window has partly left, the blocks that are still there.
    """
    geometry, hashes = part.geometry, request.block_hashes
    per_chunk = geometry.chunk_tokens // geometry.hash_tokens
    found = []
    position = 0
    for i, key in enumerate(part.keys):
        position = hashes.index(BlockHash(key), position)
        chunk = position // per_chunk
        first = chunk * geometry.blocks_per_chunk + _num_missing(part, i)
        last = (chunk + 1) * geometry.blocks_per_chunk
        found.append(_blocks(request, geometry, first, last))
    return found


def _num_missing(part: Part, index: int) -> int:
    """How many blocks at the beginning of a part's chunk are not stored with it."""
    size = part.geometry.blocks_per_chunk
    blocks = part.blocks[index * size : (index + 1) * size]
    return max((i + 1 for i, block in enumerate(blocks) if block == NO_BLOCK), default=0)


def _blocks(request: "Request", geometry: GroupGeometry, first: int, last: int) -> Description:
    """The request's blocks ``first <= i < last`` of one group."""
    size, per_block = geometry.block_tokens, geometry.block_tokens // geometry.hash_tokens
    hashes = request.block_hashes
    extra_keys = [
        generate_block_hash_extra_keys(request, block * size, (block + 1) * size, 0)[0]
        for block in range(first, last)
    ]
    lora = request.lora_request
    return Description(
        tuple(hashes[(block + 1) * per_block - 1] for block in range(first, last)),
        hashes[first * per_block - 1] if first else None,
        tuple(request.all_token_ids[first * size : last * size]),
        size,
        lora.adapter_id if lora is not None else None,
        lora.name if lora is not None else None,
        to_event_extra_keys(extra_keys),
        request.session_id,
    )


def _published(hashes: Sequence[bytes]) -> list[Any]:
    """Block hashes as listeners get them (bytes, or integers where vLLM is told so)."""
    return [maybe_convert_block_hash(BlockHash(one)) for one in hashes]

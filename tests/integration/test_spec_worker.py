"""The spec's worker over vLLM's canonical tensors: which bytes go where, and what is reported."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kvferry.engine.devices.base import Piece
from kvferry.engine.devices.cpu import CpuDevice
from kvferry.engine.types import Rank
from kvferry.integration.vllm.spec import KVFerryOffloadingWorker
from kvferry.integration.vllm.spec_worker import layout_of
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LoadStoreSpec,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

NUM_BLOCKS = 12
PAGE_BYTES = 48


class BreakableDevice(CpuDevice):
    """Fails the jobs that it is told to."""

    def __init__(self) -> None:
        self.failing: set[int] = set()
        super().__init__(1)

    def _move(self, piece: Piece, *args: Any) -> list[int]:
        if piece.job_id in self.failing:
            raise OSError("the device says no")
        return super()._move(piece, *args)


def canonical(*, packed: bool = False) -> CanonicalKVCaches:
    """Two groups over three tensors; the second group uses 40 of its 48 bytes a page."""
    storage = torch.zeros(3, NUM_BLOCKS, PAGE_BYTES, dtype=torch.int8)
    if packed:
        whole = storage.view(NUM_BLOCKS, 3 * PAGE_BYTES)
        tensors = [CanonicalKVCacheTensor(whole, 3 * PAGE_BYTES)]
        refs = [[CanonicalKVCacheRef(0, 3 * PAGE_BYTES)]] * 2
    else:
        tensors = [CanonicalKVCacheTensor(tensor, PAGE_BYTES) for tensor in storage]
        refs = [
            [CanonicalKVCacheRef(0, PAGE_BYTES), CanonicalKVCacheRef(1, PAGE_BYTES)],
            [CanonicalKVCacheRef(2, 40)],
        ]
    return CanonicalKVCaches(tensors, refs)


def fill(caches: CanonicalKVCaches) -> None:
    for number, cache in enumerate(caches.tensors):
        values = torch.arange(cache.tensor.numel()) * 7 + number * 13
        cache.tensor.copy_((values % 251 - 125).to(torch.int8).view(cache.tensor.shape))


def pages(caches: CanonicalKVCaches, group: int, block: int) -> list[list[int]]:
    return [
        caches.tensors[ref.tensor_idx].tensor[block, : ref.page_size_bytes].tolist()
        for ref in caches.group_data_refs[group]
    ]


@pytest.fixture(params=[False, True], ids=["apart", "packed"])
def caches(request: pytest.FixtureRequest) -> CanonicalKVCaches:
    caches = canonical(packed=request.param)
    fill(caches)
    return caches


@pytest.fixture(params=[1, 3], ids=["single", "chunks"])
def worker(request: pytest.FixtureRequest, caches: CanonicalKVCaches) -> Iterator[Any]:
    worker = KVFerryOffloadingWorker(caches, request.param, 8, None, BreakableDevice(), Rank(0))
    yield worker
    worker.shutdown()
    worker.shutdown()  # can be repeated
    assert worker.snapshot()["arena_bytes"] == 0


def finish(worker: KVFerryOffloadingWorker, *jobs: int) -> dict[int, bool]:
    worker.wait(set(jobs))
    return {result.job_id: result.success for result in worker.get_finished()}


def chunk_count(worker: KVFerryOffloadingWorker, first: int, size: int) -> int:
    per_chunk = worker._blocks_per_chunk
    return -(-(first % per_chunk + size) // per_chunk) if size else 0


@pytest.mark.parametrize(
    ("sizes", "firsts"), [((4, 2), (0, 0)), ((4, 3), (1, 2)), ((0, 5), (0, 4)), ((3, 0), (2, 0))]
)
def test_what_is_stored_comes_back_elsewhere(
    caches: CanonicalKVCaches, worker: Any, sizes: tuple[int, int], firsts: tuple[int, int]
) -> None:
    """Chunks that the blocks cover in part are read and written in part."""
    count = sum(chunk_count(worker, f, s) for f, s in zip(firsts, sizes, strict=True))
    host = CPULoadStoreSpec([7, 2, 5, 0, 6, 1, 3, 4][:count])
    blocks = [1, 5, 2, 0, 4, 3, 6][: sum(sizes)]
    groups = [0] * sizes[0] + [1] * sizes[1]
    stored = [pages(caches, group, block) for group, block in zip(groups, blocks, strict=True)]
    assert worker.submit_store(1, GPULoadStoreSpec(blocks, sizes, firsts), host)
    assert finish(worker, 1) == {1: True}
    before = [cache.tensor.clone() for cache in caches.tensors]
    targets = [11, 9, 10, 8, 7, 11, 9][: sum(sizes)]
    if len(caches.tensors) == 1:  # packed groups share their blocks
        targets = [11, 9, 10, 8, 7, 6, 5][: sum(sizes)]
    assert worker.submit_load(2, host, GPULoadStoreSpec(targets, sizes, firsts), expedited=True)
    assert finish(worker, 2) == {2: True}
    loaded = [pages(caches, group, block) for group, block in zip(groups, targets, strict=True)]
    assert loaded == stored
    for cache, old in zip(caches.tensors, before, strict=True):
        others = [block for block in range(NUM_BLOCKS) if block not in targets]
        assert torch.equal(cache.tensor[others], old[others])


def test_a_job_with_nothing_to_move_ends_too(worker: Any) -> None:
    worker.submit_load(3, CPULoadStoreSpec([]), GPULoadStoreSpec([], (0, 0), (0, 0)))
    assert finish(worker, 3) == {3: True}


def test_a_failed_transfer_is_reported_once_and_as_failed(worker: Any) -> None:
    worker._engine._device.failing.add(4)
    worker.submit_store(4, GPULoadStoreSpec([1], (1, 0), (0, 0)), CPULoadStoreSpec([0]))
    worker.submit_store(5, GPULoadStoreSpec([2], (1, 0), (0, 0)), CPULoadStoreSpec([1]))
    assert finish(worker, 4, 5) == {4: False, 5: True}
    assert worker.get_finished() == []


def test_results_carry_bytes_and_time(worker: Any) -> None:
    host = CPULoadStoreSpec([0, 1][: chunk_count(worker, 0, 2)])
    worker.submit_store(6, GPULoadStoreSpec([1, 2], (2, 0), (0, 0)), host)
    worker.wait({6, 99})  # an id that nobody knows is none to wait for
    (result,) = worker.get_finished()
    assert isinstance(result, TransferResult)
    block_bytes = worker._engine._layout.groups[0].block_bytes
    assert result.transfer_size == 2 * block_bytes
    assert result.transfer_time is not None


@pytest.mark.parametrize("chunks", [[], [0, 1, 2, 3, 4, 5]])
def test_lists_that_do_not_match_are_refused(worker: Any, chunks: list[int]) -> None:
    with pytest.raises(ValueError, match=f"job 7: {len(chunks)} chunks of"):
        worker.submit_store(7, GPULoadStoreSpec([1, 2], (2, 0), (0, 0)), CPULoadStoreSpec(chunks))
    assert worker.get_finished() == []


def test_chunks_in_another_form_are_refused(worker: Any) -> None:
    with pytest.raises(ValueError, match="host chunks as LoadStoreSpec"):
        worker.submit_load(8, LoadStoreSpec(), GPULoadStoreSpec([1], (1, 0), (0, 0)))


def test_a_cache_larger_than_planned_is_refused(caches: CanonicalKVCaches) -> None:
    needed = layout_of(caches, 1).slot_stride_bytes
    with pytest.raises(ValueError, match=f"a chunk takes {needed} bytes on rank 0"):
        KVFerryOffloadingWorker(caches, 1, 8, needed - 1, CpuDevice(1), Rank(0))
    KVFerryOffloadingWorker(caches, 1, 8, needed, CpuDevice(1), Rank(0)).shutdown()


def test_pages_are_taken_without_their_padding_where_it_matters() -> None:
    layout = layout_of(canonical(), 1)
    assert [group.block_bytes for group in layout.groups] == [2 * PAGE_BYTES, 40]
    sizes = [[fragment.num_bytes for fragment in group.fragments] for group in layout.groups]
    assert sizes == [[PAGE_BYTES, PAGE_BYTES], [40]]

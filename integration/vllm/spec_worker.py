"""``KVFerryOffloadingWorker``: our transfer engine as the worker of vLLM's own connector.

vLLM says what to move in flat lists: for each KV cache group its GPU blocks, which follow each
other in the request, and the host chunks of all groups. The first and the last chunk of a group may
be covered in part.

vLLM's worker asserts that every transfer succeeds, so a broken one stops the engine. Nothing here
may fail for another reason: integrity is off, stores are not bounded, and the deadline is long.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Final

from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from ...engine.arena import Arena
from ...engine.devices.base import Device
from ...engine.layout import GroupLayout, Layout, group_layout
from ...engine.messages import JobOrder, Segment
from ...engine.options import TransferOptions
from ...engine.transfer import TransferEngine
from ...engine.types import NO_BLOCK, BlockId, Direction, GroupId, JobId, Rank, SlotId

DEADLINE_S: Final = 600.0
DRAIN_S: Final = 10.0


class KVFerryOffloadingWorker(OffloadingWorker):
    """One rank's transfers. Group ``i`` is the ``i``-th that vLLM's connector offloads."""

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        blocks_per_chunk: int,
        num_chunks: int,
        max_slot_bytes: int | None,
        device: Device,
        rank: Rank,
    ) -> None:
        """Reserves ``num_chunks`` slots; owns ``device``.

        Raises ValueError for a cache whose slots are larger than ``max_slot_bytes``, by which the
        memory was divided (None for no bound); ``CapacityError`` when there is not enough memory.
        """
        layout = layout_of(kv_caches, blocks_per_chunk)
        if max_slot_bytes is not None and layout.slot_stride_bytes > max_slot_bytes:
            device.close(DRAIN_S)
            raise ValueError(
                f"a chunk takes {layout.slot_stride_bytes} bytes on rank {rank}; allowed: at most "
                f"{max_slot_bytes}, by which cpu_bytes_to_use was divided"
            )
        self._blocks_per_chunk = blocks_per_chunk
        arena = Arena.reserve(num_chunks, layout.slot_stride_bytes, 0, device)
        options = TransferOptions(
            deadline_s=DEADLINE_S, max_store_bytes=1 << 62, integrity="off", max_failures=1 << 30
        )
        self._engine = TransferEngine(device, layout, arena, rank, options)
        self._given_up: set[JobId] = set()
        self._closed = False

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        self._engine.submit(self._order(job_id, Direction.STORE, src_spec, dst_spec))
        return True

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        """The load waits for all that is queued for compute by now: the zeroing of its blocks."""
        order = self._order(job_id, Direction.LOAD, dst_spec, src_spec)
        self._engine.mark_loads()
        self._engine.submit(order, expedited=expedited)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Each job once; one that is given up has failed, whatever becomes of it afterwards."""
        results = []
        for report in self._engine.poll():
            if report.job_id in self._given_up:
                self._given_up.discard(report.job_id)
                continue
            if not report.settled:
                self._given_up.add(report.job_id)
            results.append(
                TransferResult(
                    job_id=report.job_id,
                    success=report.error is None,
                    transfer_size=report.num_bytes,
                    transfer_time=report.seconds,
                )
            )
        return results

    def wait(self, job_ids: set[int]) -> None:
        """Nothing queued for compute from now on runs before these jobs are done.

        On a GPU the host goes on: the model's stream waits. That is what vLLM waits for, before the
        forward that overwrites, or reads, their blocks.
        """
        self._engine.flush(JobId(job_id) for job_id in job_ids)

    def shutdown(self) -> None:
        """Let what is in flight end, then free everything. Can be repeated."""
        if not self._closed:
            self._closed = True
            self._engine.drain(DRAIN_S)
            self._engine.close()

    def snapshot(self) -> dict[str, int | float]:
        """The engine's live counts."""
        return self._engine.snapshot()

    def _order(
        self, job_id: int, direction: Direction, gpu: GPULoadStoreSpec, host: LoadStoreSpec
    ) -> JobOrder:
        if not isinstance(host, BlockIDsLoadStoreSpec):
            raise ValueError(
                f"job {job_id}: host chunks as {type(host).__name__}; allowed: a list of chunk ids"
            )
        segments = tuple(_segments(job_id, gpu, host.block_ids.tolist(), self._blocks_per_chunk))
        return JobOrder(JobId(job_id), direction, segments)


def layout_of(kv_caches: CanonicalKVCaches, blocks_per_chunk: int) -> Layout:
    """vLLM's canonical tensors, ``[num_blocks, page]`` bytes each -> the engine's layout."""
    groups: list[GroupLayout] = []
    for index, refs in enumerate(kv_caches.group_data_refs):
        caches = []
        for ref in refs:
            whole = kv_caches.tensors[ref.tensor_idx]
            caches.append((whole.tensor[:, : ref.page_size_bytes], whole.page_size_bytes))
        groups.append(group_layout(GroupId(index), blocks_per_chunk, caches))
    return Layout(tuple(groups), tuple(tensor.tensor for tensor in kv_caches.tensors))


def _segments(
    job_id: int, gpu: GPULoadStoreSpec, chunks: list[int], blocks_per_chunk: int
) -> Iterator[Segment]:
    """The job's part in each group that has one. Raises ValueError when the lists do not match."""
    blocks_left = map(BlockId, gpu.block_ids.tolist())
    slots_left = map(SlotId, chunks)
    for index, (size, first) in enumerate(zip(gpu.group_sizes, gpu.block_indices, strict=True)):
        if size == 0:
            continue
        num_before = first % blocks_per_chunk
        num_slots = -(-(num_before + size) // blocks_per_chunk)
        num_after = num_slots * blocks_per_chunk - num_before - size
        blocks = tuple(islice(blocks_left, size))
        slots = tuple(islice(slots_left, num_slots))
        if len(slots) < num_slots:
            raise _mismatch(job_id, gpu, chunks, blocks_per_chunk)
        table = (NO_BLOCK,) * num_before + blocks + (NO_BLOCK,) * num_after
        yield Segment(GroupId(index), slots, table, (0,) * num_slots)
    if any(True for _ in slots_left):
        raise _mismatch(job_id, gpu, chunks, blocks_per_chunk)


def _mismatch(
    job_id: int, gpu: GPULoadStoreSpec, chunks: list[int], blocks_per_chunk: int
) -> ValueError:
    return ValueError(
        f"job {job_id}: {len(chunks)} chunks of {blocks_per_chunk} blocks for groups of "
        f"{list(gpu.group_sizes)} blocks from {list(gpu.block_indices)}; allowed: as many chunks "
        "as the blocks reach into"
    )

"""What every op refuses before it launches: a wrong id here is another request's memory there.

All checks read the entries through numpy on the CPU, keep no state, and take microseconds for
hundreds of entries.
"""

import numpy as np
import numpy.typing as npt
import torch

from .entries import BLOCK, POSITION, SLOT, Entries
from .table import ChecksumSlots, FragmentTable, HostSlots

_Ids = npt.NDArray[np.uint64]

_MAX_MARKS = 1 << 16
"""Up to here one byte for each possible id is cleared sooner than hundreds of ids are sorted."""


def check_blocks(entries: Entries, num_blocks: int, *, are_destinations: bool) -> None:
    """Block ids are in range, and name a block at most once where they are written to."""
    ids = _column(entries, BLOCK)
    _check_range("block id", ids, num_blocks)
    if are_destinations:
        repeated = _repeated(ids, num_blocks)
        if repeated is not None:
            raise ValueError(f"duplicate destination: block id {repeated} is named more than once")


def check_places(
    entries: Entries, num_slots: int, blocks_per_chunk: int, *, are_destinations: bool
) -> None:
    """Slot ids and positions are in range; a place is named at most once where it is written to."""
    slot_ids, positions = _column(entries, SLOT), _column(entries, POSITION)
    _check_range("slot id", slot_ids, num_slots)
    _check_range("position", positions, blocks_per_chunk)
    if are_destinations:
        places = slot_ids
        if blocks_per_chunk > 1:
            places = slot_ids * np.uint64(blocks_per_chunk) + positions
        repeated = _repeated(places, num_slots * blocks_per_chunk)
        if repeated is not None:
            slot, position = divmod(repeated, blocks_per_chunk)
            raise ValueError(
                f"duplicate destination: slot id {slot}, position {position} "
                f"is named more than once"
            )


def check_current(device: torch.device) -> None:
    """Kernels go to the current GPU, so the pages must be on that one."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        raise ValueError(
            f"the pages are on {device}, the current device is cuda:{torch.cuda.current_device()}"
        )


def check_slots(slots: HostSlots, table: FragmentTable) -> None:
    """A slot holds a chunk of this table, and the kernels can reach it."""
    needed = slots.blocks_per_chunk * table.block_bytes
    if needed > slots.slot_stride_bytes:
        raise ValueError(
            f"a chunk of {slots.blocks_per_chunk} blocks of {table.block_bytes} bytes needs "
            f"{needed} bytes, slots are {slots.slot_stride_bytes} bytes apart"
        )
    check_reachable("slot memory", slots.memory, table.device)


def check_checksums(
    checksums: ChecksumSlots, table: FragmentTable, slots: HostSlots | None = None
) -> None:
    """The rows hold a chunk's checksums, and belong to the same slots."""
    needed = checksums.blocks_per_chunk * table.num_fragments
    if checksums.values.shape[1] < needed:
        raise ValueError(
            f"checksums of {checksums.blocks_per_chunk} blocks of {table.num_fragments} fragments "
            f"need rows of {needed}, got rows of {checksums.values.shape[1]}"
        )
    if slots is not None and (checksums.num_slots, checksums.blocks_per_chunk) != (
        slots.num_slots,
        slots.blocks_per_chunk,
    ):
        raise ValueError(
            f"checksums are for {checksums.num_slots} slots of {checksums.blocks_per_chunk} "
            f"blocks, there are {slots.num_slots} slots of {slots.blocks_per_chunk} blocks"
        )
    check_reachable("checksums", checksums.values, table.device)


def check_flags(
    flags: torch.Tensor | None,
    checksums: ChecksumSlots | None,
    entries: Entries,
    device: torch.device,
) -> None:
    """Error flags come with checksums to verify: int32, one an entry."""
    if (flags is None) != (checksums is None):
        given, missing = ("checksums", "flags") if flags is None else ("flags", "checksums")
        raise ValueError(f"checksums are verified into flags: got {given} without {missing}")
    if flags is None:
        return
    shape = (entries.num_entries,)
    if flags.dtype != torch.int32 or tuple(flags.shape) != shape or not flags.is_contiguous():
        raise ValueError(
            f"flags must be a contiguous int32 tensor {shape}, got {flags.dtype} "
            f"{tuple(flags.shape)} with strides {flags.stride()}"
        )
    check_reachable("flags", flags, device)


def check_staging(staging: torch.Tensor, table: FragmentTable, num_entries: int) -> None:
    """The staging buffer is plain bytes beside the pages, and holds all entries."""
    if staging.dtype != torch.uint8 or staging.dim() != 1 or not staging.is_contiguous():
        raise ValueError(
            "staging must be a contiguous 1-D uint8 tensor, got "
            f"{staging.dtype} {tuple(staging.shape)} with strides {staging.stride()}"
        )
    if staging.device != table.device:
        raise ValueError(f"staging must be on {table.device} like the pages, got {staging.device}")
    if staging.numel() < num_entries * table.block_bytes:
        raise ValueError(
            f"{num_entries} blocks of {table.block_bytes} bytes need a staging buffer of "
            f"{num_entries * table.block_bytes} bytes, got {staging.numel()}"
        )
    check_aligned("staging", staging.data_ptr(), table)


def check_aligned(name: str, value: int, table: FragmentTable) -> None:
    """A base that the table's accesses do not divide would fault on the device."""
    if value % table.access_bytes:
        raise ValueError(
            f"misaligned base: {name} must be a multiple of the {table.access_bytes} bytes that "
            f"the fragments are aligned to, got {value:#x}"
        )


def check_reachable(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """A kernel on ``device`` can reach the tensor: it lies there, or in pinned host memory."""
    if tensor.device == device:
        return
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} must be on the cpu or on {device}, got {tensor.device}")
    if not tensor.is_pinned():
        raise ValueError(f"{name} must be in pinned memory for {device}, got pageable memory")


def _column(entries: Entries, column: int) -> _Ids:
    """One column as unsigned numbers, in which a negative id is a very large one."""
    array: _Ids = entries.records.numpy().view(np.uint64)
    return array[:, column]


def _check_range(name: str, ids: _Ids, bound: int) -> None:
    if int(ids.max()) >= bound:
        wrong = int(ids[ids >= bound].astype(np.int64)[0])
        raise ValueError(f"{name} {wrong} is out of range: allowed are 0 to {bound - 1}")


def _repeated(ids: _Ids, bound: int) -> int | None:
    """An id that comes more than once, all of them being below ``bound``; None if there is none."""
    if bound <= _MAX_MARKS:
        marks = np.zeros(bound, dtype=np.bool_)
        marks[ids] = True
        if np.count_nonzero(marks) == len(ids):
            return None
    ids = np.sort(ids)
    repeated = ids[1:][ids[1:] == ids[:-1]]
    return int(repeated[0]) if len(repeated) else None

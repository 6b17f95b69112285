"""The transfers that the GPU benchmark times, each able to check its own bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np
import torch

from ..engine.devices.runtime import Stream
from ..kernels.checksum import op as checksum
from ..kernels.config import PACK, PLAIN, STAGED, CopyConfig
from ..kernels.copy import op as copy
from ..kernels.entries import Entries
from ..kernels.pack import launch as pack_launch
from ..kernels.slices import SLICE_BYTES, slices
from ..kernels.table import ChecksumSlots, FragmentTable, HostSlots
from .gpu_platform import Platform

Direction = Literal["store", "load"]
DIRECTIONS: Final[tuple[Direction, ...]] = ("store", "load")
MAX_LAYERS: Final = 64
SEED: Final = 20261130


class WrongBytesError(Exception):
    """A transfer moved something else than it was asked to: no time of it is worth anything."""


@dataclass(frozen=True, slots=True)
class Case:
    """Random blocks of ``num_layers`` fragments each, and as many slots in pinned memory.

    ``pages`` is uint8 ``[num_layers, 2 * num_blocks, fragment_bytes]`` on the device; ``block_ids``
    and ``slot_ids`` are int64 ``[num_blocks]``.
    """

    platform: Platform
    table: FragmentTable
    slots: HostSlots
    entries: Entries
    checksums: ChecksumSlots
    flags: torch.Tensor
    staging: torch.Tensor
    pages: torch.Tensor
    block_ids: np.ndarray[Any, np.dtype[np.int64]]
    slot_ids: np.ndarray[Any, np.dtype[np.int64]]

    @property
    def num_bytes(self) -> int:
        return len(self.block_ids) * self.table.block_bytes

    @property
    def is_cuda(self) -> bool:
        return self.platform.device.type == "cuda"


def build(platform: Platform, fragment_bytes: int, num_fragments: int) -> Case:
    """A case of ``num_fragments`` in all, spread over up to 64 layers."""
    num_layers = min(MAX_LAYERS, num_fragments)
    num_blocks = num_fragments // num_layers
    rng = np.random.default_rng(SEED)
    torch.manual_seed(SEED)
    shape = (num_layers, 2 * num_blocks, fragment_bytes)
    pages = torch.randint(0, 256, shape, dtype=torch.uint8, device=platform.device)
    table = FragmentTable.from_views(list(pages))
    host = platform.pinned(num_blocks * table.block_bytes)
    slots = HostSlots(host, table.block_bytes, num_blocks, blocks_per_chunk=1)
    block_ids = rng.permutation(2 * num_blocks)[:num_blocks]
    slot_ids = rng.permutation(num_blocks)
    zeros = np.zeros(num_blocks, dtype=np.int64)
    is_cuda = platform.device.type == "cuda"
    values = torch.zeros((num_blocks, num_layers), dtype=torch.int64, pin_memory=is_cuda)
    return Case(
        platform=platform,
        table=table,
        slots=slots,
        entries=Entries.build(block_ids, slot_ids, zeros, pin_memory=is_cuda),
        checksums=ChecksumSlots(values, blocks_per_chunk=1),
        flags=torch.zeros(num_blocks, dtype=torch.int32, device=platform.device),
        staging=torch.empty(
            max(SLICE_BYTES, table.block_bytes), dtype=torch.uint8, device=platform.device
        ),
        pages=pages,
        block_ids=block_ids,
        slot_ids=slot_ids,
    )


Run = Callable[[Stream], None]
Strategy = Callable[[Case, Direction], Run]


def zero_copy(config: CopyConfig, *, with_checksums: bool = False) -> Strategy:
    """A kernel moves pages to pinned memory or back by itself."""

    def bind(case: Case, direction: Direction) -> Run:
        checksums = case.checksums if with_checksums else None
        flags = case.flags if with_checksums else None

        def run(stream: Stream) -> None:
            with case.platform.use(stream):
                if direction == "store":
                    copy.store(
                        case.table, case.slots, case.entries, config=config, checksums=checksums
                    )
                else:
                    copy.load(
                        case.table, case.slots, case.entries,
                        config=config, checksums=checksums, flags=flags,
                    )  # fmt: skip

        return run

    return bind


def packed_with(*, with_checksums: bool = False) -> Strategy:
    """A kernel packs a slice into a buffer on the GPU, and copies bring it to its slots; or back.

    Slots are random here, so every block is a copy of its own: the engine merges runs of slots.
    """

    def bind(case: Case, direction: Direction) -> Run:
        checksums = case.checksums if with_checksums else None
        flags = case.flags if with_checksums else None
        parts = list(slices(len(case.block_ids), case.table.block_bytes))
        size = case.table.block_bytes
        copies = []
        for part in parts:
            ids = case.slot_ids[part.first : part.first + part.num_entries]
            hosts = case.slots.memory.data_ptr() + ids * size
            buffers = case.staging.data_ptr() + np.arange(part.num_entries) * size
            copies.append((hosts, buffers, np.full(part.num_entries, size)))

        def run(stream: Stream) -> None:
            with case.platform.use(stream):
                for part, (hosts, buffers, sizes) in zip(parts, copies, strict=True):
                    arguments = (case.table, case.staging, case.entries, part)
                    if direction == "store":
                        pack_launch.pack(*arguments, config=PACK, checksums=checksums)
                        case.platform.copy(stream, hosts, buffers, sizes, True)
                    else:
                        case.platform.copy(stream, buffers, hosts, sizes, False)
                        pack_launch.unpack(
                            *arguments, config=PACK, checksums=checksums, flags=flags
                        )

        return run

    return bind


packed = packed_with()


def copy_engine(case: Case, direction: Direction) -> Run:
    """One descriptor for every fragment, in batches where the driver takes them."""
    fragment_bytes = case.pages.shape[2]
    num_layers = case.pages.shape[0]
    layers = np.arange(num_layers)
    on_device = (
        case.pages.data_ptr()
        + layers[None, :] * case.pages.stride(0)
        + case.block_ids[:, None] * fragment_bytes
    ).ravel()
    in_slots = (
        case.slots.memory.data_ptr()
        + case.slot_ids[:, None] * case.table.block_bytes
        + layers[None, :] * fragment_bytes
    ).ravel()
    sizes = np.full(len(on_device), fragment_bytes)
    to_host = direction == "store"
    targets, sources = (in_slots, on_device) if to_host else (on_device, in_slots)
    return lambda stream: case.platform.copy(stream, targets, sources, sizes, to_host)


def copy_engine_with_checksums(case: Case, direction: Direction) -> Run:
    """The copy engine computes nothing: a kernel of its own reads the pages once more."""
    move = copy_engine(case, direction)

    def run(stream: Stream) -> None:
        move(stream)
        with case.platform.use(stream):
            if direction == "store":
                checksum.write(case.table, case.entries, case.checksums)
            else:
                checksum.verify(case.table, case.entries, case.checksums, case.flags)

    return run


STRATEGIES: Final[Mapping[str, Strategy]] = {
    "zero-copy plain": zero_copy(PLAIN),
    "zero-copy staged": zero_copy(STAGED),
    "packed": packed,
    "copy engine": copy_engine,
}
CHECKSUMMED: Final[Mapping[str, Strategy]] = {
    "zero-copy plain + checksum": zero_copy(PLAIN, with_checksums=True),
    "zero-copy staged + checksum": zero_copy(STAGED, with_checksums=True),
    "packed + checksum": packed_with(with_checksums=True),
    "copy engine + checksum": copy_engine_with_checksums,
}


def with_grid(config: CopyConfig, num_programs: int) -> CopyConfig:
    """The same kernel on another number of multiprocessors."""
    return replace(config, num_programs=num_programs)


def check(case: Case, direction: Direction, run: Run) -> None:
    """Run once and compare every byte; raises `WrongBytesError` for the first block that differs.

    Afterwards slots and pages hold the same blocks again, so that a later load finds good bytes.
    """
    wanted = case.pages[:, torch.from_numpy(case.block_ids).to(case.pages.device)]
    wanted = wanted.transpose(0, 1).contiguous().cpu()
    by_slot = case.slots.memory.view(len(case.slot_ids), *wanted.shape[1:])
    case.flags.zero_()
    if direction == "store":
        by_slot.fill_(0xA5)
    else:
        by_slot[torch.from_numpy(case.slot_ids)] = wanted
        case.pages.fill_(0xA5)
    case.platform.synchronize()
    run(case.platform.stream())
    case.platform.synchronize()
    if direction == "store":
        found = by_slot[torch.from_numpy(case.slot_ids)]
    else:
        found = case.pages[:, torch.from_numpy(case.block_ids).to(case.pages.device)]
        found = found.transpose(0, 1).contiguous().cpu()
    differs = (found != wanted).flatten(1).any(dim=1)
    if bool(differs.any()):
        first = int(differs.nonzero()[0])
        raise WrongBytesError(
            f"{direction}: {int(differs.sum())} of {len(differs)} blocks differ, the first is "
            f"block {case.block_ids[first]} in slot {case.slot_ids[first]}"
        )
    if bool(case.flags.any()):
        raise WrongBytesError(f"{direction}: {int(case.flags.sum())} checksums were refused")

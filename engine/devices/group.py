"""One KV cache group as a stream device sees it: addresses, copies and kernel launches of entries.

Entry ``i`` of a piece is one block and its place in a slot. What moves it is told by addresses
alone: fragment ``f`` of block ``b`` lies at ``bases[f] + b * strides[f]`` on the device, and at the
block's place in the slot plus ``offsets[f]`` on the host.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import torch

from ...kernels.table import ChecksumSlots, FragmentTable, HostSlots
from ..layout import CHECKSUM_BYTES, GroupLayout
from ..mapping import tensor_at
from .base import HostMemory, Ints, Piece
from .byte_ranges import ByteRanges
from .runtime import Copies


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Ids of the entries in question, int64 ``[num_entries]`` each."""

    blocks: Ints
    slots: Ints
    positions: Ints

    @classmethod
    def of(cls, piece: Piece, order: Ints) -> Self:
        return cls(piece.blocks[order], piece.slots[order], piece.positions[order])

    def part(self, first: int, count: int) -> "Places":
        end = first + count
        return Places(self.blocks[first:end], self.slots[first:end], self.positions[first:end])


class MovedGroup:
    """The tables of one group; built once, read by every launch."""

    def __init__(
        self,
        layout: GroupLayout,
        memory: HostMemory,
        device: torch.device,
        seams: Sequence[int] = (),
    ) -> None:
        """``seams`` may grow later: addresses at which one registered piece of memory ends."""
        self._seams = seams
        fragments = layout.fragments
        self.group = layout.group
        self.block_bytes = layout.block_bytes
        self.num_fragments = len(fragments)
        self.table = FragmentTable(fragments, num_blocks=layout.num_blocks, device=device)
        self.slots = HostSlots(
            memory.slots, memory.slot_stride_bytes, memory.num_slots, layout.blocks_per_chunk
        )
        self.checksums: ChecksumSlots | None = None
        if memory.checksum_stride_bytes:
            rows = memory.checksums.view(memory.num_slots, -1)
            self.checksums = ChecksumSlots(rows, layout.blocks_per_chunk)
        self._bases = np.array([f.base_address for f in fragments], np.int64)
        self._strides = np.array([f.block_stride_bytes for f in fragments], np.int64)
        self._sizes = np.array([f.num_bytes for f in fragments], np.int64)
        self._offsets = np.concatenate(([0], np.cumsum(self._sizes)[:-1]))

    @cached_property
    def views(self) -> list[torch.Tensor]:
        """The pages in memory that the host can reach: uint8 ``[num_blocks, num_bytes]`` each."""
        blocks = self.table.num_blocks
        return [
            tensor_at(
                f.base_address, (blocks - 1) * f.block_stride_bytes + f.num_bytes, torch.uint8
            ).as_strided((blocks, f.num_bytes), (f.block_stride_bytes, 1))
            for f in self.table.fragments
        ]

    def page_addresses(self, places: Places) -> Ints:
        """``[num_entries, num_fragments]``, on the device."""
        return self._bases + places.blocks[:, None] * self._strides

    def host_addresses(self, places: Places) -> Ints:
        """Where each entry's block begins in its slot: ``[num_entries]``."""
        inside = places.slots * self.slots.slot_stride_bytes + places.positions * self.block_bytes
        return self.slots.memory.data_ptr() + inside

    def page_ranges(self, places: Places) -> ByteRanges:
        return ByteRanges.of(self.page_addresses(places), self._sizes)

    def host_ranges(self, places: Places) -> ByteRanges:
        return ByteRanges.of(self.host_addresses(places), self.block_bytes)

    def checksum_ranges(self, places: Places) -> ByteRanges:
        assert self.checksums is not None
        values = self.checksums.values
        words = places.slots * values.stride(0) + places.positions * self.num_fragments
        addresses = values.data_ptr() + words * CHECKSUM_BYTES
        return ByteRanges.of(addresses, self.num_fragments * CHECKSUM_BYTES)

    def page_copies(self, name: str, places: Places, *, to_host: bool, pinned: bool) -> Copies:
        """Pages straight from or to their slots, neighbours on both sides merged."""
        pages = self.page_addresses(places).ravel()
        hosts = (self.host_addresses(places)[:, None] + self._offsets).ravel()
        sizes = np.tile(self._sizes, len(places.blocks))
        merged = merge_neighbours(pages, hosts, sizes)
        return _directed(name, *split_at(self._seams, *merged), to_host, pinned)

    def staged_copies(
        self, name: str, staging: torch.Tensor, places: Places, *, to_host: bool, pinned: bool
    ) -> Copies:
        """Blocks that lie back to back in staging from or to their slots: one copy a run."""
        count = len(places.blocks)
        staged = staging.data_ptr() + np.arange(count, dtype=np.int64) * self.block_bytes
        sizes = np.full(count, self.block_bytes, np.int64)
        merged = merge_neighbours(staged, self.host_addresses(places), sizes)
        return _directed(name, *split_at(self._seams, *merged), to_host, pinned)


def merge_neighbours(devices: Ints, hosts: Ints, sizes: Ints) -> tuple[Ints, Ints, Ints]:
    """Join copies that follow each other on both sides; the driver does not do it.

    All ``[num_copies]``: device addresses, host addresses, bytes; the same three come back.
    """
    joined = (devices[1:] == devices[:-1] + sizes[:-1]) & (hosts[1:] == hosts[:-1] + sizes[:-1])
    first = np.flatnonzero(np.concatenate(([True], ~joined)))
    return devices[first], hosts[first], np.add.reduceat(sizes, first)


def split_at(
    seams: Sequence[int], devices: Ints, hosts: Ints, sizes: Ints
) -> tuple[Ints, Ints, Ints]:
    """Cut copies whose host side crosses a seam: one copy must not span two registrations."""
    ordered = np.array(sorted(seams), np.int64)
    first = np.searchsorted(ordered, hosts, side="right")
    last = np.searchsorted(ordered, hosts + sizes, side="left")
    if (first == last).all():
        return devices, hosts, sizes
    pieces: list[tuple[int, int, int]] = []
    rows = np.stack((devices, hosts, sizes, first, last), axis=1)
    for device, host, size, begin, end in rows.tolist():
        inner = ordered[begin:end].tolist()
        cuts = [host, *inner, host + size]
        pieces += [(device + a - host, a, b - a) for a, b in itertools.pairwise(cuts)]
    cut = np.array(pieces, np.int64)
    return cut[:, 0], cut[:, 1], cut[:, 2]


def _directed(
    name: str, devices: Ints, hosts: Ints, sizes: Ints, to_host: bool, pinned: bool
) -> Copies:
    targets, sources = (hosts, devices) if to_host else (devices, hosts)
    return Copies(name, targets, sources, sizes, to_host, pinned)

"""Pages, slots and entries to test transfers on: what is written, and everything around it.

A world is built twice from one seed: the kernel works on one, the reference on the other, and then
whole storages are compared, so that a byte written outside its destination shows as well.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch
from kvferry.kernels.entries import Entries
from kvferry.kernels.table import ChecksumSlots, FragmentTable, HostSlots

GUARD_BYTES = 64
NAN_BYTE = 0xFF
CANARY_BYTE = 0xA5


@dataclass(frozen=True)
class Pages:
    """Where the fragments of a group lie in one storage: (offset, block stride, size) in bytes."""

    num_blocks: int
    fragments: tuple[tuple[int, int, int], ...]

    @property
    def storage_bytes(self) -> int:
        ends = [o + (self.num_blocks - 1) * stride + size for o, stride, size in self.fragments]
        return max(ends) + GUARD_BYTES

    @property
    def block_bytes(self) -> int:
        return sum(size for _, _, size in self.fragments)

    def views(self, storage: torch.Tensor) -> list[torch.Tensor]:
        return [storage.as_strided((self.num_blocks, n), (s, 1), o) for o, s, n in self.fragments]


def layered(order: str, num_blocks: int, **extents: int) -> Pages:
    """Pages of one tensor with vLLM's dimensions in this order: L, B, H, N, C (C in bytes).

    What stands after B is one fragment of a block, and what stands before it counts the fragments.
    """
    extents["B"] = num_blocks
    before, after = order.split("B")
    size = math.prod(extents[name] for name in after)
    strides = {}
    step = 1
    for name in reversed(order):
        strides[name] = step
        step *= extents[name]
    places = itertools.product(*(range(extents[name]) for name in before))
    return Pages(
        num_blocks,
        tuple(
            (GUARD_BYTES + sum(i * strides[n] for i, n in zip(place, before, strict=True)),
             strides["B"], size)
            for place in places
        ),
    )  # fmt: skip


def separate(num_blocks: int, sizes: list[int], *, padding: int = 0) -> Pages:
    """One tensor a layer, of these page sizes, each page followed by ``padding`` unused bytes."""
    fragments = []
    offset = GUARD_BYTES
    for size in sizes:
        fragments.append((offset, size + padding, size))
        offset += num_blocks * (size + padding) + GUARD_BYTES
    return Pages(num_blocks, tuple(fragments))


def packed(num_blocks: int, sizes: list[int], *, others_bytes: int) -> Pages:
    """All layers in one tensor, block by block, shared with ``others_bytes`` of another group."""
    stride = sum(sizes) + others_bytes
    offsets = itertools.accumulate(sizes, initial=GUARD_BYTES + others_bytes)
    return Pages(
        num_blocks, tuple((o, stride, size) for o, size in zip(offsets, sizes, strict=False))
    )


class World:
    """A storage of pages and slots in host memory, with their checksums; all bytes are random."""

    def __init__(
        self,
        device: str,
        pages: Pages,
        *,
        seed: int,
        num_slots: int = 5,
        blocks_per_chunk: int = 1,
        slot_padding: int = 32,
    ) -> None:
        self.device = device
        self.pages = pages
        self._random = np.random.default_rng(seed)
        self.blocks_per_chunk = blocks_per_chunk
        self.storage = self._bytes(pages.storage_bytes).to(device)
        stride = blocks_per_chunk * pages.block_bytes + slot_padding
        self.memory = host_memory(self._bytes(num_slots * stride + GUARD_BYTES), device)
        self.views = pages.views(self.storage)
        self.table = FragmentTable.from_views(self.views)
        self.slots = HostSlots(self.memory, stride, num_slots, blocks_per_chunk)
        row = blocks_per_chunk * len(pages.fragments) + 3
        self.checksums = ChecksumSlots(
            host_memory(torch.full((num_slots, row), -7, dtype=torch.int64), device),
            blocks_per_chunk,
        )

    def entries(self, num_entries: int | None = None) -> Entries:
        """Random blocks for random places, none twice; so many that chunks are partly there."""
        places = [
            (slot, position)
            for slot in range(self.slots.num_slots)
            for position in range(self.blocks_per_chunk)
        ]
        most = min(len(places), self.pages.num_blocks)
        count = most if num_entries is None else num_entries
        blocks = self._random.permutation(self.pages.num_blocks)[:count]
        chosen = [places[i] for i in self._random.permutation(len(places))[:count]]
        seeds = self._random.integers(-(2**63), 2**63 - 1, self.slots.num_slots)
        return Entries.build(
            blocks,
            [slot for slot, _ in chosen],
            [position for _, position in chosen],
            [seeds[slot] for slot, _ in chosen],
            pin_memory=self.device != "cpu",
        )

    def flags(self, entries: Entries) -> torch.Tensor:
        return torch.zeros(entries.num_entries, dtype=torch.int32, device=self.device)

    def staging(self, entries: Entries, fill: int) -> torch.Tensor:
        """A buffer for these entries between guards: use ``[GUARD_BYTES:-GUARD_BYTES]``."""
        size = entries.num_entries * self.pages.block_bytes + 2 * GUARD_BYTES
        return torch.full((size,), fill, dtype=torch.uint8, device=self.device)

    def _bytes(self, count: int) -> torch.Tensor:
        return torch.from_numpy(self._random.integers(0, 256, count, dtype=np.uint8))


def host_memory(values: torch.Tensor, device: str) -> torch.Tensor:
    """The values on the host, where a kernel on the device can reach them."""
    return values if device == "cpu" else values.pin_memory()


def finish(device: str) -> None:
    """Wait for the kernels."""
    if device != "cpu":
        torch.cuda.synchronize()


SIX_LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")

LAYOUTS = {
    **{order: layered(order, 9, L=3, H=2, N=4, C=48) for order in SIX_LAYOUTS},
    "split K and V": layered("LKBHNC", 9, L=3, K=2, H=2, N=4, C=16),
    "K and V outermost": layered("KLBHNC", 9, L=3, K=2, H=2, N=4, C=16),
    "packed": packed(9, [480, 480, 480], others_bytes=96),
    "per-layer sizes": separate(9, [16, 4096, 640, 20480, 48]),
    "padded pages": separate(9, [1000 * 16] * 2, padding=112),
    "fp8 with scales": separate(9, [656, 656, 4, 4]),
    "odd bytes": separate(9, [13, 1, 255, 3000, 8]),
}

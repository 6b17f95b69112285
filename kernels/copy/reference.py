"""What ``copy`` does, one fragment of one block at a time."""

from collections.abc import Iterator, Sequence

import torch

from ..entries import Entries
from ..table import HostSlots


def store(views: Sequence[torch.Tensor], slots: HostSlots, entries: Entries) -> None:
    """Copy blocks to their places in the slots.

    ``views`` are the fragments, each a uint8 view ``[num_blocks, num_bytes]``, on any device.
    """
    for page, place in _pairs(views, slots, entries):
        place.copy_(page)


def load(views: Sequence[torch.Tensor], slots: HostSlots, entries: Entries) -> None:
    """Copy places in the slots to their blocks; the reverse of ``store``."""
    for page, place in _pairs(views, slots, entries):
        page.copy_(place)


def _pairs(
    views: Sequence[torch.Tensor], slots: HostSlots, entries: Entries
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    block_bytes = sum(view.shape[1] for view in views)
    for block, slot, position, _ in entries.records.tolist():
        begin = slot * slots.slot_stride_bytes + position * block_bytes
        for view in views:
            yield view[block], slots.memory[begin : begin + view.shape[1]]
            begin += view.shape[1]

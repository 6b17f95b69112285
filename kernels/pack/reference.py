"""What ``pack`` and ``unpack`` do, one fragment of one block at a time."""

from collections.abc import Sequence

import torch

from ..entries import BLOCK, Entries


def pack(views: Sequence[torch.Tensor], staging: torch.Tensor, entries: Entries) -> None:
    """Copy blocks to ``staging`` (uint8, 1-D), back to back in the order of the entries.

    ``views`` are the fragments, each a uint8 view ``[num_blocks, num_bytes]``, on any device.
    """
    begin = 0
    for block in entries.records[:, BLOCK].tolist():
        for view in views:
            staging[begin : begin + view.shape[1]].copy_(view[block])
            begin += view.shape[1]


def unpack(views: Sequence[torch.Tensor], staging: torch.Tensor, entries: Entries) -> None:
    """Copy ``staging`` to the blocks; the reverse of ``pack``."""
    begin = 0
    for block in entries.records[:, BLOCK].tolist():
        for view in views:
            view[block].copy_(staging[begin : begin + view.shape[1]])
            begin += view.shape[1]

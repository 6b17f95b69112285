"""The work list of one transfer: which block goes with which place in which slot."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Ids: TypeAlias = Sequence[int] | npt.NDArray[np.int64]

BLOCK, SLOT, POSITION, SEED = range(4)
"""The columns of a record."""


@dataclass(frozen=True, slots=True)
class Entries:
    """One record a block: an int64 tensor ``[num_entries, 4]`` on the CPU, pinned for a GPU.

    The columns are the block id, the slot id, the position of the block in its chunk, and the
    checksum seed of the chunk. A chunk that is only partly there has fewer records. The kernels
    read the records where they lie, so nothing may write them before the transfer has ended.
    """

    records: torch.Tensor

    def __post_init__(self) -> None:
        records = self.records
        if records.dtype != torch.int64 or records.dim() != 2 or records.shape[1] != 4:
            raise ValueError(
                "entries must be an int64 tensor [num_entries, 4], got "
                f"{records.dtype} {tuple(records.shape)}"
            )
        if not records.is_contiguous():
            raise ValueError(f"entries must be contiguous, got strides {records.stride()}")
        if records.device.type != "cpu":
            raise ValueError(f"entries must be on the cpu, got {records.device}")

    @property
    def num_entries(self) -> int:
        return self.records.shape[0]

    @classmethod
    def build(
        cls,
        block_ids: Ids,
        slot_ids: Ids,
        positions: Ids,
        seeds: Ids | None = None,
        *,
        pin_memory: bool = False,
    ) -> "Entries":
        """New records from four columns of one length; ``seeds`` of None stands for zeros."""
        columns = [
            block_ids,
            slot_ids,
            positions,
            seeds if seeds is not None else [0] * len(slot_ids),
        ]
        lengths = [len(column) for column in columns]
        if len(set(lengths)) != 1:
            raise ValueError(
                f"block ids, slot ids, positions and seeds must have one length, got {lengths}"
            )
        records = torch.empty((lengths[0], 4), dtype=torch.int64, pin_memory=pin_memory)
        array = records.numpy()
        for index, column in enumerate(columns):
            array[:, index] = column
        return cls(records)

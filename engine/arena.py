"""Owns the host memory: reserve, pre-fault in parallel, pin in bounded pieces, release."""

from types import TracebackType
from typing import Self

import torch

from .devices.base import Device, Ints


class Arena:
    """``num_slots`` slots and their checksums in one anonymous mapping."""

    @classmethod
    def reserve(
        cls,
        num_slots: int,
        slot_stride_bytes: int,
        checksum_stride_bytes: int,
        device: Device,
    ) -> Self:
        """Raises ``CapacityError`` with the numbers when this machine cannot hold it."""
        raise NotImplementedError

    @property
    def slots(self) -> torch.Tensor:
        raise NotImplementedError

    @property
    def checksums(self) -> torch.Tensor:
        raise NotImplementedError

    @property
    def num_slots(self) -> int:
        raise NotImplementedError

    @property
    def slot_stride_bytes(self) -> int:
        raise NotImplementedError

    @property
    def checksum_stride_bytes(self) -> int:
        raise NotImplementedError

    @property
    def num_bytes(self) -> int:
        """Bytes reserved, checksums included."""
        raise NotImplementedError

    @property
    def pinned_bytes(self) -> int:
        raise NotImplementedError

    def is_pinned(self, slots: Ints) -> bool:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

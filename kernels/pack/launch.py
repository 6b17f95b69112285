"""Launchers of ``pack``: valid input assumed, nothing allocated, one kernel for one slice."""

import torch

from ..config import CopyConfig
from ..entries import Entries
from ..launching import launch
from ..pages import NO_CHECKSUMS, VERIFY_CHECKSUMS, WRITE_CHECKSUMS
from ..slices import Slice
from ..table import ChecksumSlots, FragmentTable
from .kernel import pack_pages_kernel, unpack_pages_kernel


def pack(
    table: FragmentTable,
    staging: torch.Tensor,
    entries: Entries,
    part: Slice,
    *,
    config: CopyConfig,
    checksums: ChecksumSlots | None,
) -> None:
    """Pages of one slice to ``staging``, its first entry at byte 0, on the current stream."""
    launch(
        pack_pages_kernel,
        table,
        (part,),
        config,
        pointers=(
            table.records,
            staging,
            entries.records,
            None if checksums is None else checksums.values,
            None,
        ),
        counts=(table.block_bytes, 0 if checksums is None else checksums.values.shape[1]),
        checksums=(NO_CHECKSUMS if checksums is None else WRITE_CHECKSUMS).value,
    )


def unpack(
    table: FragmentTable,
    staging: torch.Tensor,
    entries: Entries,
    part: Slice,
    *,
    config: CopyConfig,
    checksums: ChecksumSlots | None,
    flags: torch.Tensor | None,
) -> None:
    """``staging`` to the pages of one slice, its first entry at byte 0, on the current stream.

    With ``checksums``, the flag of an entry whose bytes do not match becomes 1; others stay as they
    were, so the caller clears ``flags`` first.
    """
    launch(
        unpack_pages_kernel,
        table,
        (part,),
        config,
        pointers=(
            table.records,
            staging,
            entries.records,
            None if checksums is None else checksums.values,
            flags,
        ),
        counts=(table.block_bytes, 0 if checksums is None else checksums.values.shape[1]),
        checksums=(NO_CHECKSUMS if checksums is None else VERIFY_CHECKSUMS).value,
    )

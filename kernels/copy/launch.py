"""Launchers of ``copy``: valid input assumed, nothing allocated, one kernel for each slice."""

import torch

from ..config import CopyConfig
from ..entries import Entries
from ..launching import launch
from ..pages import NO_CHECKSUMS, VERIFY_CHECKSUMS, WRITE_CHECKSUMS
from ..slices import Slice
from ..table import ChecksumSlots, FragmentTable, HostSlots
from .kernel import load_pages_kernel, store_pages_kernel


def store(
    table: FragmentTable,
    slots: HostSlots,
    entries: Entries,
    *parts: Slice,
    config: CopyConfig,
    checksums: ChecksumSlots | None,
) -> None:
    """Pages to slots for the slices, on the current stream; writes ``checksums`` if given."""
    launch(
        store_pages_kernel,
        table,
        parts,
        config,
        pointers=(
            table.records,
            slots.memory,
            entries.records,
            None if checksums is None else checksums.values,
            None,
        ),
        counts=(
            slots.slot_stride_bytes,
            table.block_bytes,
            0 if checksums is None else checksums.values.shape[1],
        ),
        checksums=(NO_CHECKSUMS if checksums is None else WRITE_CHECKSUMS).value,
    )


def load(
    table: FragmentTable,
    slots: HostSlots,
    entries: Entries,
    *parts: Slice,
    config: CopyConfig,
    checksums: ChecksumSlots | None,
    flags: torch.Tensor | None,
) -> None:
    """Slots to pages for the slices, on the current stream.

    With ``checksums``, the flag of an entry whose bytes do not match becomes 1; others stay as they
    were, so the caller clears ``flags`` first.
    """
    launch(
        load_pages_kernel,
        table,
        parts,
        config,
        pointers=(
            table.records,
            slots.memory,
            entries.records,
            None if checksums is None else checksums.values,
            flags,
        ),
        counts=(
            slots.slot_stride_bytes,
            table.block_bytes,
            0 if checksums is None else checksums.values.shape[1],
        ),
        checksums=(NO_CHECKSUMS if checksums is None else VERIFY_CHECKSUMS).value,
    )

"""Launchers of ``checksum``: valid input assumed, nothing allocated, one kernel for each slice."""

import torch

from ..config import CopyConfig
from ..entries import Entries
from ..launching import launch
from ..pages import VERIFY_CHECKSUMS, WRITE_CHECKSUMS
from ..slices import Slice
from ..table import ChecksumSlots, FragmentTable
from .kernel import checksum_pages_kernel


def checksum(
    table: FragmentTable,
    entries: Entries,
    *parts: Slice,
    config: CopyConfig,
    checksums: ChecksumSlots,
    flags: torch.Tensor | None,
) -> None:
    """Write the checksums of the slices' pages, or with ``flags`` verify them.

    Work is queued on the current stream.
    """
    launch(
        checksum_pages_kernel,
        table,
        parts,
        config,
        pointers=(table.records, entries.records, checksums.values, flags),
        counts=(checksums.values.shape[1],),
        checksums=(WRITE_CHECKSUMS if flags is None else VERIFY_CHECKSUMS).value,
    )

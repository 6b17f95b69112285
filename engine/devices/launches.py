"""Kernel launches for entries of a piece: each with its PyTorch reference and the bytes it touches.

A launch covers the entries ``first ... + num_entries`` of the descriptors (``Slice``), all checked
or none. Input was validated once for the whole piece, so these go straight to the launchers.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, TypeVar

import torch

from ...kernels.checksum import launch as checksum_launch
from ...kernels.checksum import reference as checksum_reference
from ...kernels.config import PACK, PLAIN, CopyConfig
from ...kernels.copy import launch as copy_launch
from ...kernels.copy import reference as copy_reference
from ...kernels.entries import Entries
from ...kernels.pack import launch as pack_launch
from ...kernels.pack import reference as pack_reference
from ...kernels.slices import Slice
from ...kernels.table import ChecksumSlots
from .byte_ranges import NOTHING, ByteRanges
from .descriptors import Descriptors
from .group import MovedGroup, Places
from .runtime import Accesses, KernelLaunch

LINK_CONFIG: Final = PLAIN

Memory = TypeVar("Memory")


class Launches:
    """The launches of one piece. ``num_programs`` of 0 leaves the grid to the default."""

    def __init__(
        self, name: str, group: MovedGroup, descriptors: Descriptors, num_programs: int
    ) -> None:
        self._name = name
        self._group = group
        self._descriptors = descriptors
        self._link = _with_programs(LINK_CONFIG, num_programs)

    def store(self, part: Slice, checked: bool) -> KernelLaunch:
        """Pages straight to pinned slots."""
        group, entries = self._group, self._descriptors.entries
        checksums = group.checksums if checked else None
        places = self._places(part)
        return KernelLaunch(
            f"store {self._name}",
            lambda: copy_launch.store(
                group.table, group.slots, entries, part, config=self._link, checksums=checksums
            ),
            self._in_plain(part, checked, group.slots, copy_reference.store),
            lambda: self._accesses(
                part,
                reads=group.page_ranges(places),
                writes=group.host_ranges(places).union(self._checksums(checksums, places)),
            ),
        )

    def load(self, part: Slice, checked: bool) -> KernelLaunch:
        """Pinned slots straight to pages."""
        group, entries = self._group, self._descriptors.entries
        checksums = group.checksums if checked else None
        flags = self._descriptors.flags if checked else None
        places = self._places(part)
        return KernelLaunch(
            f"load {self._name}",
            lambda: copy_launch.load(
                group.table,
                group.slots,
                entries,
                part,
                config=self._link,
                checksums=checksums,
                flags=flags,
            ),
            self._in_plain(part, checked, group.slots, copy_reference.load, loads=True),
            lambda: self._accesses(
                part,
                reads=group.host_ranges(places).union(self._checksums(checksums, places)),
                writes=group.page_ranges(places).union(self._flags(checked, part)),
            ),
        )

    def pack(self, part: Slice, checked: bool, staging: torch.Tensor) -> KernelLaunch:
        """Pages to staging, back to back from its start."""
        group, entries = self._group, self._descriptors.entries
        checksums = group.checksums if checked else None
        places = self._places(part)
        return KernelLaunch(
            f"pack {self._name}",
            lambda: pack_launch.pack(
                group.table, staging, entries, part, config=PACK, checksums=checksums
            ),
            self._in_plain(part, checked, staging, pack_reference.pack),
            lambda: self._accesses(
                part,
                reads=group.page_ranges(places),
                writes=self._staged(staging, part).union(self._checksums(checksums, places)),
            ),
        )

    def unpack(self, part: Slice, checked: bool, staging: torch.Tensor) -> KernelLaunch:
        """Staging to pages."""
        group, entries = self._group, self._descriptors.entries
        checksums = group.checksums if checked else None
        flags = self._descriptors.flags if checked else None
        places = self._places(part)
        return KernelLaunch(
            f"unpack {self._name}",
            lambda: pack_launch.unpack(
                group.table,
                staging,
                entries,
                part,
                config=PACK,
                checksums=checksums,
                flags=flags,
            ),
            self._in_plain(part, checked, staging, pack_reference.unpack, loads=True),
            lambda: self._accesses(
                part,
                reads=self._staged(staging, part).union(self._checksums(checksums, places)),
                writes=group.page_ranges(places).union(self._flags(checked, part)),
            ),
        )

    def write_checksums(self, part: Slice) -> KernelLaunch:
        """The checksums of pages, to the slots'."""
        group, entries = self._group, self._descriptors.entries
        checksums = group.checksums
        assert checksums is not None
        places = self._places(part)
        return KernelLaunch(
            f"checksum {self._name}",
            lambda: checksum_launch.checksum(
                group.table, entries, part, config=PACK, checksums=checksums, flags=None
            ),
            lambda: self._write_in_plain(part),
            lambda: self._accesses(
                part, reads=group.page_ranges(places), writes=group.checksum_ranges(places)
            ),
        )

    def verify(self, part: Slice) -> KernelLaunch:
        """Pages that were loaded, against the checksums of the slots."""
        group, entries = self._group, self._descriptors.entries
        checksums, flags = group.checksums, self._descriptors.flags
        assert checksums is not None
        places = self._places(part)
        return KernelLaunch(
            f"verify {self._name}",
            lambda: checksum_launch.checksum(
                group.table, entries, part, config=PACK, checksums=checksums, flags=flags
            ),
            lambda: self._verify_in_plain(part),
            lambda: self._accesses(
                part,
                reads=group.page_ranges(places).union(group.checksum_ranges(places)),
                writes=self._flags(True, part),
            ),
        )

    def _in_plain(
        self,
        part: Slice,
        checked: bool,
        memory: Memory,
        move: Callable[[Sequence[torch.Tensor], Memory, Entries], None],
        *,
        loads: bool = False,
    ) -> Callable[[], None]:
        """The reference of a moving kernel: the bytes first, then their checksums."""

        def run() -> None:
            move(self._group.views, memory, self._cut(part))
            if checked and loads:
                self._verify_in_plain(part)
            elif checked:
                self._write_in_plain(part)

        return run

    def _write_in_plain(self, part: Slice) -> None:
        assert self._group.checksums is not None
        checksum_reference.write(self._group.views, self._cut(part), self._group.checksums)

    def _verify_in_plain(self, part: Slice) -> None:
        assert self._group.checksums is not None
        flags = self._descriptors.flags[part.first : part.first + part.num_entries]
        views, checksums = self._group.views, self._group.checksums
        checksum_reference.verify(views, self._cut(part), checksums, flags)

    def _cut(self, part: Slice) -> Entries:
        records = self._descriptors.entries.records
        return Entries(records[part.first : part.first + part.num_entries])

    def _places(self, part: Slice) -> Places:
        return self._descriptors.places.part(part.first, part.num_entries)

    def _accesses(self, part: Slice, reads: ByteRanges, writes: ByteRanges) -> Accesses:
        """Adds what every kernel reads: its entries' records."""
        records = self._descriptors.entries.records[part.first : part.first + part.num_entries]
        return Accesses(reads.union(ByteRanges.of_tensor(records)), writes)

    def _checksums(self, checksums: ChecksumSlots | None, places: Places) -> ByteRanges:
        return NOTHING if checksums is None else self._group.checksum_ranges(places)

    def _flags(self, checked: bool, part: Slice) -> ByteRanges:
        flags = self._descriptors.flags[part.first : part.first + part.num_entries]
        return ByteRanges.of_tensor(flags) if checked else NOTHING

    def _staged(self, staging: torch.Tensor, part: Slice) -> ByteRanges:
        return ByteRanges.of(staging.data_ptr(), part.num_entries * self._group.block_bytes)


def _with_programs(config: CopyConfig, num_programs: int) -> CopyConfig:
    return replace(config, num_programs=num_programs) if num_programs else config

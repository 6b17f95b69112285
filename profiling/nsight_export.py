"""Reads what ``nsys export --type sqlite`` writes: our ranges, the copies, the kernels.

Tables are there only when something of their kind was recorded, and columns come and go between
versions; what is used here has been stable since 2021. Ids of domains and of launches belong to
one process each, so they are always compared together with the process in a thread's id.
"""

import bisect
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

from .nsight_summary import Timed, kind_and_bytes

DOMAIN: Final = "kvferry"

_PUSH_POP, _START_END, _DOMAIN_CREATE = 59, 60, 75
_PROCESS: Final = ~0xFFFFFF
"""The low 24 bits of a global thread id are the thread; what is left is the process."""

_COPY_KINDS: Final = {1: "copy host to device", 2: "copy device to host", 8: "copy on the device"}

Work = tuple[int, int]
"""Of one launch: nanoseconds on the GPU, and bytes where it was a copy."""


class Export:
    """One exported file, read once. Raises ValueError when it is no such export."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise ValueError(f"no export at {path}; allowed: a file that nsys export has written")
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as file:
            try:
                rows = file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
                self._tables = {name for (name,) in rows}
                if "StringIds" not in self._tables:
                    raise ValueError(f"{path} has no table StringIds: it is no export of nsys")
                self.copies = list(self._copies(file))
                self.kernels = list(self._kernels(file))
                self.ranges = list(self._ranges(file))
            except sqlite3.DatabaseError as error:
                raise ValueError(f"{path} cannot be read as an export of nsys: {error}") from error

    def _ranges(self, file: sqlite3.Connection) -> Iterator[Timed]:
        """Ranges of our domain, with what the GPU did for the launches made inside them."""
        if "NVTX_EVENTS" not in self._tables:
            return
        launches = self._launches(file)
        query = f"""
            SELECT r.start, r.end, coalesce(r.text, s.value, ''), r.globalTid
            FROM NVTX_EVENTS r
            JOIN NVTX_EVENTS d ON d.eventType = {_DOMAIN_CREATE} AND d.domainId = r.domainId
                AND (d.globalTid & {_PROCESS}) = (r.globalTid & {_PROCESS})
            LEFT JOIN StringIds s ON s.id = r.textId
            LEFT JOIN StringIds t ON t.id = d.textId
            WHERE r.eventType IN ({_PUSH_POP}, {_START_END}) AND r.end IS NOT NULL
                AND coalesce(d.text, t.value) = ?
            GROUP BY r.rowid
        """
        for start, end, message, thread in file.execute(query, (DOMAIN,)):
            kind, said = kind_and_bytes(message)
            starts, works = launches.get(thread, ([], []))
            inside = works[bisect.bisect_left(starts, start) : bisect.bisect_left(starts, end)]
            copied = sum(num_bytes for _, num_bytes in inside)
            yield Timed(kind, start, end, said or copied, sum(ns for ns, _ in inside))

    def _launches(self, file: sqlite3.Connection) -> dict[int, tuple[list[int], list[Work]]]:
        """For each thread the times of its launches, in order, and what each made the GPU do."""
        if "CUPTI_ACTIVITY_KIND_RUNTIME" not in self._tables:
            return {}
        parts = []
        if "CUPTI_ACTIVITY_KIND_MEMCPY" in self._tables:
            parts.append(
                "SELECT correlationId, globalPid, end - start AS ns, bytes"
                " FROM CUPTI_ACTIVITY_KIND_MEMCPY"
            )
        if "CUPTI_ACTIVITY_KIND_KERNEL" in self._tables:
            parts.append(
                "SELECT correlationId, globalPid, end - start AS ns, 0 AS bytes"
                " FROM CUPTI_ACTIVITY_KIND_KERNEL"
            )
        if not parts:
            return {}
        query = f"""
            SELECT r.globalTid, r.start, sum(w.ns), sum(w.bytes)
            FROM CUPTI_ACTIVITY_KIND_RUNTIME r
            JOIN ({" UNION ALL ".join(parts)}) w ON w.correlationId = r.correlationId
                AND (w.globalPid & {_PROCESS}) = (r.globalTid & {_PROCESS})
            GROUP BY r.rowid ORDER BY r.globalTid, r.start
        """
        found: dict[int, tuple[list[int], list[Work]]] = {}
        for thread, start, ns, num_bytes in file.execute(query):
            starts, works = found.setdefault(thread, ([], []))
            starts.append(start)
            works.append((ns, num_bytes))
        return found

    def _copies(self, file: sqlite3.Connection) -> Iterator[Timed]:
        if "CUPTI_ACTIVITY_KIND_MEMCPY" not in self._tables:
            return
        query = "SELECT copyKind, start, end, bytes FROM CUPTI_ACTIVITY_KIND_MEMCPY"
        for kind, start, end, num_bytes in file.execute(query):
            name = _COPY_KINDS.get(kind, f"copy of kind {kind}")
            yield Timed(name, start, end, num_bytes, end - start)

    def _kernels(self, file: sqlite3.Connection) -> Iterator[Timed]:
        if "CUPTI_ACTIVITY_KIND_KERNEL" not in self._tables:
            return
        query = """
            SELECT s.value, k.start, k.end
            FROM CUPTI_ACTIVITY_KIND_KERNEL k JOIN StringIds s ON s.id = k.shortName
        """
        for name, start, end in file.execute(query):
            yield Timed(name, start, end, 0, end - start)

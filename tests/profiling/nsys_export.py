"""Builds SQLite files with the tables of ``nsys export --type sqlite``, for tests to fill."""

import sqlite3
from pathlib import Path

SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE NVTX_EVENTS (
    start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER,
    category INTEGER, color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER,
    textId INTEGER REFERENCES StringIds(id), domainId INTEGER, uint64Value INTEGER,
    int64Value INTEGER, doubleValue REAL, uint32Value INTEGER, int32Value INTEGER,
    floatValue REAL, jsonTextId INTEGER, jsonText TEXT, binaryData TEXT
);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (
    start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL,
    globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL REFERENCES StringIds(id),
    returnValue INTEGER NOT NULL, callchainId INTEGER
);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER,
    globalPid INTEGER, bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL, deprecatedSrcId INTEGER,
    srcKind INTEGER, dstKind INTEGER, srcDeviceId INTEGER, srcContextId INTEGER,
    dstDeviceId INTEGER, dstContextId INTEGER, migrationCause INTEGER, graphNodeId INTEGER,
    virtualAddress INTEGER, copyCount INTEGER
);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER,
    globalPid INTEGER, demangledName INTEGER NOT NULL REFERENCES StringIds(id),
    shortName INTEGER NOT NULL REFERENCES StringIds(id), mangledName INTEGER, launchType INTEGER,
    cacheConfig INTEGER, registersPerThread INTEGER NOT NULL, gridX INTEGER NOT NULL,
    gridY INTEGER NOT NULL, gridZ INTEGER NOT NULL, blockX INTEGER NOT NULL,
    blockY INTEGER NOT NULL, blockZ INTEGER NOT NULL, staticSharedMemory INTEGER NOT NULL,
    dynamicSharedMemory INTEGER NOT NULL, localMemoryPerThread INTEGER NOT NULL,
    localMemoryTotal INTEGER NOT NULL, gridId INTEGER NOT NULL
);
"""


def global_pid(process: int) -> int:
    """A process as nsys writes it: some bits of the machine above, the thread's 24 below."""
    return 0x0100_0000_0000_0000 | process << 24


class ExportFile:
    """An export under construction; ``domain`` first, then what happened in it."""

    def __init__(self, path: Path, *, without: tuple[str, ...] = ()) -> None:
        self._file = sqlite3.connect(path)
        for statement in SCHEMA.split(";"):
            if not any(f"CREATE TABLE {table}" in statement for table in without):
                self._file.execute(statement)
        self._strings: dict[str, int] = {}

    def string(self, value: str) -> int:
        if value not in self._strings:
            self._strings[value] = len(self._strings) + 1
            self._insert("StringIds", id=self._strings[value], value=value)
        return self._strings[value]

    def domain(self, name: str, number: int, process: int, *, registered: bool = False) -> None:
        said = {"textId": self.string(name)} if registered else {"text": name}
        thread = global_pid(process) | process
        self._insert(
            "NVTX_EVENTS", start=0, eventType=75, domainId=number, globalTid=thread, **said
        )

    def span(
        self,
        message: str,
        start: int,
        end: int | None,
        *,
        process: int,
        domain: int = 1,
        thread: int = 7,
        kind: int = 59,
        registered: bool = False,
    ) -> None:
        said = {"textId": self.string(message)} if registered else {"text": message}
        self._insert(
            "NVTX_EVENTS",
            start=start,
            end=end,
            eventType=kind,
            domainId=domain,
            globalTid=global_pid(process) | thread,
            **said,
        )

    def call(self, start: int, correlation: int, *, process: int, thread: int = 7) -> None:
        self._insert(
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            start=start,
            end=start + 5,
            eventClass=0,
            globalTid=global_pid(process) | thread,
            correlationId=correlation,
            nameId=self.string("cuLaunchKernelEx"),
            returnValue=0,
        )

    def copy(
        self, start: int, end: int, num_bytes: int, correlation: int, *, process: int, kind: int
    ) -> None:
        self._insert(
            "CUPTI_ACTIVITY_KIND_MEMCPY",
            start=start,
            end=end,
            deviceId=0,
            contextId=1,
            streamId=13,
            correlationId=correlation,
            globalPid=global_pid(process),
            bytes=num_bytes,
            copyKind=kind,
        )

    def kernel(self, name: str, start: int, end: int, correlation: int, *, process: int) -> None:
        sizes = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ", "gridId")
        memory = ("staticSharedMemory", "dynamicSharedMemory")
        local = ("localMemoryPerThread", "localMemoryTotal", "registersPerThread")
        self._insert(
            "CUPTI_ACTIVITY_KIND_KERNEL",
            start=start,
            end=end,
            deviceId=0,
            contextId=1,
            streamId=13,
            correlationId=correlation,
            globalPid=global_pid(process),
            demangledName=self.string(name),
            shortName=self.string(name),
            **dict.fromkeys((*sizes, *memory, *local), 1),
        )

    def close(self) -> None:
        self._file.commit()
        self._file.close()

    def _insert(self, table: str, **values: object) -> None:
        marks = ", ".join("?" * len(values))
        query = f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks})"
        self._file.execute(query, tuple(values.values()))

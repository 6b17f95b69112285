"""The transfer engine: carries out jobs on a device and reports each of them."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from .arena import Arena
from .devices.base import Device
from .layout import Layout
from .messages import JobOrder, JobReport
from .types import JobId, Rank

Integrity = Literal["full", "sample", "off"]


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """How the engine behaves; the defaults are what a user gets.

    ``deadline_s`` counts from ``submit``. ``max_store_bytes`` bounds the bytes of stores in flight;
    a store beyond it is skipped. After ``max_device_errors`` failed jobs in a row offloading is
    turned off.
    """

    slice_bytes: int = 32 << 20
    deadline_s: float = 60.0
    max_store_bytes: int = 4 << 30
    max_device_errors: int = 8
    integrity: Integrity = "sample"


class TransferEngine:
    """See the module docstring. One thread calls all methods."""

    def __init__(
        self,
        device: Device,
        layout: Layout,
        arena: Arena,
        rank: Rank,
        options: TransferOptions = TransferOptions(),
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Owns ``device`` and ``arena`` from here on: ``close`` closes both."""
        raise NotImplementedError

    def begin_step(self) -> None:
        """A step begins: stores deferred in the step before are launched; ``mark_loads``."""
        raise NotImplementedError

    def mark_loads(self) -> None:
        """Loads submitted from now on wait for everything queued for compute by now.

        vLLM zeroes fresh blocks after ``handle_preemptions`` and before it binds the step's
        metadata: call it again where the metadata is bound, or a load may be zeroed away.
        """
        raise NotImplementedError

    def submit(self, order: JobOrder, *, deferred: bool = False, expedited: bool = False) -> None:
        """Take a job. ``deferred``: a store, launched in the next ``begin_step`` or by a flush.

        ``expedited``: a load that does not queue behind others. Raises ValueError for ids that the
        layout or the arena do not have, ``EngineClosed`` after ``close``; never for the device.
        """
        raise NotImplementedError

    def flush(self, job_ids: Iterable[JobId]) -> None:
        """Nothing queued for compute afterwards runs before these jobs are done.

        Deferred ones are launched first. Ids that are unknown or finished are fine.
        """
        raise NotImplementedError

    def poll(self) -> list[JobReport]:
        """The reports that have become due; never waits."""
        raise NotImplementedError

    def drain(self, timeout_s: float) -> list[JobReport]:
        """Launch what is deferred and wait, at most this long, until no job is left."""
        raise NotImplementedError

    def snapshot(self) -> dict[str, int | float]:
        """``jobs``, ``queued``, ``stored_bytes``, ``loaded_bytes``, ``failed_jobs``,
        ``arena_bytes``, ``pinned_bytes`` and more."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop, give every job up, free device and arena. Can be repeated."""
        raise NotImplementedError

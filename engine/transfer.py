"""The transfer engine: carries out jobs on a device and reports each of them.

A job is submitted once and reported once with ``settled=True``; one that misses its deadline is
reported before that with ``settled=False``. In between it is queued (a deferred store) or
launched. The engine makes these edges of order, and no others:

- a store waits for everything queued for compute when it is launched;
- a load waits for everything queued for compute at the last ``mark_loads``;
- a flush holds compute until the named jobs are done.

What the device raises ends up in reports, never in the caller. After too many failures in a row
the engine turns itself off: every job is then reported as failed at once, and the model goes on
without offloading. One thread calls all methods.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from .arena import Arena
from .devices.base import Device, Lane, Mark, Piece, Ticket
from .errors import EngineClosed, IntegrityError, TransferError, TransferTimeout
from .health import Health
from .holds import HoldTimes
from .layout import Layout
from .measure import measured_table, situation_of
from .messages import JobOrder, JobReport
from .options import TransferOptions
from .pieces import bytes_of, pieces_of
from .ranges import Stretch, span
from .running import RunningJob, error_text, tell_ends, told_of
from .strategy import Chooser, Strategy
from .types import Direction, GroupId, JobId, Rank

__all__ = ["TransferEngine", "TransferOptions"]

logger = logging.getLogger(__name__)

GIVEN_UP_GRACE_S = 1.0
"""How long a flush lets the host wait for a job that is past its deadline and was cancelled."""

DRAIN_LOOK_S = 0.05
CLOSE_TIMEOUT_S = 10.0


class TransferEngine:
    """See the module docstring."""

    def __init__(
        self,
        device: Device,
        layout: Layout,
        arena: Arena,
        rank: Rank,
        options: TransferOptions = TransferOptions(),  # noqa: B008
        *,
        clock: Callable[[], float] = time.monotonic,
        chooser: Chooser | None = None,
    ) -> None:
        """Owns ``device`` and ``arena`` from here on: ``close`` closes both.

        Raises ValueError when the arena does not fit the layout or the integrity asked for.
        """
        if arena.slot_stride_bytes < layout.slot_stride_bytes:
            raise ValueError(
                f"slots of {arena.slot_stride_bytes} bytes; allowed: {layout.slot_stride_bytes} up"
            )
        checksums = 0 if options.integrity == "off" else layout.checksum_stride_bytes
        if arena.checksum_stride_bytes < checksums:
            raise ValueError(
                f"{arena.checksum_stride_bytes} bytes of checksums a slot with integrity "
                f"{options.integrity}; allowed: {checksums} up"
            )
        self._device = device
        self._layout = layout
        self._arena = arena
        self._rank = rank
        self._options = options
        self._clock = clock
        self._jobs: dict[JobId, RunningJob] = {}
        self._reports: list[JobReport] = []
        self._store_bytes = 0
        self._load_mark: Mark | None = None
        self._health = Health(options.max_failures)
        self._holds = HoldTimes()
        self._closed = False
        self._step = Stretch("step")
        device.attach(layout, arena)
        self._chooser = chooser or self._measured_chooser()

    def begin_step(self) -> None:
        """A step begins: stores deferred in the step before are launched; ``mark_loads``."""
        self._check_open()
        self._step.begin()
        self.mark_loads()
        self._launch([job for job in self._jobs.values() if not job.launched])

    def mark_loads(self) -> None:
        """Loads submitted from now on wait for everything queued for compute by now.

        vLLM zeroes fresh blocks after ``handle_preemptions`` and before it binds the step's
        metadata: call it again where the metadata is bound, or a load may be zeroed away.
        """
        self._check_open()
        self._load_mark = self._mark()

    def submit(self, order: JobOrder, *, deferred: bool = False, expedited: bool = False) -> None:
        """Take a job. ``deferred``: a store, launched in the next ``begin_step`` or by a flush.

        ``expedited``: a load that does not queue behind others. Raises ValueError for ids that the
        layout or the arena do not have, a job that is known already, or a flag that does not go
        with the direction; ``EngineClosed`` after ``close``; never for the device.
        """
        self._check_open()
        store = order.direction is Direction.STORE
        if order.job_id in self._jobs or (deferred and not store) or (expedited and store):
            raise ValueError(
                f"job {order.job_id} ({order.direction}, {deferred=}, {expedited=}, known: "
                f"{order.job_id in self._jobs}); allowed: a new id, deferred stores, expedited "
                "loads"
            )
        options = self._options
        about = {"job": order.job_id, "direction": order.direction}
        with span("plan", **about, bytes=lambda: bytes_of(order, self._layout)):
            pieces = pieces_of(
                order, self._layout, self._arena.num_slots, options.slice_bytes, options.integrity
            )
        num_bytes = sum(piece.num_bytes for piece in pieces)
        lane = Lane.STORES if store else Lane.EXPEDITED if expedited else Lane.LOADS
        deadline_s = self._clock() + options.deadline_s
        job = RunningJob(order, lane, pieces, deadline_s, num_bytes)
        if self._refuse(job):
            return
        self._jobs[order.job_id] = job
        if store:
            self._store_bytes += num_bytes
        if not deferred:
            self._launch([job])

    def flush(self, job_ids: Iterable[JobId]) -> None:
        """Nothing queued for compute afterwards runs before these jobs are done.

        Deferred ones are launched first. Ids that are unknown or finished are fine. A job that was
        given up may still write, so compute is held for it too: for as long as it takes on a
        stream, for a moment where the host has to wait.
        """
        self._check_open()
        self._holds.add_all(self._device.take_hold_times_s())  # else they pile up at the device
        jobs = [self._jobs[job_id] for job_id in job_ids if job_id in self._jobs]
        self._launch([job for job in jobs if not job.launched])
        tickets = [ticket for job in jobs for ticket in job.waiting()]
        if not tickets:
            return
        left_s = max(job.deadline_s for job in jobs) - self._clock()
        timeout_s = max(left_s, GIVEN_UP_GRACE_S)
        with span("flush", **told_of(jobs)):
            try:
                held = self._device.hold_compute(tickets, timeout_s)
            except Exception as error:
                self._health.count_failure(error)
                held = self._wait(tickets, timeout_s)
        if not held:
            for job in jobs:
                if not job.over() and not job.given_up:
                    self._give_up(job)

    def poll(self) -> list[JobReport]:
        """The reports that have become due; never waits."""
        now = self._clock()
        for job in list(self._jobs.values()):
            job.notice_errors()
            if job.over():
                self._finish(job)
            elif now >= job.deadline_s and not job.given_up:
                self._give_up(job)
        reports, self._reports = self._reports, []
        tell_ends(reports)
        self._step.end()
        return reports

    def wait_for_one(self, timeout_s: float) -> None:
        """Let the host wait, at most this long, for the oldest job that was not given up."""
        job = next((job for job in self._jobs.values() if not job.given_up), None)
        if job is not None:
            self._wait(job.waiting(), timeout_s)

    def drain(self, timeout_s: float) -> list[JobReport]:
        """Launch what is deferred and wait, at most this long, until no job is left."""
        self._check_open()
        self._launch([job for job in self._jobs.values() if not job.launched])
        reports = self.poll()
        deadline = time.monotonic() + timeout_s
        while self._jobs and (left := deadline - time.monotonic()) > 0:
            waiting = [ticket for job in self._jobs.values() for ticket in job.waiting()]
            self._wait(waiting, min(left, DRAIN_LOOK_S))
            reports += self.poll()
        return reports

    def strategy_for(self, group: GroupId, direction: Direction, num_blocks: int) -> Strategy:
        """How a piece of ``num_blocks`` blocks would be moved now."""
        situation = situation_of(self._layout.group(group), direction, num_blocks, self._busy())
        return self._chooser.choose(situation)

    def snapshot(self) -> dict[str, int | float]:
        """Live state: ``jobs`` in flight, ``queued`` of them, and counters since the start."""
        self._holds.add_all(self._device.take_hold_times_s())
        return {
            "jobs": len(self._jobs),
            "queued": sum(not job.launched for job in self._jobs.values()),
            "given_up": sum(job.given_up for job in self._jobs.values()),
            "store_bytes_in_flight": self._store_bytes,
            "arena_bytes": 0 if self._closed else self._arena.num_bytes,
            "pinned_bytes": self._arena.pinned_bytes,
            **self._health.snapshot(),
            **self._holds.snapshot(),
        }

    def close(self) -> None:
        """Give every job up, free device and arena. Can be repeated.

        The jobs that were left are reported, failed and settled, by the next ``poll``. Memory that
        the device does not let go of stays mapped until the process ends.
        """
        if self._closed:
            return
        self._closed = True
        for job in self._jobs.values():
            job.fail(EngineClosed("the engine was closed"))
        self._holds.add_all(self._device.take_hold_times_s())
        try:
            stopped = self._device.close(CLOSE_TIMEOUT_S)
        except Exception as error:
            logger.warning("closing the device failed: %s", error, exc_info=error)
            stopped = False
        for job in list(self._jobs.values()):
            job.launched = True
            job.tickets = [ticket for ticket in job.tickets if ticket.done()]
            self._finish(job)
        if stopped:
            self._arena.close()
        else:
            self._arena.abandon()

    def __enter__(self) -> "TransferEngine":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"TransferEngine({self.snapshot()})"

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("the transfer engine is closed")

    def _mark(self) -> Mark | None:
        """A mark of compute; None, and a failure counted, when the device has none to give."""
        try:
            return self._device.mark_compute()
        except Exception as error:
            self._health.count_failure(error)
            return None

    def _wait(self, tickets: Sequence[Ticket], timeout_s: float) -> bool:
        """Let the host wait; False when the time was up, or when the device cannot say."""
        try:
            return self._device.wait(tickets, timeout_s)
        except Exception as error:
            self._health.count_failure(error)
            return False

    def _busy(self) -> bool:
        """Whether compute still works on what it had at the last mark."""
        try:
            return self._load_mark is not None and not self._load_mark.done()
        except Exception as error:
            self._health.count_failure(error)
            return True

    def _refuse(self, job: RunningJob) -> bool:
        """Report a job as failed at once when it cannot be taken now; True when so."""
        if self._health.off:
            job.error = TransferError("offloading is off after repeated failures")
            self._health.failed_jobs += 1
        elif (
            job.direction is Direction.STORE
            and self._store_bytes + job.num_bytes > self._options.max_store_bytes
        ):
            job.error = TransferError(
                f"skipped: {job.num_bytes} bytes to store with {self._store_bytes} in flight, "
                f"bound {self._options.max_store_bytes}"
            )
            self._health.skipped_jobs += 1
        if job.error is None:
            return False
        self._reports.append(replace(job.report(self._rank), off=self._health.off))
        return True

    def _launch(self, jobs: Sequence[RunningJob]) -> None:
        """Launch jobs behind the marks that they need."""
        if not jobs:
            return
        now: Mark | None = None
        if self._load_mark is None or any(job.direction is Direction.STORE for job in jobs):
            now = self._mark()
        for job in jobs:
            mark = now
            if job.direction is Direction.LOAD and self._load_mark is not None:
                mark = self._load_mark
            if mark is None:
                job.launched = True
                job.fail(TransferError("the device has no mark of compute to wait for"))
                continue
            job.launch(self._device, (mark,), [self._strategy(job, one) for one in job.pieces])

    def _strategy(self, job: RunningJob, piece: Piece) -> Strategy:
        return self.strategy_for(piece.group, job.direction, len(piece.blocks))

    def _measured_chooser(self) -> Chooser:
        """What was measured here, before or now, where that is asked for."""
        candidates = {way: self._device.strategies(way) for way in Direction}
        budget_s = self._options.measure_s
        if budget_s <= 0:
            return Chooser(candidates)
        table = measured_table(
            self._device,
            self._layout,
            self._arena,
            budget_s,
            checked=self._options.integrity == "full",
        )
        return Chooser.of(candidates, table)

    def _give_up(self, job: RunningJob) -> None:
        """A job missed its deadline: say so now, and again when the device has let go of it."""
        error = TransferTimeout(
            f"job {job.job_id} was not complete within {self._options.deadline_s} s"
        )
        self._health.count_failure(error)
        launched, job.launched = job.launched, True
        job.fail(error)
        job.given_up = launched and not job.over()
        if not job.given_up:
            self._finish(job)
            return
        report = JobReport(
            job.job_id, self._rank, job.direction, error=error_text(error), settled=False
        )
        self._health.failed_jobs += 1
        self._reports.append(report)

    def _finish(self, job: RunningJob) -> None:
        """A job is over: report it and forget it."""
        del self._jobs[job.job_id]
        if job.direction is Direction.STORE:
            self._store_bytes -= job.num_bytes
        report = job.report(self._rank)
        self._reports.append(report)
        health = self._health
        if job.error is None:
            health.count_success()
            health.stored_bytes += report.num_bytes if job.direction is Direction.STORE else 0
            health.loaded_bytes += report.num_bytes if job.direction is Direction.LOAD else 0
            return
        health.failed_jobs += 0 if job.given_up else 1
        if corrupt := job.corrupt_slots():
            health.corrupt_chunks += len(corrupt)
            places = job.places_of_corrupt()
            logger.error(
                "job %d: checksums differ in %d chunks: %s", job.job_id, len(corrupt), places
            )
        if not isinstance(job.error, IntegrityError | TransferTimeout | EngineClosed):
            health.count_failure(job.error)

"""The transfer engine on the CPU device: bytes, order, failures, deadlines, bounds, closing."""

import logging
import threading

import numpy as np
import pytest
from cache_shapes import ORDERS
from kvferry.engine.devices.cpu import CpuDevice
from kvferry.engine.messages import JobReport
from kvferry.engine.types import NO_BLOCK, Direction, JobId
from worker_rig import WAIT_S, Clock, HeldDevice, Rig


def one(reports: list[JobReport]) -> JobReport:
    assert len(reports) == 1
    return reports[0]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("blocks_per_chunk", [1, 3])
def test_what_is_loaded_is_what_was_stored(order: str, blocks_per_chunk: int) -> None:
    with Rig(CpuDevice(2), order=order, blocks_per_chunk=blocks_per_chunk) as rig:
        count = 4 * blocks_per_chunk
        blocks, targets = list(range(count)), list(range(15, 15 - count, -1))
        for block in blocks:
            rig.fill(block, block)
        before = [rig.read(block) for block in blocks]
        rig.store(1, blocks, [5, 0, 7, 2])
        stored = one(rig.engine.drain(WAIT_S))
        assert stored.error is None
        assert stored.settled
        assert stored.num_bytes == count * rig.layout.groups[0].block_bytes
        for cache in rig.caches:
            cache.fill_(255)
        rig.load(2, targets, [5, 0, 7, 2])
        loaded = one(rig.engine.drain(WAIT_S))
        assert (loaded.job_id, loaded.direction, loaded.error) == (2, Direction.LOAD, None)
        for block, wanted in zip(targets, before, strict=True):
            assert np.array_equal(rig.read(block), wanted)
        untouched = set(range(16)) - set(targets)
        assert all((rig.read(block) == 255).all() for block in untouched)
        counts = rig.engine.snapshot()
        assert counts["stored_bytes"] == counts["loaded_bytes"] == stored.num_bytes
        assert counts["jobs"] == counts["queued"] == counts["failed_jobs"] == 0


def test_a_partial_chunk_leaves_the_rest_of_its_slot_alone() -> None:
    with Rig(blocks_per_chunk=3) as rig:
        rig.arena.slots.fill_(7)
        rig.fill(4, 1)
        rig.store(1, [NO_BLOCK, 4, NO_BLOCK], [2])
        assert one(rig.engine.drain(WAIT_S)).num_bytes == rig.layout.groups[0].block_bytes
        size, stride = rig.layout.groups[0].block_bytes, rig.arena.slot_stride_bytes
        slot = rig.arena.slots[2 * stride : 3 * stride]
        assert (slot[:size] == 7).all()
        assert (slot[2 * size :] == 7).all()
        assert not (slot[size : 2 * size] == 7).all()


def test_submit_returns_before_the_transfer_is_done() -> None:
    device = HeldDevice()
    device.hold(JobId(1))
    with Rig(device) as rig:
        rig.store(1, [0], [0])
        assert device.started.wait(WAIT_S)
        assert rig.engine.poll() == []
        assert rig.engine.snapshot()["jobs"] == 1
        device.release(JobId(1))
        assert one(rig.engine.drain(WAIT_S)).error is None


def test_a_job_without_blocks_is_done() -> None:
    with Rig() as rig:
        rig.store(1, [NO_BLOCK], [0])
        report = one(rig.engine.drain(WAIT_S))
        assert (report.error, report.num_bytes) == (None, 0)


def test_a_large_job_goes_in_slices() -> None:
    with Rig(slice_bytes=1) as rig:
        for block in range(8):
            rig.fill(block, block)
        rig.store(1, list(range(8)), list(range(8)))
        assert one(rig.engine.drain(WAIT_S)).error is None
        assert rig.device.moved == [JobId(1)] * 8


def test_deferred_stores_wait_for_the_next_step() -> None:
    with Rig() as rig:
        rig.fill(0, 1)
        rig.store(1, [0], [0], deferred=True)
        assert rig.engine.snapshot()["queued"] == 1
        rig.fill(0, 2)
        wanted = rig.read(0)
        rig.engine.begin_step()
        assert one(rig.engine.drain(WAIT_S)).error is None
        rig.load(2, [1], [0])
        rig.engine.drain(WAIT_S)
        assert np.array_equal(rig.read(1), wanted)


def test_flush_waits_until_the_blocks_are_read() -> None:
    """S4: blocks given to another request while their store is in flight."""
    device = HeldDevice()
    device.hold(JobId(1))
    with Rig(device) as rig:
        rig.fill(0, 1)
        wanted = rig.read(0)
        rig.store(1, [0], [0])
        assert device.started.wait(WAIT_S)
        flushed = threading.Event()

        def flush() -> None:
            rig.engine.flush([JobId(1), JobId(99)])
            flushed.set()

        thread = threading.Thread(target=flush)
        thread.start()
        assert not flushed.is_set()
        device.release(JobId(1))
        thread.join(WAIT_S)
        assert flushed.is_set()
        rig.fill(0, 2)
        assert one(rig.engine.poll()).error is None
        rig.load(2, [1], [0])
        rig.engine.drain(WAIT_S)
        assert np.array_equal(rig.read(1), wanted)
        assert rig.engine.snapshot()["flushes"] == 1
        assert rig.engine.snapshot()["flush_p99_s"] > 0


def test_flush_launches_what_is_deferred_and_forgives_the_unknown() -> None:
    with Rig() as rig:
        rig.store(1, [0], [0], deferred=True)
        rig.engine.flush([JobId(1)])
        assert one(rig.engine.poll()).error is None
        rig.engine.flush([JobId(1), JobId(2)])
        assert rig.engine.poll() == []


def test_a_flushed_store_overtakes_loads() -> None:
    device = HeldDevice(num_threads=1)
    device.hold(JobId(1))
    with Rig(device) as rig:
        rig.load(1, [0], [0])
        assert device.started.wait(WAIT_S)
        rig.load(2, [1], [1])
        rig.store(3, [2], [2])
        opener = threading.Thread(target=device.release, args=(JobId(1),))
        original = device.wait

        def wait(tickets, timeout_s):  # the gate opens only once the flush is waiting
            opener.start()
            return original(tickets, timeout_s)

        device.wait = wait
        rig.engine.flush([JobId(3)])
        opener.join(WAIT_S)
        device.wait = original
        rig.engine.drain(WAIT_S)
        assert device.moved == [1, 3, 2]


def test_lanes_go_in_order_of_urgency() -> None:
    device = HeldDevice(num_threads=1)
    device.hold(JobId(1))
    with Rig(device) as rig:
        rig.store(1, [0], [0])
        assert device.started.wait(WAIT_S)
        rig.store(2, [1], [1])
        rig.load(3, [2], [2])
        rig.load(4, [3], [3], expedited=True)
        device.release(JobId(1))
        assert len(rig.engine.drain(WAIT_S)) == 4
        assert device.moved == [1, 4, 3, 2]


def test_a_failed_transfer_becomes_a_report_and_the_engine_goes_on() -> None:
    """S20, the worker's part."""
    device = HeldDevice()
    device.failing = {JobId(1), JobId(2)}
    with Rig(device) as rig:
        rig.store(1, [0], [0])
        rig.load(2, [1], [1])
        reports = sorted(rig.engine.drain(WAIT_S), key=lambda report: report.job_id)
        assert [report.error for report in reports] == [
            "TransferError: OSError: the device says no"
        ] * 2
        assert all(report.settled and report.num_bytes == 0 for report in reports)
        rig.store(3, [2], [2])
        assert one(rig.engine.drain(WAIT_S)).error is None
        assert rig.engine.snapshot()["failed_jobs"] == 2


def test_a_device_that_refuses_a_launch_fails_the_job() -> None:
    device = HeldDevice()
    with Rig(device) as rig:

        def launch(*arguments: object) -> None:
            raise RuntimeError("no room")

        device.launch = launch
        rig.store(1, [0], [0])
        assert one(rig.engine.drain(WAIT_S)).error == "TransferError: RuntimeError: no room"


def test_a_device_that_breaks_down_raises_nothing_into_the_step() -> None:
    class Broken(HeldDevice):
        broken = False

        def mark_compute(self):
            if self.broken:
                raise RuntimeError("no mark")
            return super().mark_compute()

        def hold_compute(self, tickets, timeout_s):
            raise RuntimeError("no hold")

        def wait(self, tickets, timeout_s):
            if self.broken:
                raise RuntimeError("no wait")
            return super().wait(tickets, timeout_s)

    device = Broken()
    device.hold(JobId(1), JobId(2))
    with Rig(device) as rig:
        rig.store(1, [0], [0])
        opener = threading.Thread(target=device.release, args=(JobId(1),))
        opener.start()
        rig.engine.flush([JobId(1)])  # no hold: the host waits
        opener.join(WAIT_S)
        assert one(rig.engine.poll()).error is None
        rig.store(2, [1], [1])
        device.broken = True
        rig.engine.flush([JobId(2)])  # nor a wait: the job is given up
        assert not one(rig.engine.poll()).settled
        rig.engine.begin_step()
        rig.store(3, [2], [2])
        assert "no mark of compute" in (one(rig.engine.poll()).error or "")
        device.broken = False
        device.open_all()


def test_repeated_failures_turn_offloading_off(caplog: pytest.LogCaptureFixture) -> None:
    device = HeldDevice()
    device.failing = {JobId(job) for job in range(10)}
    with Rig(device, max_failures=3) as rig, caplog.at_level(logging.WARNING):
        for job in range(3):
            rig.store(job, [0], [0])
            rig.engine.drain(WAIT_S)
        assert rig.engine.snapshot()["off"] == 1
        rig.load(50, [0], [0])
        refused = one(rig.engine.poll())
        assert "off" in (refused.error or "")
        assert refused.off  # so that the scheduler stops planning
        assert sum("offloading is off" in line for line in caplog.messages) == 1


def test_a_success_in_between_keeps_offloading_on() -> None:
    device = HeldDevice()
    device.failing = {JobId(job) for job in range(0, 20, 2)}
    with Rig(device, max_failures=2) as rig:
        for job in range(20):
            rig.store(job, [0], [0])
            rig.engine.drain(WAIT_S)
        assert rig.engine.snapshot()["off"] == 0


def test_a_hung_transfer_ends_by_its_deadline_and_settles_later() -> None:
    """S26."""
    device, clock = HeldDevice(), Clock()
    device.hold(JobId(1))
    with Rig(device, clock=clock, deadline_s=5.0) as rig:
        rig.load(1, [0], [0])
        assert device.started.wait(WAIT_S)
        clock.now_s = 4.9
        assert rig.engine.poll() == []
        clock.now_s = 5.0
        first = one(rig.engine.poll())
        assert first.error is not None
        assert first.error.startswith("TransferTimeout")
        assert not first.settled
        assert rig.engine.poll() == []
        assert rig.engine.snapshot()["given_up"] == 1
        device.release(JobId(1))
        second = one(rig.engine.drain(WAIT_S))
        assert second.error == first.error
        assert second.settled
        counts = rig.engine.snapshot()
        assert (counts["jobs"], counts["failed_jobs"], counts["given_up"]) == (0, 1, 0)


def test_a_flush_gives_a_hung_store_up_at_its_deadline() -> None:
    device = HeldDevice()
    device.hold(JobId(1))
    with Rig(device, deadline_s=0.05) as rig:
        rig.store(1, [0], [0])
        rig.engine.flush([JobId(1)])
        report = one(rig.engine.poll())
        assert (report.job_id, report.settled) == (1, False)


def test_a_deferred_store_whose_step_never_comes_ends_too() -> None:
    clock = Clock()
    with Rig(clock=clock, deadline_s=5.0) as rig:
        rig.store(1, [0], [0], deferred=True)
        clock.now_s = 6.0
        report = one(rig.engine.poll())
        assert report.settled
        assert report.error is not None
        assert rig.engine.snapshot()["store_bytes_in_flight"] == 0


def test_stores_beyond_the_bound_are_skipped_and_counted() -> None:
    """S27."""
    device = HeldDevice()
    jobs = [JobId(job) for job in range(1000)]
    device.hold(*jobs)
    with Rig(device) as probe:
        block_bytes = probe.layout.groups[0].block_bytes
    device = HeldDevice()
    device.hold(*jobs)
    with Rig(device, max_store_bytes=10 * block_bytes, num_slots=16) as rig:
        for job in jobs:
            rig.store(job, [job % 16], [job % 16])
            assert rig.engine.snapshot()["store_bytes_in_flight"] <= 10 * block_bytes
        skipped = rig.engine.poll()
        assert len(skipped) == 990
        assert all("skipped" in (report.error or "") for report in skipped)
        rig.load(5000, [0], [0])  # loads are not bounded
        device.open_all()
        assert len(rig.engine.drain(WAIT_S)) == 11
        counts = rig.engine.snapshot()
        assert (counts["skipped_jobs"], counts["failed_jobs"], counts["off"]) == (990, 0, 0)
        assert counts["store_bytes_in_flight"] == 0


@pytest.mark.parametrize(
    ("blocks", "slots", "message"),
    [
        ([16], [0], "block ids from 16"),
        ([-2], [0], "block ids from -2"),
        ([0], [8], "slot ids from 8"),
        ([0, 1], [3, 3], "a slot of group 0 is written twice"),
    ],
)
def test_bad_orders_are_refused(blocks: list[int], slots: list[int], message: str) -> None:
    with Rig() as rig:
        with pytest.raises(ValueError, match=message):
            rig.store(1, blocks, slots)
        assert rig.engine.drain(WAIT_S) == []


def test_a_block_loaded_twice_is_refused() -> None:
    with Rig() as rig, pytest.raises(ValueError, match="a block of group 0 is written twice"):
        rig.load(1, [3, 3], [0, 1])


def test_flags_and_ids_must_make_sense() -> None:
    with Rig() as rig:
        with pytest.raises(ValueError, match="deferred=True"):
            rig.load(1, [0], [0], deferred=True)
        with pytest.raises(ValueError, match="expedited=True"):
            rig.store(1, [0], [0], expedited=True)
        rig.store(1, [0], [0])
        with pytest.raises(ValueError, match="known: True"):
            rig.store(1, [1], [1])
        rig.engine.drain(WAIT_S)

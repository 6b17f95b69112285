"""Closing the transfer engine: everything is reported, joined and freed, or kept on purpose."""

import threading

import pytest
from kvferry.engine.errors import EngineClosed
from kvferry.engine.types import JobId
from worker_rig import WAIT_S, HeldDevice, Rig


def test_close_reports_what_was_left_and_can_be_repeated() -> None:
    threads = threading.active_count()
    device = HeldDevice()
    device.hold(JobId(1))
    rig = Rig(device)
    rig.store(1, [0], [0])
    assert device.started.wait(WAIT_S)
    rig.store(2, [1], [1], deferred=True)
    opener = threading.Thread(target=device.open_all)
    opener.start()
    rig.engine.close()
    rig.engine.close()
    opener.join(WAIT_S)
    reports = {report.job_id: report for report in rig.engine.poll()}
    assert set(reports) == {1, 2}
    assert all(report.settled for report in reports.values())
    assert reports[JobId(2)].error == "TransferError: EngineClosed: the engine was closed"
    assert threading.active_count() == threads
    assert rig.engine.snapshot()["arena_bytes"] == 0
    with pytest.raises(EngineClosed):
        rig.store(3, [0], [0])
    with pytest.raises(EngineClosed):
        rig.engine.begin_step()


def test_memory_that_a_device_does_not_let_go_of_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.engine.transfer.CLOSE_TIMEOUT_S", 0.0)
    device = HeldDevice()
    device.hold(JobId(1))
    rig = Rig(device)
    rig.load(1, [0], [0])
    assert device.started.wait(WAIT_S)
    rig.engine.close()
    assert [report.settled for report in rig.engine.poll()] == [True]
    rig.arena.slots.fill_(1)  # still mapped: the hung move may touch it
    device.open_all()
    assert device.close(WAIT_S)

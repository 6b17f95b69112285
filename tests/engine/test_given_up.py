"""Jobs that missed their deadline: a flush holds compute for them until the device lets go."""

import pytest
from kvferry.engine.devices.simulated_worker import Step
from kvferry.engine.strategy import Method
from kvferry.engine.transfer import TransferOptions
from kvferry.engine.types import JobId
from simulator_rig import StepHooks
from worker_rig import WAIT_S, Clock, HeldDevice, Rig

METHODS = [Method.ZERO_COPY, Method.PACKED, Method.COPY_ENGINE]


def given_up_load(make_rig, method):
    """A rig whose load of slot 0 into blocks 2 and 3 is late and still on the device; its gate."""
    options = TransferOptions(integrity="off", deadline_s=0.05)
    rig = make_rig(method=method, options=options)
    rig.fill([0, 1], [7, 8])
    rig.store(1, [0, 1], [0])
    assert rig.finish() == {1: None}
    gate = rig.simulation.hold_when(lambda operation: operation.name.endswith("load 2"))
    rig.load(2, [2, 3], [0])
    for _ in range(60):
        rig.simulation.wait(rig.simulation.queue("other", "time passes", action=lambda: None))
    assert [(report.job_id, report.settled) for report in rig.poll()] == [(2, False)]
    return rig, gate


@pytest.mark.parametrize("method", METHODS)
def test_on_a_stream_compute_waits_until_a_late_load_has_let_go(make_rig, method):
    rig, gate = given_up_load(make_rig, method)
    rig.flush(2)
    forward = rig.simulation.queue(
        "compute",
        "compute again",
        writes=rig.cache.ranges([2, 3]),
        action=lambda: rig.fill([2, 3], [50, 51]),
    )
    for _ in range(20):
        assert not rig.simulation.look(forward)
    assert rig.poll() == [], "it is given up once"
    gate.open()
    rig.simulation.wait(forward)
    rig.simulation.check()
    assert rig.values([2, 3]) == [50, 51], "the late bytes came first"
    assert "TransferTimeout" in rig.finish()[2]


@pytest.mark.parametrize("method", METHODS)
def test_without_the_flush_the_late_load_races(make_rig, method):
    rig, gate = given_up_load(make_rig, method)
    rig.worker.run(Step(written={2: 50}), StepHooks(rig))
    assert any(race.first.name.endswith("load 2") for race in rig.simulation.races)
    rig.simulation.races.clear()
    gate.open()
    rig.finish()


class Waits(HeldDevice):
    """Notes how long callers would wait for what; ``at_once``: no such wait succeeds."""

    def __init__(self) -> None:
        self.timeouts_s: list[float] = []
        self.at_once = True
        super().__init__()

    def wait(self, tickets, timeout_s):
        self.timeouts_s.append(timeout_s)
        return super().wait(tickets, 0.0 if self.at_once else timeout_s)


def test_on_the_cpu_the_host_waits_a_moment_for_a_late_job() -> None:
    device, clock = Waits(), Clock()
    device.hold(JobId(1))
    with Rig(device, clock=clock, deadline_s=5.0) as rig:
        rig.load(1, [0], [0])
        assert device.started.wait(WAIT_S)
        clock.now_s = 100.0
        (late,) = rig.engine.poll()
        assert not late.settled
        rig.engine.flush([JobId(1)])
        assert device.timeouts_s == [1.0], "GIVEN_UP_GRACE_S, not for ever"
        assert rig.engine.poll() == [], "it is given up once"
        assert rig.engine.snapshot()["failed_jobs"] == 1
        device.at_once = False
        device.open_all()
        rig.engine.flush([JobId(1)])
        (settled,) = rig.engine.poll()
        assert (settled.settled, settled.error) == (True, late.error)


def test_on_the_cpu_a_flush_of_a_late_job_returns_when_it_has_let_go() -> None:
    device, clock = Waits(), Clock()
    device.at_once = False
    device.hold(JobId(1))
    with Rig(device, clock=clock, deadline_s=5.0) as rig:
        rig.fill(0, 1)
        rig.store(1, [0], [0])
        assert device.started.wait(WAIT_S)
        clock.now_s = 100.0
        assert not rig.engine.poll()[0].settled
        original = device.hold_compute

        def hold_compute(tickets, timeout_s):
            device.open_all()  # only now, with the flush under way
            return original(tickets, timeout_s)

        device.hold_compute = hold_compute
        rig.engine.flush([JobId(1)])
        assert [report.settled for report in rig.engine.poll()] == [True]
        assert rig.engine.snapshot()["flushes"] == 1


def test_an_idle_step_waits_for_a_job_that_is_not_late() -> None:
    device, clock = Waits(), Clock()
    device.hold(JobId(1), JobId(2))
    with Rig(device, clock=clock, deadline_s=5.0) as rig:
        rig.engine.wait_for_one(3.0)
        assert device.timeouts_s == [], "nothing is in flight"
        rig.load(1, [0], [0])
        clock.now_s = 100.0
        rig.engine.poll()
        rig.engine.wait_for_one(3.0)
        assert device.timeouts_s == [], "the only one was given up"
        rig.load(2, [1], [1])
        rig.engine.wait_for_one(3.0)
        assert device.timeouts_s == [3.0]

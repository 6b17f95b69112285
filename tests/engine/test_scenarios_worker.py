"""The worker's side of the known faults (S1 ...), on the simulator beside the model's own steps.

Every test runs under seeds (an order each) and methods; wherever the outcome could depend on order,
the race detector must stay silent too.
"""

import itertools
import logging

import pytest
from kvferry.engine.devices.exploration import explore
from kvferry.engine.devices.simulated_worker import RunnerOrder, Step
from kvferry.engine.strategy import Method
from kvferry.engine.transfer import TransferOptions
from simulator_rig import StepHooks

METHODS = [Method.ZERO_COPY, Method.PACKED, Method.COPY_ENGINE]
ORDERS = list(RunnerOrder)

each_method = pytest.mark.parametrize("method", METHODS)
each_order = pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.name.lower())
seeds = pytest.mark.parametrize("seed", range(4))


def settle(rig, num_jobs):
    """Let everything run and be reported."""
    rig.worker.wait_for_output()
    errors = rig.finish()
    assert len(errors) == num_jobs
    rig.simulation.check()
    return errors


@seeds
@each_order
@each_method
@pytest.mark.parametrize("late_save", [True, False], ids=["late_save", "save"])
@pytest.mark.parametrize("deferred", [True, False], ids=["deferred", "at_once"])
def test_s1_a_store_takes_what_compute_wrote(make_rig, method, order, seed, deferred, late_save):
    rig = make_rig(seed, method=method, order=order)
    for turn in range(8):
        written = {0: 10 + turn, 1: 60 + turn}
        rig.worker.run(
            Step(written=written, late_save=late_save),
            StepHooks(rig, stores=[(turn, [0, 1], [turn])], deferred=deferred),
        )
        rig.worker.run(Step(read=[0, 1]), StepHooks(rig, flush=[turn]))
    errors = settle(rig, 8)
    assert set(errors.values()) == {None}
    for turn in range(8):
        found = [row.unique().tolist() for row in rig.slot(turn)]
        assert found == [[10 + turn], [60 + turn]]


def test_s1_a_hundred_and_fifty_times_in_a_row(make_rig):
    rig = make_rig(5, method=Method.PACKED, num_slots=150)
    for turn in range(150):
        rig.worker.run(
            Step(written={0: turn % 250, 1: turn % 249}),
            StepHooks(rig, stores=[(turn, [0, 1], [turn])], flush=[turn - 1]),
        )
        rig.worker.wait_for_output(lag=1)
    rig.worker.run(Step(forward=False), StepHooks(rig))
    errors = settle(rig, 150)
    assert set(errors.values()) == {None}
    found = [rig.slot(turn)[:, 0].tolist() for turn in range(150)]
    assert found == [[turn % 250, turn % 249] for turn in range(150)]


@seeds
@each_order
@each_method
@pytest.mark.parametrize("sync_loads", [False, True], ids=["async", "sync"])
def test_s2_a_load_leaves_its_block_to_earlier_readers(make_rig, method, order, seed, sync_loads):
    rig = make_rig(seed, method=method, order=order)
    rig.fill([0, 1, 4, 5], [10, 11, 20, 21])
    rig.store(0, [4, 5], [0])
    rig.finish()
    rig.worker.run(Step(read=[0, 1]), StepHooks(rig))
    # Blocks 0 and 1 are free now, and given to a request that loads into them.
    rig.worker.run(Step(sync_loads=sync_loads, read=[4]), StepHooks(rig, loads=[(1, [0, 1], [0])]))
    while 1 not in rig.errors():
        rig.worker.run(Step(forward=False), StepHooks(rig))
    rig.worker.run(Step(read=[0, 1]), StepHooks(rig))
    assert settle(rig, 2)[1] is None
    first, last = rig.worker.seen[0], rig.worker.seen[-1]
    assert [first[block].unique().tolist() for block in (0, 1)] == [[10], [11]]
    assert [last[block].unique().tolist() for block in (0, 1)] == [[20], [21]]


@seeds
@each_order
@each_method
def test_s3_zeroing_does_not_wipe_what_is_loaded(make_rig, method, order, seed):
    rig = make_rig(seed, method=method, order=order)
    rig.fill([4, 5], [20, 21])
    rig.store(0, [4, 5], [0])
    rig.finish()
    rig.worker.run(Step(zeroed=[0, 1], read=[4]), StepHooks(rig, loads=[(1, [0, 1], [0])]))
    settle(rig, 2)
    assert rig.values([0, 1]) == [20, 21]


def test_s3_a_mark_taken_before_the_zeroing_is_too_early(make_rig):
    """Why loads are marked where the metadata is bound: the first runner zeroes in between."""
    rig = make_rig(order=RunnerOrder.FIRST)
    rig.worker.run(
        Step(zeroed=[0, 1]), StepHooks(rig, loads=[(1, [0, 1], [0])], mark_in_bind=False)
    )
    (race,) = rig.simulation.races
    assert str(race.first) == "'zero of step 0' on compute"
    assert race.second.name == "load load 1"


@seeds
@each_method
def test_s4_a_preempted_requests_store_is_flushed_first(make_rig, method, seed):
    """4 blocks: A fills two, is preempted; B takes both before A's store is done."""
    rig = make_rig(seed, method=method, num_blocks=4, order=RunnerOrder.FIRST)
    gate = rig.simulation.hold_when(lambda operation: "store 1" in operation.name)
    rig.worker.run(Step(written={0: 10, 1: 11}), StepHooks(rig, stores=[(1, [0, 1], [0])]))
    rig.worker.run(Step(zeroed=[0, 1], written={0: 90, 1: 91}), StepHooks(rig, flush=[1]))
    gate.open()
    assert settle(rig, 1) == {1: None}
    rig.worker.run(Step(), StepHooks(rig, loads=[(2, [2, 3], [0])]))
    settle(rig, 2)
    assert rig.values([0, 1, 2, 3]) == [90, 91, 10, 11]


@each_method
def test_s4_in_every_order(make_rig, method):
    def program(simulation):
        rig = make_rig(simulation=simulation, method=method, num_blocks=4)
        rig.worker.run(Step(written={0: 10, 1: 11}), StepHooks(rig, stores=[(1, [0, 1], [0])]))
        rig.worker.run(Step(zeroed=[0, 1], written={0: 90, 1: 91}), StepHooks(rig, flush=[1]))
        simulation.run_all()

        def check():
            assert rig.slot(0)[:, 0].tolist() == [10, 11]
            assert rig.values([0, 1]) == [90, 91]

        return check

    found = explore(program)
    assert not found.races
    assert found.num_orders > 1


@each_method
def test_s4_the_second_runner_zeroes_before_it_lets_us_flush(make_rig, method):
    """A hole in that runner's order of calls; the next test has the way around it."""
    rig = make_rig(method=method, num_blocks=4, order=RunnerOrder.SECOND)
    hooks = StepHooks(rig, stores=[(1, [0, 1], [0])], deferred=False)
    rig.worker.run(Step(written={0: 10, 1: 11}), hooks)
    rig.worker.run(Step(zeroed=[0, 1], written={0: 90, 1: 91}), StepHooks(rig, flush=[1]))
    assert {race.second.name for race in rig.simulation.races} == {"zero of step 1"}


@seeds
@each_method
def test_s4_under_the_second_runner_a_deferred_store_reads_zeros(make_rig, method, seed):
    """No race to report here: it is in order, after the zeroing."""
    rig = make_rig(seed, method=method, num_blocks=4, order=RunnerOrder.SECOND)
    rig.worker.run(Step(written={0: 10, 1: 11}), StepHooks(rig, stores=[(1, [0, 1], [0])]))
    rig.worker.run(Step(zeroed=[0, 1]), StepHooks(rig, flush=[1]))
    assert settle(rig, 1) == {1: None}
    assert rig.slot(0).unique().tolist() == [0]


@seeds
@each_method
def test_s4_flushing_at_the_end_of_the_step_closes_that_hole(make_rig, method, seed):
    rig = make_rig(seed, method=method, num_blocks=4, order=RunnerOrder.SECOND)

    class FlushAtOnce(StepHooks):
        def wait_for_save(self):
            super().wait_for_save()
            self.rig.flush(*(store[0] for store in self.stores))

    hooks = FlushAtOnce(rig, stores=[(1, [0, 1], [0])], deferred=False)
    rig.worker.run(Step(written={0: 10, 1: 11}), hooks)
    rig.worker.run(
        Step(zeroed=[0], copied=[(2, 1)], written={0: 90, 1: 91}), StepHooks(rig, flush=[1])
    )
    assert settle(rig, 1) == {1: None}
    assert rig.slot(0)[:, 0].tolist() == [10, 11]


@each_method
def test_s17_pinning_fails_and_transfers_go_on_pageable(make_rig, method, caplog):
    with caplog.at_level(logging.WARNING):
        rig = make_rig(method=method, pinned=False)
    assert [record.getMessage()[:29] for record in caplog.records] == [
        "pinning host memory failed at"
    ]
    assert rig.arena.pinned_bytes == 0
    rig.worker.run(Step(written={0: 10, 1: 11}), StepHooks(rig, stores=[(1, [0, 1], [3])]))
    rig.worker.run(Step(forward=False), StepHooks(rig, flush=[1]))
    assert settle(rig, 1) == {1: None}
    rig.worker.run(Step(), StepHooks(rig, loads=[(2, [4, 5], [3])]))
    assert settle(rig, 2) == {1: None, 2: None}
    assert rig.values([4, 5]) == [10, 11]


def test_s17_a_failed_registration_leaves_no_error_for_the_next_call(make_rig):
    rig = make_rig()
    rig.runtime.refuse_when(lambda name: name == "register", lambda: OSError("limit"), sticky=True)
    with pytest.raises(Exception, match="registering 4096 bytes"):
        rig.device.register(1 << 40, 4096)
    rig.store(1, [0, 1], [0])
    assert rig.finish() == {1: None}


@seeds
@each_method
@pytest.mark.parametrize("how", ["as_it_runs", "as_it_is_queued"])
def test_s20_a_failed_load_and_a_failed_store_are_reported_and_the_rest_goes_on(
    make_rig, method, how, seed
):
    rig = make_rig(seed, method=method)
    rig.fill(range(8), range(10, 18))
    rig.store(0, [0, 1], [0])
    rig.finish()
    for name in ("store 1", "load 2"):
        if how == "as_it_runs":
            rig.simulation.fail_when(
                lambda operation, name=name: name in operation.name, lambda: OSError("bus error")
            )
        else:
            rig.runtime.refuse_when(
                lambda call, name=name: name in call, lambda: OSError("bus error")
            )
    rig.worker.run(
        Step(read=[0]), StepHooks(rig, stores=[(1, [2, 3], [1])], loads=[(2, [8, 9], [0])])
    )
    rig.worker.run(Step(read=[0]), StepHooks(rig))
    rig.simulation.run_all()
    rig.poll()
    hooks = StepHooks(rig, stores=[(3, [4, 5], [2])], loads=[(4, [10, 11], [0])])
    rig.worker.run(Step(read=[0]), hooks)
    rig.worker.run(Step(), StepHooks(rig, flush=[1, 3]))
    errors = settle(rig, 5)
    assert {job for job, error in errors.items() if error} == {1, 2}
    assert all("bus error" in errors[job] for job in (1, 2))
    assert rig.values([10, 11]) == [10, 11]
    assert rig.slot(2)[:, 0].tolist() == [14, 15]


@seeds
def test_s20_an_error_seen_late_fails_everything_it_may_belong_to(make_rig, seed):
    """The look that learns of an error need not be at the piece that failed."""
    rig = make_rig(seed)
    rig.fill(range(8), range(10, 18))
    rig.simulation.fail_when(
        lambda operation: operation.name == "store store 1", lambda: OSError("bus error")
    )
    for job_id in range(4):
        rig.store(job_id, [2 * job_id, 2 * job_id + 1], [job_id])
    errors = settle(rig, 4)
    assert errors[1]
    for job_id in range(4):
        good = rig.slot(job_id)[:, 0].tolist() == [10 + 2 * job_id, 11 + 2 * job_id]
        assert good or errors[job_id]


@seeds
@each_method
def test_s21_every_third_store_fails_and_says_so(make_rig, method, seed):
    """What failed is reported as failed, so that the scheduler never offers it."""
    rig = make_rig(seed, method=method, num_slots=24)
    rig.fill(range(16), range(100, 116))
    count = itertools.count(1)
    rig.runtime.refuse_when(
        lambda name: name.startswith(("store", "pack", "copy store")) and next(count) % 3 == 0,
        lambda: OSError("link down"),
        times=10**6,
    )
    for turn in range(24):
        rig.worker.run(
            Step(read=[0]), StepHooks(rig, stores=[(turn, [turn % 16, 15 - turn % 16], [turn])])
        )
    rig.worker.run(Step(forward=False), StepHooks(rig))
    errors = settle(rig, 24)
    failed = {job for job, error in errors.items() if error}
    assert failed
    for turn in set(range(24)) - failed:
        assert rig.slot(turn)[:, 0].tolist() == [100 + turn % 16, 115 - turn % 16]


@each_method
@pytest.mark.parametrize("direction", ["store", "load"])
def test_s26_a_transfer_that_never_completes_ends_by_its_deadline(make_rig, method, direction):
    rig = make_rig(method=method, options=TransferOptions(integrity="full", deadline_s=0.2))
    rig.store(0, [4, 5], [7])
    rig.finish()
    gate = rig.simulation.hold_when(lambda operation: operation.name.endswith(f"{direction} 1"))
    if direction == "store":
        rig.store(1, [0, 1], [0])
    else:
        rig.load(1, [0, 1], [0])
    for _ in range(150):
        rig.worker.run(Step(read=[8]), StepHooks(rig))
        rig.worker.wait_for_output(lag=1)
        if len(rig.reports) > 1:
            break
    report = rig.reports[1]
    assert not report.settled
    assert "TransferTimeout" in report.error
    other = (2, [4, 5], [7])
    hooks = (
        StepHooks(rig, loads=[other]) if direction == "store" else StepHooks(rig, stores=[other])
    )
    rig.worker.run(Step(read=[8]), hooks)
    rig.worker.run(Step(read=[8]), StepHooks(rig))
    rig.worker.wait_for_output()
    for _ in range(100):
        rig.poll()
    assert rig.errors() == {0: None, 2: None}, "the other lane goes on"
    gate.open()
    errors = settle(rig, 3)
    assert "TransferTimeout" in errors[1]


def test_s27_stores_beyond_the_bound_are_skipped_and_counted(make_rig):
    block_bytes = 2 * 48
    bound = 10 * 2 * block_bytes
    options = TransferOptions(integrity="off", max_store_bytes=bound)
    rig = make_rig(options=options, num_slots=1000)
    gate = rig.simulation.hold_when(lambda operation: operation.stream.startswith("stores"))
    most = 0
    for turn in range(1000):
        rig.store(turn, [0, 1], [turn])
        most = max(most, rig.engine.snapshot()["store_bytes_in_flight"])
    assert most == bound
    rig.poll()
    assert len(rig.errors()) == 990
    assert all("skipped" in error for error in rig.errors().values())
    gate.open()
    errors = settle(rig, 1000)
    assert sum(error is None for error in errors.values()) == 10
    assert rig.engine.snapshot()["skipped_jobs"] == 990


@seeds
@each_order
def test_the_models_own_steps_have_no_race_among_themselves(make_rig, order, seed):
    rig = make_rig(seed, order=order)
    for turn in range(20):
        step = Step(zeroed=[turn % 16], copied=[(turn % 7, 8)], read=[1, 2], written={3: turn})
        rig.worker.run(step, StepHooks(rig))
        rig.worker.wait_for_output(lag=turn % 2)
    settle(rig, 0)

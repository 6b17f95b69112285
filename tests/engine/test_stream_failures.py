"""Calls of the runtime that fail at an unlucky moment: failed reports, nothing let go too early."""

import pytest
from kvferry.engine.devices.host_checks import HostChecks
from kvferry.engine.strategy import Method

METHODS = [Method.ZERO_COPY, Method.PACKED, Method.COPY_ENGINE]


@pytest.mark.parametrize("method", METHODS)
def test_flags_that_cannot_be_read_fail_the_load(make_rig, method):
    rig = make_rig(method=method)
    rig.store(1, [0, 1], [0])
    rig.finish()
    rig.runtime.refuse_when(lambda name: name == "read_host", lambda: OSError("no flags"))
    rig.load(2, [2, 3], [0])
    rig.finish()
    assert "no flags" in rig.errors()[2], "bytes that were not checked are not served"
    rig.load(3, [2, 3], [0])
    assert rig.finish()[3] is None


def test_checksums_that_cannot_be_written_fail_the_store(make_rig, monkeypatch):
    rig = make_rig(pinned=False)

    def write(*_):
        raise MemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(HostChecks, "write", write)
        rig.store(1, [0, 1], [0])
        rig.finish()
    assert "no room" in rig.errors()[1]
    rig.store(2, [0, 1], [0])
    assert rig.finish()[2] is None
    assert rig.device.num_taken <= 2, "the mark of the loads, and the one kept by a record"


@pytest.mark.parametrize("method", METHODS)
def test_a_piece_without_an_event_for_its_end_is_not_let_go_of(make_rig, method):
    """No event can be made after the copy was queued: it may still run, so the job is not over."""
    rig = make_rig(method=method)
    gate = rig.simulation.hold_when(lambda operation: operation.stream.startswith("stores"))
    queued = []

    def once_it_moves(name):
        queued.extend([name] if name.endswith("store 1") else [])
        return name == "create_event" and bool(queued)

    refusal = rig.runtime.refuse_when(once_it_moves, lambda: OSError("no event"), times=10**9)
    rig.store(1, [0, 1], [0])
    assert queued
    for _ in range(5):
        assert rig.poll() == []
    refusal.times = 0
    for _ in range(5):
        assert rig.poll() == [], "it is held back, and may still read its blocks"
    gate.open()
    assert "no event" in rig.finish()[1]
    rig.engine.begin_step()
    rig.store(2, [0, 1], [0])
    assert rig.finish()[2] is None


@pytest.mark.parametrize("call", ["create_event", "write_host", "allocate_pinned"])
def test_what_cannot_be_prepared_fails_and_leaves_nothing(make_rig, call):
    rig = make_rig(method=Method.PACKED)
    rig.engine.begin_step()
    taken = rig.device.num_taken
    rig.runtime.refuse_when(lambda name: name == call, lambda: OSError("no"), times=2)
    rig.load(1, [0, 1], [0])
    assert "OSError" in rig.finish()[1]
    assert rig.device.num_taken == taken


def test_closing_waits_for_what_can_end_beside_what_cannot(make_rig, caplog):
    """A piece whose end cannot be told does not make the others be taken for hung."""
    rig = make_rig(method=Method.COPY_ENGINE)
    queued = []

    def once_it_moves(name):
        queued.extend([name] if name.endswith("store 1") else [])
        return name == "record" and bool(queued)

    refusal = rig.runtime.refuse_when(once_it_moves, lambda: OSError("no"), times=10**9)
    rig.store(1, [0, 1], [0])
    refusal.times = 0
    rig.load(2, [2, 3], [1])
    rig.runtime.refuse_when(lambda name: name == "record", lambda: OSError("no"), times=10**9)
    rig.engine.close()
    assert {int(report.job_id) for report in rig.engine.poll()} == {1, 2}
    assert not [one for one in rig.simulation.unfinished() if one.name.endswith("load 2")]
    assert "1 transfers did not end" in caplog.text
    rig.simulation.run_all()

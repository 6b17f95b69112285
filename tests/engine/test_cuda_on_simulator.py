"""The CUDA device's own code on the simulator: bytes, order, integrity, failures, pools."""

import logging

import pytest
import torch
from kvferry.engine.devices.exploration import explore
from kvferry.engine.strategy import Method, Strategy
from kvferry.engine.transfer import TransferOptions
from kvferry.engine.types import Direction

METHODS = [Method.ZERO_COPY, Method.PACKED, Method.COPY_ENGINE]


def random_block_bytes(rig, blocks, seed):
    generator = torch.Generator().manual_seed(seed)
    for block in blocks:
        for layer in rig.cache.layers:
            layer[block] = torch.randint(256, layer[block].shape, generator=generator)


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(6))
def test_there_and_back_is_byte_for_byte(make_rig, method, pinned, seed):
    rig = make_rig(seed, method=method, pinned=pinned)
    random_block_bytes(rig, range(8), seed)
    before = [rig.cache.block(block) for block in range(8)]
    rig.store(1, blocks=[3, 0, 7, 5, 1, 2], slots=[6, 0, 1])
    assert rig.finish() == {1: None}
    assert torch.equal(rig.slot(6), torch.stack([before[3], before[0]]))
    rig.fill(range(16), range(16))
    rig.engine.mark_loads()
    rig.load(2, blocks=[8, 9, 10, 11, 12, 13], slots=[6, 0, 1])
    assert rig.finish() == {1: None, 2: None}
    for block, source in zip(range(8, 14), [3, 0, 7, 5, 1, 2], strict=True):
        assert torch.equal(rig.cache.block(block), before[source])
    assert rig.values([0, 7, 14, 15]) == [0, 7, 14, 15]
    rig.simulation.check()


@pytest.mark.parametrize("method", METHODS)
def test_partial_chunks_move_only_the_blocks_they_have(make_rig, method):
    rig = make_rig(method=method)
    rig.fill(range(4), [10, 11, 12, 13])
    rig.store(1, blocks=[-1, 2, 3, -1], slots=[4, 5])
    assert rig.finish() == {1: None}
    rig.load(2, blocks=[-1, 8, 9, -1], slots=[4, 5])
    assert rig.finish() == {1: None, 2: None}
    assert rig.values([8, 9, 10]) == [12, 13, 0]
    rig.simulation.check()


@pytest.mark.parametrize("method", METHODS)
def test_copies_do_not_span_two_registered_pieces(make_rig, method):
    rig = make_rig(method=method, max_pin_bytes=4096, page_bytes=1000, staging_blocks=4)
    assert len(rig.runtime.registered) > 4
    random_block_bytes(rig, range(8), 1)
    before = torch.stack([rig.cache.block(block) for block in range(8)])
    rig.store(1, blocks=list(range(8)), slots=[2, 3, 4, 5])
    assert rig.finish() == {1: None}
    rig.load(2, blocks=list(range(8, 16)), slots=[2, 3, 4, 5])
    assert rig.finish() == {1: None, 2: None}
    assert torch.equal(torch.stack([rig.cache.block(block) for block in range(8, 16)]), before)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
def test_a_flipped_bit_in_host_memory_is_found(make_rig, method, pinned):
    rig = make_rig(method=method, pinned=pinned)
    rig.fill(range(4), [10, 11, 12, 13])
    rig.store(1, blocks=[0, 1, 2, 3], slots=[4, 5])
    rig.finish()
    rig.arena.slots[5 * rig.arena.slot_stride_bytes + 100] ^= 16
    rig.load(2, blocks=[8, 9, 10, 11], slots=[4, 5])
    assert "IntegrityError: checksums differ in slots [5]" in str(rig.finish()[2])
    rig.load(3, blocks=[8, 9], slots=[4])
    assert rig.finish()[3] is None


@pytest.mark.parametrize("method", METHODS)
def test_sampled_and_unsampled_chunks_share_a_piece(make_rig, method):
    rig = make_rig(method=method, options=TransferOptions(integrity="sample"))
    rig.fill(range(16), range(16))
    rig.store(1, blocks=list(range(16)), slots=list(range(8)))  # seed 1008 is the one checked
    rig.finish()
    for slot in range(8):
        rig.arena.slots[slot * rig.arena.slot_stride_bytes] ^= 1
    rig.load(2, blocks=list(range(16)), slots=list(range(8)))
    errors = rig.finish()
    checked = [slot for slot in range(8) if (1000 + slot) % 16 == 0]
    assert (errors[2] is None) == (not checked)


@pytest.mark.parametrize("method", METHODS)
def test_every_order_of_a_store_and_a_load_is_right(method, make_rig):
    """Exhaustively: a forward fills a block, it is stored, flushed, filled again, loaded back."""

    def program(simulation):
        rig = make_rig(simulation=simulation, method=method, staging_blocks=1)
        compute = rig.runtime.compute.name

        def write(value):
            def action():
                rig.fill([2, 3], [value, value + 1])

            rig.simulation.queue(
                compute, f"write {value}", writes=rig.cache.ranges([2, 3]), action=action
            )

        write(10)
        rig.store(1, blocks=[2, 3], slots=[0])
        rig.flush(1)
        write(20)
        rig.simulation.run_all()
        rig.poll()
        rig.engine.mark_loads()
        rig.load(2, blocks=[4, 5], slots=[0])
        rig.finish()
        assert rig.errors() == {1: None, 2: None}
        assert rig.values([2, 3, 4, 5]) == [20, 21, 10, 11]
        rig.simulation.check()

    found = explore(program)
    assert not found.races
    assert found.num_orders >= 2


def test_widths_and_methods_a_stream_device_offers(make_rig):
    rig = make_rig()
    for way in Direction:
        assert {one.method for one in rig.device.strategies(way)} == set(METHODS)
    rig = make_rig(staging_blocks=0)
    assert Strategy(Method.PACKED) not in rig.device.strategies(Direction.STORE)


def test_packing_is_left_out_where_a_block_does_not_fit_into_staging(make_rig):
    rig = make_rig(method=Method.PACKED, staging_blocks=0)
    rig.fill([0, 1], [5, 6])
    rig.store(1, blocks=[0, 1], slots=[0])
    assert rig.finish() == {1: None}
    assert rig.slot(0).unique().tolist() == [5, 6]


def test_a_packed_store_overlaps_packing_and_copying(make_rig):
    rig = make_rig(method=Method.PACKED, staging_blocks=1)
    gate = rig.simulation.hold_when(lambda operation: operation.name.startswith("copy"))
    rig.store(1, blocks=[0, 1, 2, 3], slots=[0, 1])
    while rig.simulation._ready():
        rig.simulation._run(rig.simulation._ready()[0])
    waiting = [operation.name for operation in rig.simulation.unfinished()]
    assert waiting.count("pack store 1") == 2, "two slices were packed, two wait for a buffer"
    gate.open()
    assert rig.finish() == {1: None}


def test_stores_give_way_to_loads_until_the_loads_end(make_rig):
    rig = make_rig(give_way_s=1e9)
    rig.store(1, blocks=[0, 1], slots=[0])
    rig.finish()
    gate = rig.simulation.hold_when(lambda operation: operation.name == "load 2")
    rig.load(2, blocks=[2, 3], slots=[0])
    rig.store(3, blocks=[4, 5], slots=[1])
    queued = [operation.name for operation in rig.simulation.unfinished()]
    assert "store store 3" not in queued
    gate.open()
    rig.simulation.run_all()
    rig.poll()
    assert rig.finish() == {1: None, 2: None, 3: None}


def test_a_store_gives_way_only_so_long(make_rig):
    rig = make_rig(give_way_s=0.01)
    rig.simulation.hold_when(lambda operation: operation.name == "load load 2")
    rig.load(2, blocks=[2, 3], slots=[0])
    rig.store(3, blocks=[4, 5], slots=[1])
    for _ in range(50):
        rig.simulation.queue("other", "time passes", action=lambda: None)
    for _ in range(500):
        rig.poll()
        if 3 in rig.errors():
            break
    assert rig.errors() == {3: None}


def test_a_flush_does_not_let_a_store_give_way(make_rig):
    rig = make_rig(give_way_s=1e9)
    rig.simulation.hold_when(lambda operation: operation.name == "load load 2")
    rig.load(2, blocks=[2, 3], slots=[0])
    rig.store(3, blocks=[4, 5], slots=[1])
    rig.flush(3)
    reuse = rig.simulation.queue(
        "compute", "reuse", writes=rig.cache.ranges([4, 5]), action=lambda: None
    )
    rig.simulation.wait(reuse)
    assert rig.poll()[0].job_id == 3
    rig.simulation.check()


def test_holds_are_timed_once_they_are_over(make_rig):
    rig = make_rig()
    gate = rig.simulation.hold_when(lambda operation: operation.name == "store store 1")
    rig.store(1, blocks=[0, 1], slots=[0])
    rig.flush(1)
    assert rig.engine.snapshot()["flushes"] == 0
    for _ in range(10):
        rig.simulation.wait(rig.simulation.queue("other", "time passes", action=lambda: None))
    gate.open()
    rig.finish()
    assert rig.engine.snapshot()["flushes"] == 1
    assert rig.engine.snapshot()["flush_p50_s"] >= 0.01


def test_compute_that_cannot_wait_makes_the_host_wait(make_rig, caplog):
    rig = make_rig()
    rig.store(1, blocks=[0, 1], slots=[0])
    rig.runtime.refuse_when(lambda name: name == "wait", lambda: RuntimeError("no"))
    with caplog.at_level(logging.WARNING):
        rig.flush(1)
    assert "the host does" in caplog.text
    reuse = rig.cache.ranges([0, 1])
    rig.simulation.queue("compute", "reuse", writes=reuse, action=lambda: None)
    assert rig.finish() == {1: None}
    rig.simulation.check()
    assert rig.engine.snapshot()["flushes"] == 1, "the forward stood still for it"


def test_what_was_taken_is_given_back(make_rig):
    rig = make_rig(method=Method.PACKED)
    for job_id in range(40):
        rig.engine.begin_step()
        rig.store(job_id, blocks=[0, 1], slots=[job_id % 8])
        rig.flush(job_id)
        rig.finish()
        rig.engine.snapshot()
    # The engine keeps one mark for its loads.
    assert rig.device.num_taken == 1
    assert rig.runtime.num_events < 40, "events are used again"


def test_the_first_failing_call_leaves_nothing_behind(make_rig):
    """Whichever call of a launch fails: a failed report, and everything goes back."""
    for turn in range(40):
        for method in METHODS:
            rig = make_rig(method=method, staging_blocks=1)
            calls = 0

            def is_the_one(name, turn=turn):
                nonlocal calls
                calls += 1
                return calls == turn + 1

            refusal = rig.runtime.refuse_when(is_the_one, lambda: RuntimeError("device says no"))
            rig.engine.begin_step()
            rig.store(1, blocks=[0, 1, 2, 3], slots=[0, 1])
            rig.simulation.run_all()
            rig.poll()
            rig.finish()
            errors = rig.errors()
            assert set(errors) == {1}, (turn, method)
            refusal.times = 0
            rig.engine.begin_step()
            rig.store(2, blocks=[0, 1], slots=[2])
            assert rig.finish()[2] is None, (turn, method)
            rig.engine.snapshot()
            rig.simulation.check()


def test_closing_twice_is_fine_and_a_closed_device_takes_nothing(make_rig):
    rig = make_rig()
    rig.store(1, blocks=[0, 1], slots=[0])
    rig.engine.close()
    rig.engine.close()
    assert rig.device.close(1.0)
    assert [report.job_id for report in rig.engine.poll()] == [1]
    assert not rig.simulation.unfinished()
    assert not rig.runtime.registered


def test_closing_with_work_that_hangs_keeps_its_memory(make_rig, caplog):
    rig = make_rig()
    gate = rig.simulation.hold_when(lambda operation: operation.name == "store store 1")
    rig.store(1, blocks=[0, 1], slots=[0])
    with caplog.at_level(logging.ERROR):
        rig.engine.close()
    assert rig.runtime.registered, "memory that the device may still write stays pinned"
    assert "their memory is kept" in caplog.text
    gate.open()
    rig.simulation.run_all()

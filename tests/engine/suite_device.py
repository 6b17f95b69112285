"""What a stream device must do, on the simulator as on a GPU.

The tests ask for a fixture ``make_world``; a world has a compute stream on which slow work can be
queued, an engine on a stream device, and a cache of one group with two layers.
"""

from typing import Protocol

import pytest
import torch
from kvferry.engine.strategy import Method

METHODS = [Method.ZERO_COPY, Method.PACKED, Method.COPY_ENGINE]

each_method = pytest.mark.parametrize("method", METHODS)


class World(Protocol):
    """``slow`` work keeps the compute stream busy for a while before it does anything."""

    def write(self, blocks, values, *, slow: bool = False) -> None: ...

    def read(self, blocks, *, slow: bool = False):
        """Returns a function that tells, after ``finish``, what was read: one row a block."""
        ...

    def begin_step(self) -> None: ...

    def mark_loads(self) -> None: ...

    def store(self, job_id, blocks, slots, **flags) -> None: ...

    def load(self, job_id, blocks, slots, **flags) -> None: ...

    def flush(self, *job_ids) -> None: ...

    def finish(self) -> dict[int, str | None]:
        """Wait for everything; each job's error."""
        ...

    def set_blocks(self, blocks, rows) -> None:
        """With nothing in flight: uint8 rows ``[num_blocks, block_bytes]``."""
        ...

    def get_blocks(self, blocks) -> torch.Tensor: ...

    def slot_bytes(self, slot) -> torch.Tensor:
        """The host memory of a slot, to read and to damage."""
        ...


def filled(world, values):
    return torch.tensor(values, dtype=torch.uint8)[:, None].expand(-1, world.block_bytes)


@each_method
@pytest.mark.parametrize("page_bytes", [16, 80, 4096, 5004])
@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
def test_bytes_come_back_as_they_were(make_world, method, page_bytes, pinned):
    world = make_world(method, page_bytes=page_bytes, pinned=pinned)
    generator = torch.Generator().manual_seed(page_bytes)
    rows = torch.randint(256, (16, world.block_bytes), generator=generator, dtype=torch.uint8)
    world.set_blocks(range(16), rows)
    world.begin_step()
    world.store(1, [5, 0, 3, 4, -1, 7], [6, 0, 1])
    world.flush(1)
    world.write(range(16), [9] * 16)
    assert world.finish() == {1: None}
    world.mark_loads()
    world.load(2, [8, 9, 10, 11, -1, 13], [6, 0, 1])
    assert world.finish() == {1: None, 2: None}
    found = world.get_blocks([8, 9, 10, 11, 13])
    assert torch.equal(found, rows[[5, 0, 3, 4, 7]])
    assert torch.equal(world.get_blocks([7, 12, 14]), filled(world, [9, 9, 9]))


@each_method
def test_a_store_takes_what_a_slow_kernel_wrote_150_times(make_world, method):
    """S1."""
    world = make_world(method, num_slots=150)
    for turn in range(150):
        world.write([0, 1], [turn, 255 - turn], slow=turn % 10 == 0)
        world.begin_step()
        world.store(turn, [0, 1], [turn])
        world.flush(turn)
    assert set(world.finish().values()) == {None}
    for turn in range(150):
        found = world.slot_bytes(turn).view(2, world.block_bytes)
        assert torch.equal(found, filled(world, [turn, 255 - turn])), turn


@each_method
@pytest.mark.parametrize("expedited", [False, True], ids=["load", "expedited"])
def test_a_slow_reader_sees_the_old_bytes_and_a_later_one_the_new(make_world, method, expedited):
    """S2."""
    world = make_world(method)
    world.set_blocks([0, 1, 4, 5], filled(world, [10, 11, 20, 21]))
    world.store(1, [4, 5], [0])
    world.finish()
    old = world.read([0, 1], slow=True)
    world.mark_loads()
    world.load(2, [0, 1], [0], expedited=expedited)
    world.flush(2)
    new = world.read([0, 1])
    assert world.finish() == {1: None, 2: None}
    assert torch.equal(old(), filled(world, [10, 11]))
    assert torch.equal(new(), filled(world, [20, 21]))


@each_method
def test_a_slow_zeroing_does_not_wipe_what_is_loaded(make_world, method):
    """S3."""
    world = make_world(method)
    world.set_blocks([4, 5], filled(world, [20, 21]))
    world.store(1, [4, 5], [0])
    world.finish()
    world.write([0, 1], [0, 0], slow=True)
    world.mark_loads()
    world.load(2, [0, 1], [0])
    assert world.finish() == {1: None, 2: None}
    assert torch.equal(world.get_blocks([0, 1]), filled(world, [20, 21]))


@each_method
@pytest.mark.parametrize("deferred", [False, True], ids=["at_once", "deferred"])
def test_a_flushed_store_has_read_its_blocks_before_they_are_used_again(
    make_world, method, deferred
):
    """S4."""
    world = make_world(method)
    for turn in range(20):
        world.write([0, 1], [100 + turn, 200 + turn], slow=True)
        world.store(turn, [0, 1], [turn % 8], deferred=deferred)
        world.flush(turn)
        world.write([0, 1], [0, 0])
        if turn >= 7:
            assert world.finish()[turn] is None
            found = world.slot_bytes(turn % 8).view(2, world.block_bytes)
            assert torch.equal(found, filled(world, [100 + turn, 200 + turn]))


@each_method
@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
def test_damaged_host_memory_fails_the_load(make_world, method, pinned):
    world = make_world(method, pinned=pinned)
    world.set_blocks(range(4), filled(world, [10, 11, 12, 13]))
    world.store(1, [0, 1, 2, 3], [4, 5])
    world.finish()
    world.slot_bytes(5)[-3] ^= 64
    world.load(2, [8, 9, 10, 11], [4, 5])
    world.load(3, [12, 13], [4])
    errors = world.finish()
    assert "IntegrityError: checksums differ in slots [5]" in errors[2]
    assert errors[3] is None


@each_method
def test_many_pieces_of_many_jobs_at_once(make_world, method):
    world = make_world(method, num_slots=64, num_blocks=64, page_bytes=1024, slice_bytes=8192)
    rows = filled(world, list(range(64)))
    world.set_blocks(range(64), rows)
    world.begin_step()
    for job_id in range(4):
        blocks = list(range(16 * job_id, 16 * job_id + 16))
        world.store(job_id, blocks, range(8 * job_id, 8 * job_id + 8))
    world.flush(0, 1, 2, 3)
    world.write(range(64), [0] * 64)
    assert world.finish() == dict.fromkeys(range(4))
    world.mark_loads()
    for job_id in range(4):
        blocks = list(range(16 * job_id, 16 * job_id + 16))
        world.load(4 + job_id, blocks, range(8 * job_id, 8 * job_id + 8), expedited=job_id % 2 == 0)
    assert world.finish() == dict.fromkeys(range(8))
    assert torch.equal(world.get_blocks(range(64)), rows)


def test_closing_twice_is_fine_with_work_under_way(make_world):
    world = make_world(Method.PACKED)
    world.write([0, 1], [1, 2], slow=True)
    world.store(1, [0, 1], [0])
    world.flush(1)
    world.write([0, 1], [3, 4])
    world.engine.close()
    world.engine.close()
    assert [report.job_id for report in world.engine.poll()] == [1]

"""Checksums on the CPU device: the kernels' values, and no wrong byte served."""

from types import ModuleType

import numpy as np
import pytest
from kvferry.engine.devices.copying import GroupCopier, load_compiled
from kvferry.engine.devices.cpu import CpuDevice
from kvferry.engine.types import Direction, GroupId, JobId, Key, key_start, seed_of
from kvferry.kernels.checksum.host import fragment_checksums
from worker_rig import WAIT_S, Rig

COMPILED = load_compiled()
BOTH = pytest.mark.parametrize("compiled", [COMPILED, None], ids=["compiled", "interpreted"])


class OneLoop(CpuDevice):
    """A CPU device with one of the two copy loops."""

    def __init__(self, compiled: ModuleType | None) -> None:
        super().__init__(2)
        self._compiled = compiled


def rig_of(compiled: ModuleType | None, integrity: str, **shape: object) -> Rig:
    return Rig(OneLoop(compiled), integrity=integrity, **shape)


@BOTH
@pytest.mark.parametrize("sizes", [(3, 16, 2, 4, 8), (2, 16, 1, 3, 7), (1, 16, 1, 1, 5)])
@pytest.mark.parametrize("order", ["LBHNC", "LHBNC", "BLHNC"])
def test_the_values_are_those_of_the_kernels(
    compiled: ModuleType | None, sizes: tuple[int, int, int, int, int], order: str
) -> None:
    with rig_of(compiled, "full", order=order, sizes=sizes, blocks_per_chunk=2) as rig:
        for block in range(6):
            rig.fill(block, block)
        rig.store(1, list(range(6)), [5, 1, 3])
        assert rig.engine.drain(WAIT_S)[0].error is None
        group = rig.layout.groups[0]
        per_block = [fragment.num_bytes for fragment in group.fragments]
        job = rig.order(1, Direction.STORE, list(range(6)), [5, 1, 3]).segments[0]
        for slot, seed in zip(job.slots, job.seeds, strict=True):
            at = slot * rig.arena.slot_stride_bytes
            blocks = rig.arena.slots.numpy()[at : at + group.slot_bytes].reshape(2, -1)
            wanted = fragment_checksums(
                blocks, per_block, np.full(2, seed, dtype=np.int64), np.arange(2, dtype=np.int64)
            )
            stored = rig.arena.checksums.numpy().reshape(rig.arena.num_slots, -1)[slot]
            assert np.array_equal(stored, wanted.reshape(-1))


@BOTH
def test_one_flipped_bit_fails_the_load_and_names_the_place(
    compiled: ModuleType | None, caplog: pytest.LogCaptureFixture
) -> None:
    with rig_of(compiled, "full", blocks_per_chunk=2) as rig:
        rig.store(1, [0, 1, 2, 3, 4, 5], [0, 3, 6])
        rig.engine.drain(WAIT_S)
        at = 3 * rig.arena.slot_stride_bytes + rig.layout.groups[0].slot_bytes - 1
        rig.arena.slots[at] ^= 0x80
        rig.load(2, [6, 7, 8, 9, 10, 11], [0, 3, 6])
        report = rig.engine.drain(WAIT_S)[0]
        assert report.error == "IntegrityError: checksums differ in slots [3]"
        assert report.num_bytes == 0
        counts = rig.engine.snapshot()
        assert (counts["corrupt_chunks"], counts["failed_jobs"], counts["off"]) == (1, 1, 0)
        key = (bytes([3]) * 8).hex()  # how the rig's key of slot 3 begins
        lines = [line for line in caplog.messages if "checksums differ" in line]
        assert len(lines) == 1
        assert f"group 0 slot 3 key {key}" in lines[0]
        rig.load(3, [6, 7], [6])
        assert rig.engine.drain(WAIT_S)[0].error is None


def test_a_mismatch_is_counted_and_logged_whatever_else_fails_its_load(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two pieces: one comes out corrupt, the device fails the other."""
    with Rig(integrity="full", slice_bytes=1) as rig:
        rig.store(1, [0, 1], [0, 1])
        rig.engine.drain(WAIT_S)
        rig.arena.slots[0] ^= 1
        move = rig.device._move

        def broken(piece, begin, end, strategy):
            if piece.slots[0] == 1:
                raise OSError("no")
            return move(piece, begin, end, strategy)

        rig.device._move = broken
        rig.load(2, [2, 3], [0, 1])
        assert rig.device.wait(rig.engine._jobs[JobId(2)].tickets, WAIT_S)
        report = rig.engine.poll()[0]
        assert "OSError" in (report.error or "")
        assert rig.engine.snapshot()["corrupt_chunks"] == 1
        assert sum("checksums differ" in line for line in caplog.messages) == 1


@BOTH
def test_a_right_page_in_the_wrong_place_is_caught(compiled: ModuleType | None) -> None:
    with rig_of(compiled, "full") as rig:
        rig.fill(0, 1)
        rig.store(1, [0], [0])
        rig.engine.drain(WAIT_S)
        stride, sums = rig.arena.slot_stride_bytes, rig.arena.checksums.view(8, -1)
        rig.arena.slots[stride : 2 * stride] = rig.arena.slots[:stride]
        sums[1] = sums[0]
        rig.load(2, [1], [1])
        assert "IntegrityError" in (rig.engine.drain(WAIT_S)[0].error or "")


@BOTH
def test_a_sample_checks_some_chunks_and_off_checks_none(compiled: ModuleType | None) -> None:
    caught = {}
    for integrity in ("sample", "off"):
        with rig_of(compiled, integrity, num_slots=64, sizes=(1, 64, 1, 1, 16)) as rig:
            rig.store(1, list(range(64)), list(range(64)))
            rig.engine.drain(WAIT_S)
            rig.arena.slots.bitwise_xor_(1)
            for slot in range(64):
                rig.load(10 + slot, [slot], [slot])
            failed = [report for report in rig.engine.drain(WAIT_S) if report.error]
            caught[integrity] = {report.job_id - 10 for report in failed}
    seeds = rig.order(1, Direction.STORE, list(range(64)), list(range(64))).segments[0].seeds
    assert caught["sample"] == {slot for slot in range(64) if seeds[slot] % 16 == 0}
    assert caught["sample"]
    assert caught["off"] == set()


def test_copiers_agree_on_what_the_other_wrote() -> None:
    assert COMPILED is not None
    with rig_of(COMPILED, "full") as rig:
        rig.fill(0, 3)
        rig.store(1, [0], [0])
        rig.engine.drain(WAIT_S)
        copier = GroupCopier(rig.layout.groups[0], rig.arena, None)
        rig.device._copiers = {rig.layout.groups[0].group: copier}
        rig.device._compiled = None
        rig.load(2, [1], [0])
        assert rig.engine.drain(WAIT_S)[0].error is None
        assert np.array_equal(rig.read(0), rig.read(1))


def test_a_seed_tells_how_its_key_begins() -> None:
    for group in (0, 7):
        for key in (b"", b"abc", bytes(range(240, 256)), b"\xff" * 32):
            seed = seed_of(GroupId(group), Key(key))
            assert key_start(GroupId(group), seed) == key[:8].ljust(8, b"\0").hex()

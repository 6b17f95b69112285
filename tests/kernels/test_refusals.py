"""What the ops refuse, each with a message that names what was given; nothing is launched here."""

import pytest
import torch
from kvferry.kernels.checksum import op as checksum_op
from kvferry.kernels.config import CopyConfig
from kvferry.kernels.copy import op as copy_op
from kvferry.kernels.entries import Entries
from kvferry.kernels.pack import op as pack_op
from kvferry.kernels.slices import MAX_SLICE_BYTES, slices
from kvferry.kernels.table import ChecksumSlots, Fragment, FragmentTable, HostSlots
from page_worlds import World, layered, separate


@pytest.fixture
def world():
    """Six blocks of 2 x 64 bytes; four slots of two blocks."""
    return World("cpu", separate(6, [64, 64]), seed=31, num_slots=4, blocks_per_chunk=2)


def flags_of(entries):
    return torch.zeros(entries.num_entries, dtype=torch.int32)


def launches(world):
    """Every op that takes entries, by name: what it reads or writes where."""
    staging = torch.zeros(1 << 16, dtype=torch.uint8)
    table, slots, sums = world.table, world.slots, world.checksums
    return {
        "store": lambda e: copy_op.store(table, slots, e),
        "load": lambda e: copy_op.load(table, slots, e),
        "pack": lambda e: pack_op.pack(table, staging, e, checksums=sums),
        "unpack": lambda e: pack_op.unpack(table, staging, e, checksums=sums, flags=flags_of(e)),
        "write": lambda e: checksum_op.write(table, e, sums),
        "verify": lambda e: checksum_op.verify(table, e, sums, flags_of(e)),
    }


OPS = ("store", "load", "pack", "unpack", "write", "verify")


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (([0, 6], [0, 1], [0, 0]), r"block id 6 is out of range: allowed are 0 to 5"),
        (([-1, 0], [0, 1], [0, 0]), r"block id -1 is out of range"),
        (([0, 1], [0, 4], [0, 0]), r"slot id 4 is out of range: allowed are 0 to 3"),
        (([0, 1], [-2, 1], [0, 0]), r"slot id -2 is out of range"),
        (([0, 1], [0, 1], [0, 2]), r"position 2 is out of range: allowed are 0 to 1"),
        (([0, 1], [0, 1], [-1, 0]), r"position -1 is out of range"),
        (([0, 2**40], [0, 1], [0, 0]), r"block id 1099511627776 is out of range"),
    ],
)
def test_ids_out_of_range(world, name, columns, message):
    with pytest.raises(ValueError, match=message):
        launches(world)[name](Entries.build(*columns))


@pytest.mark.parametrize("name", ["store", "pack", "write"])
def test_a_place_named_twice(world, name):
    entries = Entries.build([0, 1, 2], [3, 1, 3], [1, 0, 1])
    with pytest.raises(ValueError, match="duplicate destination: slot id 3, position 1"):
        launches(world)[name](entries)


@pytest.mark.parametrize("name", ["load", "unpack"])
def test_a_block_named_twice(world, name):
    entries = Entries.build([5, 1, 5], [0, 1, 2], [0, 0, 0])
    with pytest.raises(ValueError, match="duplicate destination: block id 5"):
        launches(world)[name](entries)


def test_sources_may_repeat(world):
    copy_op.check_store(world.table, world.slots, Entries.build([0, 0], [0, 1], [0, 0]))
    copy_op.check_load(world.table, world.slots, Entries.build([0, 1], [2, 2], [1, 1]))


@pytest.mark.parametrize("name", OPS)
def test_memory_of_another_device(world, name):
    """A table on another device: the CPU tensors given with it are not pinned for it."""
    other = FragmentTable(world.table.fragments, num_blocks=6, device="meta")
    world.table = other
    with pytest.raises(ValueError, match=r"pinned memory for meta|must be on meta"):
        launches(world)[name](Entries.build([0], [0], [0]))


def test_misaligned_slots(world):
    stride = world.slots.slot_stride_bytes
    moved = HostSlots(world.memory[4:], stride, num_slots=3, blocks_per_chunk=2)
    with pytest.raises(ValueError, match="misaligned base: slot memory"):
        copy_op.store(world.table, moved, Entries.build([0], [0], [0]))
    odd = HostSlots(world.memory, stride + 8, num_slots=3, blocks_per_chunk=2)
    with pytest.raises(ValueError, match="misaligned base: slot stride"):
        copy_op.load(world.table, odd, Entries.build([0], [0], [0]))


def test_staging_that_does_not_fit(world):
    entries = Entries.build([0, 1], [0, 1], [0, 0])
    good = torch.zeros(512, dtype=torch.uint8)
    for staging, message in (
        (good[:255], "need a staging buffer of 256 bytes, got 255"),
        (good[8:], "misaligned base: staging"),
        (good.view(torch.int32), "1-D uint8"),
        (good[::2], "contiguous"),
        (torch.empty(512, dtype=torch.uint8, device="meta"), "staging must be on cpu"),
    ):
        with pytest.raises(ValueError, match=message):
            pack_op.pack(world.table, staging, entries)
        with pytest.raises(ValueError, match=message):
            pack_op.unpack(world.table, staging, entries)


def test_slots_too_small_for_a_chunk(world):
    slots = HostSlots(world.memory, 240, num_slots=2, blocks_per_chunk=2)
    with pytest.raises(ValueError, match="needs 256 bytes, slots are 240 bytes apart"):
        copy_op.store(world.table, slots, Entries.build([0], [0], [0]))


def test_checksums_that_do_not_fit(world):
    entries = Entries.build([0], [0], [0])
    row = torch.zeros((4, 3), dtype=torch.int64)
    with pytest.raises(ValueError, match="need rows of 4, got rows of 3"):
        checksum_op.write(world.table, entries, ChecksumSlots(row, 2))
    few = ChecksumSlots(torch.zeros((3, 4), dtype=torch.int64), 2)
    with pytest.raises(ValueError, match="3 slots of 2 blocks, there are 4 slots"):
        copy_op.store(world.table, world.slots, entries, checksums=few)
    with pytest.raises(ValueError, match="got checksums without flags"):
        copy_op.load(world.table, world.slots, entries, checksums=world.checksums)
    with pytest.raises(ValueError, match="got flags without checksums"):
        copy_op.load(world.table, world.slots, entries, flags=flags_of(entries))
    for flags in (torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)):
        with pytest.raises(ValueError, match=r"int32 tensor \(1,\), got"):
            checksum_op.verify(world.table, entries, world.checksums, flags)


def test_entries_of_a_wrong_kind():
    for records, message in (
        (torch.zeros((3, 4), dtype=torch.int32), "int64"),
        (torch.zeros((3, 3), dtype=torch.int64), r"\[num_entries, 4\]"),
        (torch.zeros((4, 3), dtype=torch.int64).T, "contiguous"),
        (torch.zeros((3, 4), dtype=torch.int64, device="meta"), "on the cpu, got meta"),
    ):
        with pytest.raises(ValueError, match=message):
            Entries(records)
    with pytest.raises(ValueError, match=r"one length, got \[2, 1, 1, 1\]"):
        Entries.build([0, 1], [0], [0])


def test_slots_of_a_wrong_kind():
    memory = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(ValueError, match="need 96 bytes, the memory has 64"):
        HostSlots(memory, 32, num_slots=3, blocks_per_chunk=1)
    with pytest.raises(ValueError, match="uint8"):
        HostSlots(memory.view(torch.int64), 4, num_slots=1, blocks_per_chunk=1)
    with pytest.raises(ValueError, match="on the cpu"):
        HostSlots(memory.to("meta"), 32, num_slots=1, blocks_per_chunk=1)
    with pytest.raises(ValueError, match="at least 1"):
        HostSlots(memory, 32, num_slots=0, blocks_per_chunk=1)


def test_tables_of_a_wrong_kind():
    def table(*fragments, num_blocks=2):
        return FragmentTable(fragments, num_blocks=num_blocks, device="cpu")

    with pytest.raises(ValueError, match="got 0"):
        table()
    with pytest.raises(ValueError, match="at least one byte"):
        table(Fragment(0, 16, 0))
    with pytest.raises(ValueError, match="fragment 1: blocks overlap"):
        table(Fragment(0, 16, 16), Fragment(0, 15, 16))
    with pytest.raises(ValueError, match="num_blocks must be"):
        table(Fragment(0, 16, 16), num_blocks=0)
    view = torch.zeros((4, 16), dtype=torch.uint8)
    for views, message in (
        ([view.view(torch.int32)], "fragment 0 must be a uint8 view"),
        ([view[:, ::2]], "contiguous bytes"),
        ([view, view[:3]], "fragment 1 has 3 on cpu"),
        ([], "got none"),
    ):
        with pytest.raises(ValueError, match=message):
            FragmentTable.from_views(views)


def test_access_width_is_what_every_address_allows():
    for base, stride, size, width in (
        (64, 256, 128, 16), (72, 256, 128, 4), (64, 264, 128, 4), (64, 256, 120, 4),
        (65, 256, 128, 1), (64, 256, 3, 1), (64, 258, 128, 1), (66, 256, 128, 1),
    ):  # fmt: skip
        fragments = [Fragment(0, 256, 16), Fragment(base, stride, size)]
        table = FragmentTable(fragments, num_blocks=2, device="cpu")
        assert table.access_bytes == width, (base, stride, size)


def test_tunables_of_a_wrong_kind():
    good = {"num_programs": 1, "tile_bytes": 16384, "num_stages": 1, "num_warps": 4}
    for wrong, message in (
        ({"num_programs": 0}, "num_programs must be at least 1, got 0"),
        ({"num_stages": 9}, "num_stages must be 1 to 8, got 9"),
        ({"num_warps": 3}, "got 3"),
        ({"tile_bytes": 12288}, "power of two of at least 4096 for 4 warps, got 12288"),
        ({"tile_bytes": 4096, "num_warps": 16}, "at least 8192 for 16 warps, got 4096"),
    ):
        with pytest.raises(ValueError, match=message):
            CopyConfig(**{**good, **wrong})


def test_slices_cover_a_transfer_once():
    for num_entries, block_bytes, slice_bytes in ((10, 3, 9), (10, 3, 1), (0, 3, 9), (7, 4, 1000)):
        parts = list(slices(num_entries, block_bytes, slice_bytes))
        ids = [part.first + i for part in parts for i in range(part.num_entries)]
        assert ids == list(range(num_entries))
        assert all(p.num_entries * block_bytes <= max(block_bytes, slice_bytes) for p in parts)
    for slice_bytes in (0, MAX_SLICE_BYTES + 1):
        with pytest.raises(ValueError, match="slice_bytes must be 1 to"):
            list(slices(1, 1, slice_bytes))


def test_the_fragments_of_a_layout_are_the_rig_s_own_bytes():
    """The rig itself: the views of a layout cover a dense tensor exactly once."""
    for order in ("LBHNC", "LHBNC", "BHLNC", "LKBHNC"):
        pages = layered(order, 3, L=2, K=2 if "K" in order else 1, H=2, N=3, C=5)
        storage = torch.zeros(pages.storage_bytes, dtype=torch.uint8)
        for view in pages.views(storage):
            view += 1
        extent = 3 * pages.block_bytes
        assert (storage[64 : 64 + extent] == 1).all()
        assert int(storage.sum()) == extent

"""Checksums from every kernel against their definition; collected like ``suite_copy``."""

import pytest
import torch
from kvferry.kernels.checksum import op as checksum_op
from kvferry.kernels.checksum import reference
from kvferry.kernels.checksum.host import fragment_checksums
from kvferry.kernels.copy import op as copy_op
from kvferry.kernels.pack import op as pack_op
from page_worlds import GUARD_BYTES, LAYOUTS, World, finish, layered, separate

SHAPES = {
    **{name: LAYOUTS[name] for name in ("LHBNC", "packed", "fp8 with scales", "odd bytes")},
    "per-layer sizes": separate(4, [16, 5000, 640, 8200]),
    "many fragments": layered("LBC", 3, L=130, C=80),
    "one byte": separate(3, [1]),
}
INSIDE = slice(GUARD_BYTES, -GUARD_BYTES)


def check_values(world, entries):
    """The kernels' checksums are the definition's, and the rest of the array is untouched."""
    want = torch.full_like(world.checksums.values, -7)
    values = world.checksums.values.cpu()
    world.checksums.values.copy_(want)
    reference.write(world.views, entries, world.checksums)
    assert torch.equal(values, world.checksums.values.cpu())


@pytest.fixture(params=SHAPES)
def world(request, device):
    print("seed 21")
    return World(device, SHAPES[request.param], seed=21, num_slots=4, blocks_per_chunk=2)


@pytest.fixture
def entries(world):
    return world.entries(3)


def test_store_writes_them(world, entries, config):
    before = world.storage.clone()
    copy_op.store(world.table, world.slots, entries, config=config, checksums=world.checksums)
    finish(world.device)
    assert torch.equal(world.storage, before)
    check_values(world, entries)


def test_pack_writes_them(world, entries):
    staging = world.staging(entries, 0)
    pack_op.pack(world.table, staging[INSIDE], entries, checksums=world.checksums)
    finish(world.device)
    check_values(world, entries)


def test_pages_are_read_where_they_lie(world, entries):
    checksum_op.write(world.table, entries, world.checksums)
    finish(world.device)
    check_values(world, entries)


def test_the_host_reads_slots_to_the_same_values(world, entries):
    copy_op.store(world.table, world.slots, entries, checksums=world.checksums)
    finish(world.device)
    block_bytes = world.table.block_bytes
    for _, slot, position, seed in entries.records.tolist():
        begin = slot * world.slots.slot_stride_bytes + position * block_bytes
        block = world.memory[begin : begin + block_bytes].numpy()[None]
        column = torch.tensor([[seed], [position]]).numpy()
        got = fragment_checksums(block, world.table.fragment_bytes, column[0], column[1])
        row = world.checksums.values[slot].cpu().numpy()
        first = position * world.table.num_fragments
        assert (got[0] == row[first : first + world.table.num_fragments]).all()


def test_load_flags_exactly_the_entries_that_changed(world, entries, config):
    """First nothing is wrong; then one bit of the last byte of one entry in its slot."""
    copy_op.store(world.table, world.slots, entries, checksums=world.checksums)
    finish(world.device)
    flags = world.flags(entries)
    options = {"config": config, "checksums": world.checksums, "flags": flags}
    copy_op.load(world.table, world.slots, entries, **options)
    finish(world.device)
    assert flags.tolist() == [0, 0, 0]
    _, slot, position, _ = entries.records[1].tolist()
    begin = slot * world.slots.slot_stride_bytes + position * world.table.block_bytes
    world.memory[begin + world.table.block_bytes - 1] ^= 0x80
    copy_op.load(world.table, world.slots, entries, **options)
    finish(world.device)
    assert flags.tolist() == [0, 1, 0]


def test_unpack_flags_exactly_the_entries_that_changed(world, entries):
    staging = world.staging(entries, 0)
    pack_op.pack(world.table, staging[INSIDE], entries, checksums=world.checksums)
    staging[GUARD_BYTES + 2 * world.table.block_bytes] ^= 1
    flags = world.flags(entries)
    options = {"checksums": world.checksums, "flags": flags}
    pack_op.unpack(world.table, staging[INSIDE], entries, **options)
    finish(world.device)
    assert flags.tolist() == [0, 0, 1]


def test_pages_are_verified_where_they_lie(world, entries):
    checksum_op.write(world.table, entries, world.checksums)
    flags = world.flags(entries)
    checksum_op.verify(world.table, entries, world.checksums, flags)
    finish(world.device)
    assert flags.tolist() == [0, 0, 0]
    world.views[0][int(entries.records[0, 0]), 0] ^= 4
    checksum_op.verify(world.table, entries, world.checksums, flags)
    finish(world.device)
    assert flags.tolist() == [1, 0, 0]


@pytest.mark.parametrize("column", [2, 3], ids=["position", "seed"])
def test_the_right_bytes_in_the_wrong_place_are_flagged(device, column):
    """A whole chunk that belongs elsewhere, with its checksums beside it."""
    world = World(device, separate(4, [48, 1040]), seed=22, num_slots=3, blocks_per_chunk=2)
    entries = world.entries(2)
    entries.records[:, 2] = 0
    entries.records[:, 1] = torch.tensor([0, 1])
    copy_op.store(world.table, world.slots, entries, checksums=world.checksums)
    finish(device)
    half = world.table.block_bytes
    fragments = world.table.num_fragments
    for slot in (0, 1):
        begin = slot * world.slots.slot_stride_bytes
        world.memory[begin + half : begin + 2 * half] = world.memory[begin : begin + half]
        row = world.checksums.values[slot]
        row[fragments : 2 * fragments] = row[:fragments]
    entries.records[:, column] = torch.tensor([0, 1]) + entries.records[0, column]
    flags = world.flags(entries)
    copy_op.load(world.table, world.slots, entries, checksums=world.checksums, flags=flags)
    finish(device)
    assert flags.tolist() == [0, 1]

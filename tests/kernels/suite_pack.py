"""``pack`` against its reference, byte for byte; collected for the interpreter and for the GPU."""

import pytest
import torch
from kvferry.kernels.config import PACK
from kvferry.kernels.pack import launch, op, reference
from kvferry.kernels.slices import slices
from page_worlds import (
    CANARY_BYTE,
    GUARD_BYTES,
    LAYOUTS,
    NAN_BYTE,
    World,
    finish,
    layered,
    separate,
)

PAGE_SIZES = (16, 80, 100, 257, 1536, 4112, 18432, (1 << 20) - 16)


def check_both_ways(device, pages, seed, *, fill=NAN_BYTE, **world):
    """Packing and unpacking do what the reference does, to whole storages and buffers."""
    print(f"seed {seed}")
    ours, theirs = (World(device, pages, seed=seed, **world) for _ in range(2))
    entries = ours.entries()
    inside = slice(GUARD_BYTES, -GUARD_BYTES)
    packed, want = (ours.staging(entries, fill) for _ in range(2))
    op.pack(ours.table, packed[inside], entries)
    finish(device)
    reference.pack(theirs.views, want[inside], entries)
    assert torch.equal(packed, want)
    assert torch.equal(ours.storage, theirs.storage)
    for one in (ours, theirs):
        one.storage.fill_(fill)
    op.unpack(ours.table, packed[inside], entries)
    finish(device)
    reference.unpack(theirs.views, want[inside], entries)
    assert torch.equal(packed, want)
    assert torch.equal(ours.storage, theirs.storage)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(device, layout):
    check_both_ways(device, LAYOUTS[layout], seed=1, fill=CANARY_BYTE)


@pytest.mark.parametrize("page_bytes", PAGE_SIZES)
def test_every_page_size(device, page_bytes):
    check_both_ways(device, separate(3, [page_bytes]), seed=2, num_slots=2)


@pytest.mark.parametrize(("num_fragments", "fragment_bytes"), [(4000, 16), (80, 2048)])
def test_many_fragments(device, num_fragments, fragment_bytes):
    pages = layered("LBC", 3, L=num_fragments, C=fragment_bytes)
    check_both_ways(device, pages, seed=3, num_slots=2)


def test_a_run_of_slots_is_one_piece_of_the_buffer(device):
    """Packed in the order of slots, the buffer holds what the slots hold."""
    world = World(device, separate(8, [48, 1040]), seed=4, blocks_per_chunk=2, slot_padding=0)
    entries = world.entries(6)
    entries.records[:, 1] = torch.tensor([1, 1, 2, 2, 3, 3])
    entries.records[:, 2] = torch.tensor([0, 1, 0, 1, 0, 1])
    staging = world.staging(entries, NAN_BYTE)[GUARD_BYTES:-GUARD_BYTES]
    op.pack(world.table, staging, entries)
    finish(device)
    stride = world.slots.slot_stride_bytes
    world.memory[stride : 4 * stride] = staging.cpu()
    for block, slot, position, _ in entries.records.tolist():
        begin = slot * stride + position * 1088
        want = torch.cat([view[block].cpu() for view in world.views])
        assert torch.equal(world.memory[begin : begin + 1088], want)


def test_slices_through_one_small_buffer(device):
    """An engine packs slice by slice, each into a buffer that holds no more than a slice."""
    world = World(device, separate(9, [96, 4000]), seed=5, num_slots=7)
    entries = world.entries()
    buffer = torch.full((3 * 4096,), NAN_BYTE, dtype=torch.uint8, device=device)
    op.check_pack(world.table, entries)
    for part in slices(entries.num_entries, 4096, 3 * 4096):
        launch.pack(world.table, buffer, entries, part, config=PACK, checksums=None)
        finish(device)
        blocks = entries.records[part.first : part.first + part.num_entries, 0].tolist()
        for index, block in enumerate(blocks):
            want = torch.cat([view[block] for view in world.views])
            assert torch.equal(buffer[index * 4096 : (index + 1) * 4096], want)


def test_nothing_to_do(device):
    world = World(device, separate(3, [64]), seed=6)
    entries = world.entries(0)
    op.pack(world.table, world.staging(entries, 0), entries)
    op.unpack(world.table, world.staging(entries, 0), entries)

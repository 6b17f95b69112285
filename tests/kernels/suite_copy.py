"""``copy`` against its reference, byte for byte; collected for the interpreter and for the GPU."""

from dataclasses import replace

import pytest
import torch
from kvferry.kernels.config import PLAIN
from kvferry.kernels.copy import op, reference
from kvferry.kernels.entries import Entries
from kvferry.kernels.table import FragmentTable, HostSlots
from page_worlds import (
    CANARY_BYTE,
    LAYOUTS,
    NAN_BYTE,
    Pages,
    World,
    finish,
    host_memory,
    layered,
    separate,
)

PAGE_SIZES = (16, 48, 100, 257, 1024, 1536, 4112, 18432, 36864, 65536, 1 << 20, (1 << 20) - 16)
LAYERS = (1, 2, 7, 28, 61, 80)
MANY = (4000, 256), (4000, 16), (999, 80), (65, 1024), (17, 4096)


def check_both_ways(device, pages, seed, *, fill=NAN_BYTE, num_entries=None, world=None, **options):
    """A store and a load of the same entries do what the reference does, to whole storages."""
    print(f"seed {seed}")
    for name in ("store", "load"):
        ours, theirs = (World(device, pages, seed=seed, **(world or {})) for _ in range(2))
        for one in (ours, theirs):
            (one.memory if name == "store" else one.storage).fill_(fill)
        entries = ours.entries(num_entries)
        getattr(op, name)(ours.table, ours.slots, entries, **options)
        finish(device)
        getattr(reference, name)(theirs.views, theirs.slots, entries)
        assert torch.equal(ours.memory, theirs.memory), name
        assert torch.equal(ours.storage, theirs.storage), name


@pytest.mark.parametrize("fill", [NAN_BYTE, CANARY_BYTE], ids=["nan", "canary"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(device, layout, fill):
    check_both_ways(device, LAYOUTS[layout], seed=1, fill=fill)


@pytest.mark.parametrize("page_bytes", PAGE_SIZES)
def test_every_page_size(device, page_bytes, config):
    pages = separate(4, [page_bytes] * (2 if page_bytes < 1 << 19 else 1))
    check_both_ways(device, pages, seed=2, config=config, world={"num_slots": 2})


@pytest.mark.parametrize("num_layers", LAYERS)
def test_any_number_of_layers(device, num_layers):
    check_both_ways(device, separate(5, [1024 + 16] * num_layers), seed=3)


@pytest.mark.parametrize(("num_fragments", "fragment_bytes"), MANY)
def test_many_fragments(device, num_fragments, fragment_bytes):
    pages = layered("LBC", 3, L=num_fragments, C=fragment_bytes)
    check_both_ways(device, pages, seed=4, world={"num_slots": 2})


@pytest.mark.parametrize("blocks_per_chunk", [2, 3, 8])
def test_chunks_that_are_only_partly_there(device, blocks_per_chunk):
    world = {"blocks_per_chunk": blocks_per_chunk, "num_slots": 3}
    pages = layered("LBHNC", 40, L=2, H=2, N=4, C=16)
    check_both_ways(device, pages, seed=5, world=world, num_entries=2 * blocks_per_chunk + 1)


@pytest.mark.parametrize("num_programs", [1, 3, 64])
@pytest.mark.parametrize("slice_bytes", [1, 5000, 1 << 20])
def test_any_grid_and_any_slice(device, num_programs, slice_bytes):
    config = replace(PLAIN, num_programs=num_programs)
    pages = separate(7, [1040, 20000])
    check_both_ways(device, pages, seed=6, config=config, slice_bytes=slice_bytes)


@pytest.mark.parametrize("num_warps", [4, 8])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("tile_bytes", [8192, 32768])
def test_any_tunables(device, num_warps, num_stages, tile_bytes):
    tunables = replace(PLAIN, num_warps=num_warps, num_stages=num_stages)
    config = replace(tunables, tile_bytes=max(tile_bytes, 512 * num_warps))
    check_both_ways(device, separate(4, [48, 40000]), seed=7, config=config)


def test_nothing_to_do(device):
    check_both_ways(device, LAYOUTS["LBHNC"], seed=8, num_entries=0)


def test_offsets_beyond_two_to_the_31(device):
    """More than 2 GiB from the bases; on the host, memory that nobody touches costs nothing."""
    pages = Pages(3, ((0, (1 << 31) + 4096, 1024), (2048, (1 << 31) + 4096, 512)))
    storage = torch.empty(pages.storage_bytes, dtype=torch.uint8, device=device)
    stride = (1 << 31) + 16
    memory = torch.empty(2 * stride, dtype=torch.uint8, pin_memory=device != "cpu")
    views = pages.views(storage)
    table = FragmentTable.from_views(views)
    slots = HostSlots(memory, stride, num_slots=2, blocks_per_chunk=2)
    pinned = device != "cpu"
    entries = Entries.build([2, 1], [1, 1], [1, 0], pin_memory=pinned)
    torch.manual_seed(9)
    want = [torch.randint(256, (2, view.shape[1]), dtype=torch.uint8) for view in views]
    for view, rows in zip(views, want, strict=True):
        view[2], view[1] = rows[0], rows[1]
    op.store(table, slots, entries)
    finish(device)
    for index, place in ((0, stride + 1536), (1, stride)):
        assert torch.equal(memory[place : place + 1024], want[0][index])
        assert torch.equal(memory[place + 1024 : place + 1536], want[1][index])
    for view in views:
        view[1:].fill_(NAN_BYTE)
    op.load(table, slots, entries)
    finish(device)
    for view, rows in zip(views, want, strict=True):
        assert torch.equal(view[2].cpu(), rows[0])
        assert torch.equal(view[1].cpu(), rows[1])


def test_slots_of_a_larger_group(device):
    """One slot size serves all groups of an arena; a smaller group leaves the rest untouched."""
    check_both_ways(device, separate(5, [48] * 3), seed=10, world={"slot_padding": 4096})


def test_a_memory_that_begins_off_the_alignment_is_refused(device):
    world = World(device, separate(4, [64]), seed=11, slot_padding=64)
    memory = host_memory(world.memory.clone(), device)[1:]
    slots = HostSlots(memory, 128, num_slots=3, blocks_per_chunk=1)
    with pytest.raises(ValueError, match="misaligned base: slot memory"):
        op.store(world.table, slots, world.entries(2))

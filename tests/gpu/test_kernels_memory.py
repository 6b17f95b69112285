"""What only a real device can refuse: host memory that is not pinned, and a second device's."""

import pytest
import torch
from kvferry.kernels.copy import op as copy_op
from kvferry.kernels.entries import Entries
from kvferry.kernels.pack import op as pack_op
from kvferry.kernels.table import HostSlots
from page_worlds import World, separate


@pytest.fixture
def world(device):
    print("seed 61")
    return World(device, separate(4, [64, 64]), seed=61)


def test_pageable_slots_are_refused(world):
    slots = HostSlots(world.memory.clone(), world.slots.slot_stride_bytes, 3, 1)
    with pytest.raises(ValueError, match="slot memory must be in pinned memory"):
        copy_op.store(world.table, slots, world.entries(1))


def test_pageable_entries_are_refused(world):
    entries = Entries.build([0], [0], [0])
    with pytest.raises(ValueError, match="entries must be in pinned memory"):
        copy_op.load(world.table, world.slots, entries)


def test_staging_on_the_host_is_refused(world):
    entries = world.entries(1)
    staging = torch.empty(128, dtype=torch.uint8, pin_memory=True)
    with pytest.raises(ValueError, match="staging must be on cuda"):
        pack_op.pack(world.table, staging, entries)


def test_work_goes_to_the_current_stream(world, device):
    """Behind a long kernel of the same stream, so the store cannot have run before it."""
    entries = world.entries(2)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for view in world.views:
            view.fill_(7)
        copy_op.store(world.table, world.slots, entries)
    stream.synchronize()
    for _, slot, _, _ in entries.records.tolist():
        begin = slot * world.slots.slot_stride_bytes
        assert (world.memory[begin : begin + 128] == 7).all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_pages_of_another_gpu_than_the_current_are_refused(world):
    with torch.cuda.device(1), pytest.raises(ValueError, match="the current device is cuda:1"):
        copy_op.store(world.table, world.slots, world.entries(1))

"""The tests of ``suite_device`` on the simulator, where no race may be found either."""

import pytest
import torch
from kvferry.engine.transfer import TransferOptions
from suite_device import *  # noqa: F403


class SimulatedWorld:
    """Slow work is nothing special here: any order may come."""

    def __init__(self, rig):
        self.rig = rig
        self.engine = rig.engine
        self.block_bytes = 2 * rig.page_bytes
        self.begin_step = rig.engine.begin_step
        self.mark_loads = rig.engine.mark_loads
        self.store, self.load, self.flush, self.finish = rig.store, rig.load, rig.flush, rig.finish

    def write(self, blocks, values, *, slow=False):
        blocks, values = list(blocks), list(values)
        self.rig.simulation.queue(
            "compute",
            f"write {blocks}",
            writes=self.rig.cache.ranges(blocks),
            action=lambda: self.rig.fill(blocks, values),
        )

    def read(self, blocks, *, slow=False):
        rows = []
        self.rig.simulation.queue(
            "compute",
            f"read {blocks}",
            reads=self.rig.cache.ranges(blocks),
            action=lambda: rows.append(self.get_blocks(blocks)),
        )
        return lambda: rows[0]

    def set_blocks(self, blocks, rows):
        for block, row in zip(blocks, rows, strict=True):
            for layer, part in zip(self.rig.cache.layers, row.chunk(2), strict=True):
                layer[block] = part

    def get_blocks(self, blocks):
        return torch.stack([self.rig.cache.block(block) for block in blocks])

    def slot_bytes(self, slot):
        start = slot * self.rig.arena.slot_stride_bytes
        return self.rig.arena.slots[start : start + 2 * self.block_bytes]


@pytest.fixture(params=[1, 2])
def make_world(make_rig, request):
    rigs = []

    def make(method, *, slice_bytes=32 << 20, **options):
        options["options"] = TransferOptions(integrity="full", slice_bytes=slice_bytes)
        rigs.append(make_rig(request.param, method=method, **options))
        return SimulatedWorld(rigs[-1])

    yield make
    for rig in rigs:
        rig.simulation.check()

"""What the launch path does over many transfers, with a stand-in for the driver.

The stand-in takes over Triton for the whole process, so the transfers run in one of their own.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from kvferry.kernels.configurations import all_configurations
from kvferry.kernels.pages import COUNTS, POINTERS

SEED = 1803
NUM_TRANSFERS = 1000

TRANSFERS = """
import json, sys
import numpy as np
import torch
from kvferry.kernels import launching
from kvferry.kernels.checksum import op as checksum
from kvferry.kernels.copy import op as copy
from kvferry.kernels.entries import Entries
from kvferry.kernels.pack import op as pack
from kvferry.kernels.slices import slices
from kvferry.kernels.table import ChecksumSlots, Fragment, FragmentTable, HostSlots
from kvferry.profiling.standin_driver import count_compilations, install

seed, num_transfers, num_tables = map(int, sys.argv[1:])
driver = install()
compilations = count_compilations()
rng = np.random.default_rng(seed)
NUM_BLOCKS, NUM_SLOTS, CHUNK = 512, 128, 4


def new_group():
    num_fragments = int(rng.integers(1, 200)) if num_tables > 1 else 24
    page_bytes = int(rng.integers(1, 300)) * int(rng.choice([16, 4, 1])) if num_tables > 1 else 8192
    fragments = [Fragment(1 << 40, page_bytes, page_bytes)] * num_fragments
    table = FragmentTable(fragments, num_blocks=NUM_BLOCKS, device="cpu")
    memory = torch.empty(NUM_SLOTS * CHUNK * table.block_bytes, dtype=torch.uint8)
    slots = HostSlots(memory, CHUNK * table.block_bytes, NUM_SLOTS, CHUNK)
    values = torch.zeros(NUM_SLOTS, CHUNK * num_fragments, dtype=torch.int64)
    staging = torch.empty(NUM_BLOCKS * table.block_bytes, dtype=torch.uint8)
    return table, slots, ChecksumSlots(values, CHUNK), staging


def new_entries():
    # 1 and multiples of 16 are what Triton would specialise on.
    sizes = [1, 16, 32, int(rng.integers(1, NUM_BLOCKS))]
    n = int(rng.choice(sizes))
    places = rng.permutation(NUM_SLOTS * CHUNK)[:n]
    records = torch.empty(n + 1, 4, dtype=torch.int64)
    skip = int(rng.integers(0, 2))
    records[skip : n + skip, 0] = torch.from_numpy(rng.permutation(NUM_BLOCKS)[:n])
    records[skip : n + skip, 1] = torch.from_numpy(places // CHUNK)
    records[skip : n + skip, 2] = torch.from_numpy(places % CHUNK)
    return Entries(records[skip : n + skip])


groups = [new_group() for _ in range(num_tables)]
num_slices = 0
for index in range(num_transfers):
    # Without its own memory the launcher asks Triton again, which would specialise if it could.
    launching._variants.clear()
    table, slots, checksums, staging = groups[index % num_tables]
    entries = new_entries()
    flags = torch.zeros(entries.num_entries, dtype=torch.int32)
    slice_bytes = int(rng.integers(1, 1 << 22))
    num_cut = len(list(slices(entries.num_entries, table.block_bytes, slice_bytes)))
    do = int(rng.integers(0, 10))
    if do < 2:
        copy.store(table, slots, entries, slice_bytes=slice_bytes)
    elif do < 4:
        copy.load(table, slots, entries, slice_bytes=slice_bytes)
    elif do == 4:
        copy.store(table, slots, entries, checksums=checksums, slice_bytes=slice_bytes)
    elif do == 5:
        copy.load(
            table, slots, entries, checksums=checksums, flags=flags, slice_bytes=slice_bytes
        )
    elif do == 6:
        pack.pack(table, staging, entries)
    elif do == 7:
        pack.unpack(table, staging, entries)
    elif do == 8:
        checksum.write(table, entries, checksums, slice_bytes=slice_bytes)
    else:
        checksum.verify(table, entries, checksums, flags, slice_bytes=slice_bytes)
    num_slices += 1 if do in (6, 7) else num_cut
print(json.dumps([compilations(), driver.num_launches, num_slices]))
"""


ONE_SLICE = """
import json
import torch
from kvferry.kernels import launching
from kvferry.kernels.config import STAGED
from kvferry.kernels.copy import launch
from kvferry.kernels.entries import Entries
from kvferry.kernels.slices import Slice
from kvferry.kernels.table import Fragment, FragmentTable, HostSlots
from kvferry.profiling.standin_driver import install

driver = install()
table = FragmentTable([Fragment(1 << 40, 40000, 40000)] * 3, num_blocks=99, device="cpu")
slots = HostSlots(torch.empty(50 * 130000, dtype=torch.uint8), 130000, 50, 1)
entries = Entries.build(range(20), range(20), [0] * 20)
driver.record([64] * 6 + [32] * 4)
seen = []
for first, num_entries in ((2, 5), (7, 1), (2, 5), (7, 1)):
    if len(seen) < 2:
        launching._variants.clear()
    part = Slice(first, num_entries)
    launch.store(table, slots, entries, part, config=STAGED, checksums=None)
    seen.append([driver.last_grid, *driver.last_parameters])
launch.store(
    table, slots, entries, Slice(0, 3), Slice(3, 1), Slice(2, 5), config=STAGED, checksums=None
)
seen.append([driver.last_grid, *driver.last_parameters])
pointers = [t.data_ptr() for t in (table.records, slots.memory, entries.records)]
print(json.dumps([seen, pointers, len(launching._variants)]))
"""


def test_the_direct_way_hands_the_driver_what_the_front_door_does() -> None:
    seen, pointers, num_variants = run_alone(ONE_SLICE)
    at_the_door, again, direct, direct_again, last_of_three = seen
    assert at_the_door[1:4] == pointers
    assert at_the_door[4:8] == [130000, 120000, 0, 3]  # slot stride, block, checksums, fragments
    assert at_the_door[9:] == [2, 5]  # the slice
    assert again[9:] == [7, 1]
    assert at_the_door == direct == last_of_three
    assert again == direct_again
    assert num_variants == 1


def run_alone(script: str, *arguments: int) -> Any:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={**environment, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def run_transfers(num_tables: int) -> tuple[dict[str, int], int, int]:
    print(f"seed {SEED}")
    compilations, num_launches, num_slices = run_alone(TRANSFERS, SEED, NUM_TRANSFERS, num_tables)
    return compilations, num_launches, num_slices


def test_one_group_compiles_one_variant_with_checksums_and_one_without() -> None:
    compilations, num_launches, num_slices = run_transfers(num_tables=1)
    assert num_launches == num_slices, "one launch for each slice"
    assert set(compilations) == {
        "store_pages_kernel",
        "load_pages_kernel",
        "pack_pages_kernel",
        "unpack_pages_kernel",
        "checksum_pages_kernel",
    }
    assert all(count <= 2 for count in compilations.values()), compilations


def test_forty_groups_compile_no_more_than_what_is_listed_ahead_of_time() -> None:
    compilations, num_launches, num_slices = run_transfers(num_tables=40)
    assert num_launches == num_slices, "one launch for each slice"
    for name, count in compilations.items():
        listed = {c.name for c in all_configurations() if c.kernel.__name__ == name}
        assert count <= min(len(listed), 24), (name, count, len(listed))


KERNELS = {c.kernel.__name__: c.kernel for c in all_configurations()}


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_no_argument_is_specialised_on_its_value(name: str) -> None:
    """The launcher reuses a compiled kernel by its constexprs alone, and relies on this."""
    for parameter in KERNELS[name].params:
        if parameter.is_constexpr:
            continue
        assert parameter.name in COUNTS + POINTERS
        if parameter.name in COUNTS:
            assert parameter.do_not_specialize, parameter.name
        else:
            assert parameter.do_not_specialize_on_alignment, parameter.name

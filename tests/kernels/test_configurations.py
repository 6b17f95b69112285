"""Tile shapes, and that nothing a launcher can choose is missing from the list that is compiled."""

import math
import random

import pytest
from kvferry.kernels.config import (
    PACK,
    PLAIN,
    STAGED,
    CopyConfig,
    choose_shape,
    num_steps,
    tile_shapes,
)
from kvferry.kernels.configurations import all_configurations
from kvferry.kernels.launching import fit
from kvferry.kernels.table import ACCESS_WIDTHS_BYTES


def random_tables(count, seed):
    print(f"seed {seed}")
    source = random.Random(seed)
    for _ in range(count):
        num_fragments = int(2 ** source.uniform(0, 12))
        yield num_fragments, int(2 ** source.uniform(0, 21)), source.choice(ACCESS_WIDTHS_BYTES)


@pytest.mark.parametrize("backend", ["cuda", "hip"])
@pytest.mark.parametrize("config", [PLAIN, STAGED, PACK], ids=["plain", "staged", "pack"])
def test_every_choice_is_in_the_list(config, backend):
    listed = {
        (c.constexprs["ACCESS_BYTES"], c.constexprs["ROWS"], c.constexprs["ROW_BYTES"],
         c.constexprs["NUM_STAGES"], c.options["num_warps"])
        for c in all_configurations(backend)
    }  # fmt: skip
    for num_fragments, max_bytes, access in random_tables(500, seed=51):
        shape = fit(choose_shape(config, access, num_fragments, max_bytes), backend)
        assert (
            shape.access_bytes, shape.rows, shape.row_bytes, shape.num_stages, shape.num_warps
        ) in listed  # fmt: skip


def test_the_list_names_each_configuration_once():
    names = [c.name for c in all_configurations()]
    assert len(names) == len(set(names))
    for c in all_configurations():
        named = set(c.signature) | set(c.constexprs)
        assert named == set(c.kernel.arg_names)


def test_a_tile_gives_every_thread_whole_accesses():
    for config in (PLAIN, STAGED, PACK, CopyConfig(1, 65536, 3, 8)):
        for access in ACCESS_WIDTHS_BYTES:
            for shape in tile_shapes(config, access):
                assert shape.rows * shape.row_bytes >= access * 32 * shape.num_warps
                assert shape.rows & (shape.rows - 1) == 0
                assert shape.row_bytes & (shape.row_bytes - 1) == 0


def test_the_choice_needs_the_fewest_tiles():
    """Layers of 32 KiB one at a time, heads of 4 KiB by four, crumbs by 64."""
    for num_fragments, max_bytes, rows in (
        (64, 32768, 1), (64, 4096, 4), (1000, 20480, 4), (512, 2048, 16), (4000, 16, 64),
        (1, 1 << 20, 1), (1, 16, 1),
    ):  # fmt: skip
        assert choose_shape(PLAIN, 16, num_fragments, max_bytes).rows == rows
    for num_fragments, max_bytes, access in random_tables(200, seed=52):

        def tiles(shape, count=num_fragments, most=max_bytes):
            return math.ceil(count / shape.rows) * num_steps(shape, most)

        best = choose_shape(PLAIN, access, num_fragments, max_bytes)
        assert tiles(best) == min(map(tiles, tile_shapes(PLAIN, access)))

"""What every launcher works out: the tile shape, the number of steps and the grid."""

from functools import lru_cache

from .config import CopyConfig, TileShape, choose_shape, num_steps
from .slices import Slice
from .table import FragmentTable


@lru_cache(maxsize=1024)
def _work(
    config: CopyConfig, access_bytes: int, num_fragments: int, max_fragment_bytes: int
) -> tuple[TileShape, int, int]:
    shape = choose_shape(config, access_bytes, num_fragments, max_fragment_bytes)
    return shape, num_steps(shape, max_fragment_bytes), -(-num_fragments // shape.rows)


def plan(
    table: FragmentTable, part: Slice, config: CopyConfig
) -> tuple[TileShape, int, tuple[int]]:
    """The tile shape, the steps of an item, and the grid: no more programs than items."""
    shape, steps, num_groups = _work(
        config, table.access_bytes, table.num_fragments, table.max_fragment_bytes
    )
    return shape, steps, (min(config.num_programs, num_groups * part.num_entries),)

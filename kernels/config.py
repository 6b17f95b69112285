"""How a kernel runs: the tunables of a launch, and the tile shape that follows from a table."""

from dataclasses import dataclass

ROW_BYTES = (256, 1024, 4096)
"""Row lengths to choose from besides the whole tile; few, since each is a kernel of its own."""

NARROW_ROW_BYTES = (256,)
NARROW_TILE_BYTES = 1024
"""Accesses below 16 bytes are the exception, and get a small tile: it is held in registers."""


@dataclass(frozen=True, slots=True)
class CopyConfig:
    """The tunables of one launch.

    ``num_programs`` bounds the grid: programs are persistent and share the work. Each moves tiles
    of ``tile_bytes``. With ``num_stages`` of 1 a tile passes through registers; with more, up to
    ``num_stages - 1`` tiles are in flight through shared memory (on NVIDIA).
    """

    num_programs: int
    tile_bytes: int
    num_stages: int
    num_warps: int

    def __post_init__(self) -> None:
        if self.num_programs < 1:
            raise ValueError(f"num_programs must be at least 1, got {self.num_programs}")
        if not 1 <= self.num_stages <= 8:
            raise ValueError(f"num_stages must be 1 to 8, got {self.num_stages}")
        if self.num_warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"num_warps must be 1, 2, 4, 8 or 16, got {self.num_warps}")
        # Below this a thread has less than one 16-byte access, and the compiler narrows it.
        least = max(4096, 16 * 32 * self.num_warps)
        if self.tile_bytes < least or self.tile_bytes & (self.tile_bytes - 1):
            raise ValueError(
                f"tile_bytes must be a power of two of at least {least} for {self.num_warps} "
                f"warps, got {self.tile_bytes}"
            )


PLAIN = CopyConfig(num_programs=12, tile_bytes=16384, num_stages=1, num_warps=4)
STAGED = CopyConfig(num_programs=2, tile_bytes=16384, num_stages=4, num_warps=4)
PACK = CopyConfig(num_programs=32, tile_bytes=16384, num_stages=1, num_warps=4)
"""Packing stays inside the GPU, where more programs are needed to fill the memory's bandwidth."""


@dataclass(frozen=True, slots=True)
class TileShape:
    """A tile is ``rows`` fragments side by side, ``row_bytes`` of each: a kernel's constexprs."""

    access_bytes: int
    rows: int
    row_bytes: int
    num_stages: int
    num_warps: int


def tile_shapes(config: CopyConfig, access_bytes: int) -> tuple[TileShape, ...]:
    """Every shape that a launch with ``config`` can choose at this access width."""
    narrow = access_bytes < 16
    tile_bytes = min(config.tile_bytes, NARROW_TILE_BYTES) if narrow else config.tile_bytes
    lengths = NARROW_ROW_BYTES if narrow else ROW_BYTES
    return tuple(
        TileShape(
            access_bytes=access_bytes,
            rows=tile_bytes // row_bytes,
            row_bytes=row_bytes,
            num_stages=1 if narrow else config.num_stages,
            num_warps=config.num_warps,
        )
        for row_bytes in sorted({*lengths, tile_bytes})
        if row_bytes <= tile_bytes
    )


def choose_shape(
    config: CopyConfig, access_bytes: int, num_fragments: int, max_fragment_bytes: int
) -> TileShape:
    """The shape that needs the fewest tiles a block; of equals, the one with the longest rows."""

    def num_tiles(shape: TileShape) -> tuple[int, int]:
        groups = -(-num_fragments // shape.rows)
        return groups * num_steps(shape, max_fragment_bytes), -shape.row_bytes

    return min(tile_shapes(config, access_bytes), key=num_tiles)


def num_steps(shape: TileShape, max_fragment_bytes: int) -> int:
    """Tiles needed to move a group of fragments of which the longest has this many bytes."""
    return -(-max_fragment_bytes // shape.row_bytes)

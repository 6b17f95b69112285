"""Every kernel that a launcher can choose, for those who compile them all ahead of time."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .checksum.kernel import checksum_pages_kernel
from .config import PACK, PLAIN, STAGED, CopyConfig, TileShape, tile_shapes
from .copy.kernel import load_pages_kernel, store_pages_kernel
from .launching import compile_options, fit
from .pack.kernel import pack_pages_kernel, unpack_pages_kernel
from .pages import NO_CHECKSUMS, VERIFY_CHECKSUMS, WRITE_CHECKSUMS
from .table import ACCESS_WIDTHS_BYTES

_POINTER_TYPES = {
    "table_ptr": "*i64",
    "memory_ptr": "*u8",
    "entries_ptr": "*i64",
    "checksums_ptr": "*i64",
    "flags_ptr": "*i32",
}
_COUNT_TYPES = {
    "slot_stride_bytes": "i64",
    "block_bytes": "i64",
    "checksum_stride": "i64",
    "num_fragments": "i32",
    "num_steps": "i32",
    "first_entry": "i32",
    "num_entries": "i32",
}


@dataclass(frozen=True, slots=True)
class KernelConfiguration:
    """One kernel as a launcher compiles it.

    ``signature`` gives the type of every argument that is not in ``constexprs``; an argument passed
    as None is a constexpr. ``aligned`` names the arguments specialised on a 16-byte alignment.
    ``access_bytes`` is the width that every bulk access must have, ``in_flight_bytes`` what one
    program can have under way.
    """

    name: str
    kernel: Any  # Triton's JITFunction, which is untyped
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    aligned: tuple[str, ...]
    options: Mapping[str, int]
    num_stages: int
    access_bytes: int
    in_flight_bytes: int


_COPY_MODES = (
    (store_pages_kernel, NO_CHECKSUMS.value),
    (store_pages_kernel, WRITE_CHECKSUMS.value),
    (load_pages_kernel, NO_CHECKSUMS.value),
    (load_pages_kernel, VERIFY_CHECKSUMS.value),
)
_PACK_MODES = (
    (pack_pages_kernel, NO_CHECKSUMS.value),
    (pack_pages_kernel, WRITE_CHECKSUMS.value),
    (unpack_pages_kernel, NO_CHECKSUMS.value),
    (unpack_pages_kernel, VERIFY_CHECKSUMS.value),
    (checksum_pages_kernel, WRITE_CHECKSUMS.value),
    (checksum_pages_kernel, VERIFY_CHECKSUMS.value),
)


def all_configurations(
    backend: str = "cuda",
    *,
    copy_configs: tuple[CopyConfig, ...] = (PLAIN, STAGED),
    pack_config: CopyConfig = PACK,
) -> Iterator[KernelConfiguration]:
    """Every kernel that these configs can lead to on a backend (``cuda`` or ``hip``), each once."""
    for modes, configs in ((_COPY_MODES, copy_configs), (_PACK_MODES, (pack_config,))):
        shapes = {
            fit(shape, backend): None
            for config in configs
            for access_bytes in ACCESS_WIDTHS_BYTES
            for shape in tile_shapes(config, access_bytes)
        }
        for kernel, checksums in modes:
            for shape in shapes:
                yield _configuration(kernel, checksums, shape, backend)


def _configuration(
    kernel: Any, checksums: int, shape: TileShape, backend: str
) -> KernelConfiguration:
    constexprs: dict[str, Any] = {
        "ACCESS_BYTES": shape.access_bytes,
        "ROWS": shape.rows,
        "ROW_BYTES": shape.row_bytes,
        "CHECKSUMS": checksums,
        "NUM_STAGES": shape.num_stages,
    }
    if checksums == NO_CHECKSUMS.value:
        constexprs["checksums_ptr"] = None
    if checksums != VERIFY_CHECKSUMS.value:
        constexprs["flags_ptr"] = None
    types = _POINTER_TYPES | _COUNT_TYPES
    mode = {0: "", 1: "+checksum", 2: "+verify"}[checksums]
    return KernelConfiguration(
        name=(
            f"{kernel.__name__.removesuffix('_kernel')}{mode} {shape.rows}x{shape.row_bytes}"
            f"/{shape.access_bytes} stages={shape.num_stages} warps={shape.num_warps}"
        ),
        kernel=kernel,
        signature={a: types[a] for a in kernel.arg_names if a not in constexprs},
        constexprs=constexprs,
        aligned=(),
        options=compile_options(shape, backend),
        num_stages=shape.num_stages,
        access_bytes=shape.access_bytes,
        in_flight_bytes=shape.rows * shape.row_bytes * max(1, shape.num_stages - 1),
    )

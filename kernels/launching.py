"""From slices to launches: the tile shape, the grid, and the shortest way into the driver.

A transfer is many slices, and a launch through Triton's front door costs about 15 us of CPU (Triton
3.9 on an EPYC at 2.6 GHz, November 2026): it works out anew which variant of the kernel the
arguments need. Here they cannot need another one: counts and alignments are never specialised on
(``COUNTS``, ``POINTERS``), dtypes are checked, and constexprs are part of the key below. So the
first launch of a variant takes the front door, and later ones call the compiled kernel directly,
for about 2 us each.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.runtime import JITFunction, driver

from .config import CopyConfig, TileShape, choose_shape, num_steps
from .slices import Slice
from .table import FragmentTable


class _Direct(NamedTuple):
    """What the launcher in a compiled kernel is called with."""

    run: Any
    function: int
    metadata: Any


_REGISTERS = 65536
"""Of a multiprocessor, from sm_80 to sm_120: a program that wants more cannot be launched."""

_variants: dict[tuple[Any, ...], _Direct] = {}
"""By kernel, device, which pointers are None, constexprs and warps."""


def backend() -> str:
    """The compiler backend that this torch launches on: ``cuda`` or ``hip``."""
    return "hip" if torch.version.hip else "cuda"


def fit(shape: TileShape, target: str) -> TileShape:
    """The shape as a backend runs it: AMD's pipeline holds its stages in registers, and spills."""
    return replace(shape, num_stages=1) if target == "hip" else shape


def compile_options(shape: TileShape, target: str) -> dict[str, int]:
    """Triton's options for a kernel of this shape.

    The register limit is the hardware's own. Unless it is named, ptxas prefers a few spills to a
    few more registers, for an occupancy that one persistent program a multiprocessor cannot use.
    """
    options = {"num_warps": shape.num_warps}
    if target == "cuda":
        options["maxnreg"] = min(255, _REGISTERS // (32 * shape.num_warps))
    return options


@lru_cache(maxsize=1024)
def _work(
    config: CopyConfig, access_bytes: int, num_fragments: int, max_fragment_bytes: int
) -> tuple[TileShape, int, int]:
    shape = choose_shape(config, access_bytes, num_fragments, max_fragment_bytes)
    steps = num_steps(shape, max_fragment_bytes)
    return fit(shape, backend()), steps, -(-num_fragments // shape.rows)


def launch(
    kernel: Any,
    table: FragmentTable,
    parts: Iterable[Slice],
    config: CopyConfig,
    *,
    pointers: tuple[torch.Tensor | None, ...],
    counts: tuple[int, ...],
    checksums: int,
) -> None:
    """One launch for each slice, on the current stream; no more programs than there are items.

    ``pointers`` and ``counts`` are the kernel's own arguments before ``num_fragments``, in order.
    """
    shape, steps, num_groups = _work(
        config, table.access_bytes, table.num_fragments, table.max_fragment_bytes
    )
    head = (*pointers, *counts, table.num_fragments, steps)
    tail = (shape.access_bytes, shape.rows, shape.row_bytes, checksums, shape.num_stages)
    direct: _Direct | None = None
    key: tuple[Any, ...] = ()
    if _goes_direct(kernel):
        device = driver.active.get_current_device()
        stream = driver.active.get_current_stream(device)
        key = (kernel, device, *[p is None for p in pointers], *tail, shape.num_warps)
        direct = _variants.get(key)
    for first, num_entries in parts:
        num_programs = min(config.num_programs, num_groups * num_entries)
        if direct is None:
            options = compile_options(shape, backend())
            compiled = kernel[(num_programs,)](*head, first, num_entries, *tail, **options)
            if key:
                direct = _Direct(compiled.run, compiled.function, compiled.packed_metadata)
                _variants[key] = direct
        else:
            run, function, metadata = direct
            run(
                num_programs, 1, 1, stream, function, metadata, None, None, None,
                *head, first, num_entries, *tail,
            )  # fmt: skip


def _goes_direct(kernel: Any) -> bool:
    """Not in the interpreter, and not while a profiler wants to see launches at the front door."""
    return isinstance(kernel, JITFunction) and not (
        knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls
    )

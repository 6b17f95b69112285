"""The CPU device's copy loop, compiled by numba and run without the GIL.

Importing this needs numba. One call moves a range of entries: one ``memcpy`` for each fragment,
with neighbours merged as they come.
"""

from typing import Any

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from llvmlite.binding import ffi  # type: ignore[import-untyped]
from numba.core import cgutils
from numba.core.types import int64, void
from numba.extending import intrinsic


def _answer_no_special_names(proxy: Any) -> None:
    """Let llvmlite's library proxy say that it has no ``__dict__``.

    It answers every name, ``__dict__`` too, with a function. Whoever looks through all modules for
    values with a ``__dict__`` stumbles over that: vLLM's CPU build does when a second engine starts
    in a process, and stops with an AttributeError (seen with vLLM 0.32 and llvmlite 0.47).
    """
    answer = proxy.__getattr__

    def __getattr__(self: Any, name: str) -> Any:  # noqa: N807
        if name.startswith("__"):
            raise AttributeError(name)
        return answer(self, name)

    proxy.__getattr__ = __getattr__


if hasattr(ffi.lib, "__dict__"):
    _answer_no_special_names(type(ffi.lib))


@intrinsic  # type: ignore[untyped-decorator]
def _copy_bytes(typing_context: Any, target: Any, source: Any, num_bytes: Any) -> Any:
    """``memcpy`` between two addresses."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte_ptr = ir.IntType(8).as_pointer()
        cgutils.raw_memcpy(
            builder,
            builder.inttoptr(args[0], byte_ptr),
            builder.inttoptr(args[1], byte_ptr),
            args[2],
            1,
        )
        return context.get_dummy_value()

    return void(int64, int64, int64), generate


def _copy_entries(
    store: Any, bases: Any, strides: Any, sizes: Any, block_bytes: Any,
    slots_address: Any, slot_stride: Any, blocks: Any, slots: Any, positions: Any,
) -> None:  # fmt: skip
    """Move entries between blocks and slots (``store``: towards the slots).

    ``bases``, ``strides``, ``sizes`` are ``[num_fragments]``, ``blocks``, ``slots``, ``positions``
    ``[num_entries]``, all int64.
    """
    source, target, length = int64(0), int64(0), int64(0)
    for entry in range(blocks.size):
        host = slots_address + slots[entry] * slot_stride + positions[entry] * block_bytes
        for fragment in range(bases.size):
            page = bases[fragment] + blocks[entry] * strides[fragment]
            size = sizes[fragment]
            read = page if store else host
            written = host if store else page
            if read == source + length and written == target + length:
                length += size
            else:
                if length:
                    _copy_bytes(target, source, length)
                source, target, length = read, written, size
            host += size
    if length:
        _copy_bytes(target, source, length)


_vector = int64[::1]
_COPY_SIGNATURE = void(
    numba.boolean, _vector, _vector, _vector, int64, int64, int64, _vector, _vector, _vector
)


def _compile(function: Any, signature: Any) -> Any:
    """Compile now, kept on disk where a place for it can be written."""
    try:
        return numba.njit(signature, nogil=True, cache=True)(function)
    except RuntimeError:  # numba found no folder for its cache
        return numba.njit(signature, nogil=True)(function)


copy_entries = _compile(_copy_entries, _COPY_SIGNATURE)

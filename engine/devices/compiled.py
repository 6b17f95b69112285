"""The CPU device's copy loop, compiled by numba and run without the GIL.

Importing this needs numba. One call moves a range of entries: one ``memcpy`` for each fragment,
with neighbours merged as they come, or for runs of some KiB a loop that writes past the cache: a
cache line that is written whole need not be read first, and the model keeps its cache (measured on
an AMD EPYC 7003 or 9004 class core, 2026-11-30: 4 KiB pages, share of one large memcpy, 0.67 with
memcpy and 0.8 to 1.0 with this loop). Checked entries are summed up right behind their copy, from
the side that was read; the checksum is that of ``kernels/checksum/reference.py``.
"""

from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from llvmlite.binding import ffi  # type: ignore[import-untyped]
from numba.core import cgutils
from numba.core.types import boolean, int64, uint64, void, voidptr
from numba.extending import intrinsic

if numba.config.DISABLE_JIT:  # the loop would be Python, which has no raw addresses
    raise ImportError("NUMBA_DISABLE_JIT is set")

_Function = TypeVar("_Function", bound=Callable[..., Any])

STREAM_BYTES: Final = 2 << 10
"""From here on a run goes past the cache; below it the loop costs more than it saves."""

STEP_BYTES: Final = 256
_LINE_BYTES: Final = 64
_PREFETCH_BYTES: Final = 512

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


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


@intrinsic  # type: ignore[untyped-decorator]
def _stream_bytes(typing_context: Any, target: Any, source: Any) -> Any:
    """Copy ``STEP_BYTES`` from any address to a 64-byte boundary, past the cache."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        line = ir.VectorType(ir.IntType(64), _LINE_BYTES // 8)
        offsets = [ir.Constant(ir.IntType(64), at) for at in range(0, STEP_BYTES, _LINE_BYTES)]
        sources, targets = (
            [builder.inttoptr(builder.add(base, at), line.as_pointer()) for at in offsets]
            for base in (args[1], args[0])
        )
        lines = [builder.load(at, align=1) for at in sources]
        hint = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        for value, at in zip(lines, targets, strict=True):
            builder.store(value, at, align=_LINE_BYTES).set_metadata("nontemporal", hint)
        return context.get_dummy_value()

    return void(int64, int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _prefetch(typing_context: Any, address: Any) -> Any:
    """Ask for the first lines at an address (any address: a wrong one does nothing)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte_ptr, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte_ptr, flag, flag, flag])
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte_ptr], kind)
        flags = [ir.Constant(flag, value) for value in (0, 3, 1)]  # read, keep, data
        for at in range(0, _PREFETCH_BYTES, _LINE_BYTES):
            address = builder.add(args[0], ir.Constant(ir.IntType(64), at))
            builder.call(function, [builder.inttoptr(address, byte_ptr), *flags])
        return context.get_dummy_value()

    return void(int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _fence(typing_context: Any) -> Any:
    """Writes past the cache become visible before whatever follows."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return void(), generate


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(typing_context: Any, address: Any) -> Any:
    """An address as a pointer."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return voidptr(int64), generate


def _compile(signature: Any) -> Callable[[_Function], _Function]:
    """Compile now, kept on disk where a place for it can be written."""

    def decorate(function: _Function) -> _Function:
        compiled: Any
        try:
            compiled = numba.njit(signature, nogil=True, cache=True)(function)
        except RuntimeError:  # numba found no folder for its cache
            compiled = numba.njit(signature, nogil=True)(function)
        return cast(_Function, compiled)

    return decorate


@_compile(uint64(uint64))
def _mix(value: Any) -> Any:
    value = (value ^ (value >> np.uint64(30))) * _FIRST
    value = (value ^ (value >> np.uint64(27))) * _SECOND
    return value ^ (value >> np.uint64(31))


@_compile(uint64(int64, int64, uint64))
def _sum_up(address: Any, num_bytes: Any, key: Any) -> Any:
    """The checksum of one fragment with this key."""
    num_words = num_bytes // 8
    words = numba.carray(_pointer(address), num_words, np.uint64)
    total = np.uint64(0)
    counter = key
    for index in range(num_words):
        total += _mix(words[index] ^ (key + np.uint64(index) * _STEP))
    counter = key + np.uint64(num_words) * _STEP
    if num_bytes % 8:
        rest = numba.carray(_pointer(address + num_words * 8), num_bytes % 8, np.uint8)
        word = np.uint64(0)
        for index in range(num_bytes % 8):
            word |= np.uint64(rest[index]) << np.uint64(8 * index)
        total += _mix(word ^ counter)
    return total


@_compile(void(int64, int64, int64))
def _copy_run(target: Any, source: Any, num_bytes: Any) -> None:
    if num_bytes < STREAM_BYTES:
        _copy_bytes(target, source, num_bytes)
        return
    head = -target & (_LINE_BYTES - 1)
    body = (num_bytes - head) // STEP_BYTES * STEP_BYTES
    _copy_bytes(target, source, head)
    for at in range(head, head + body, STEP_BYTES):
        _stream_bytes(target + at, source + at)
    done = head + body
    _copy_bytes(target + done, source + done, num_bytes - done)


_vector = int64[::1]


@_compile(boolean(boolean, _vector, _vector, _vector, int64, int64, int64, int64, int64))
def _check_entry(
    store: Any, bases: Any, strides: Any, sizes: Any, block: Any, host: Any, seed: Any,
    position: Any, checksums_address: Any,
) -> Any:  # fmt: skip
    """Write (``store``, from the pages) or verify (from the slot) the checksums of one block.

    False for a mismatch.
    """
    stored = numba.carray(_pointer(checksums_address), bases.size, np.uint64)
    place = _mix(np.uint64(seed) + np.uint64(position) * _STEP)
    good = True
    for fragment in range(bases.size):
        key = _mix(place + np.uint64(fragment) * _STEP) ^ np.uint64(sizes[fragment])
        read = bases[fragment] + block * strides[fragment] if store else host
        total = _sum_up(read, sizes[fragment], key)
        if store:
            stored[fragment] = total
        elif stored[fragment] != total:
            good = False
        host += sizes[fragment]
    return good


@_compile(
    void(
        boolean, _vector, _vector, _vector, int64, int64, int64, _vector, _vector, _vector,
        _vector, boolean[::1], int64, int64, boolean[::1],
    )
)  # fmt: skip
def copy_entries(
    store: Any, bases: Any, strides: Any, sizes: Any, block_bytes: Any,
    slots_address: Any, slot_stride: Any, blocks: Any, slots: Any, positions: Any,
    seeds: Any, checked: Any, checksums_address: Any, checksum_stride: Any, corrupt: Any,
) -> None:  # fmt: skip
    """Move entries between blocks and slots (``store``: towards the slots).

    ``bases``, ``strides``, ``sizes`` are int64 ``[num_fragments]``; ``blocks``, ``slots``,
    ``positions``, ``seeds`` int64 ``[num_entries]``, ``checked`` and ``corrupt`` bool
    ``[num_entries]``; ``corrupt`` is set where a checked entry that was loaded does not match.
    """
    source, target, length = int64(0), int64(0), int64(0)
    for entry in range(blocks.size):
        place = slots_address + slots[entry] * slot_stride + positions[entry] * block_bytes
        host = place
        for fragment in range(bases.size):
            page = bases[fragment] + blocks[entry] * strides[fragment]
            size = sizes[fragment]
            read = page if store else host
            written = host if store else page
            if read == source + length and written == target + length:
                length += size
            else:
                _prefetch(read)
                _copy_run(target, source, length)
                source, target, length = read, written, size
            host += size
        if checked[entry]:
            _copy_run(target, source, length)
            length = int64(0)
            row = slots[entry] * checksum_stride + positions[entry] * bases.size * 8
            corrupt[entry] = not _check_entry(
                store, bases, strides, sizes, blocks[entry], place, seeds[entry],
                positions[entry], checksums_address + row,
            )  # fmt: skip
    _copy_run(target, source, length)
    _fence()

"""Anonymous memory from the kernel: map it, advise on it, fault it in, see it as a tensor.

Only Linux; constants are from its ``mman-common.h`` and ``mempolicy.h``.
"""

import ctypes
import logging
import mmap
import platform
from typing import Final

import torch

from .errors import CapacityError

logger = logging.getLogger(__name__)

PAGE_BYTES: Final = mmap.PAGESIZE
HUGE_PAGE_BYTES: Final = 2 << 20

_MADV_DONTFORK: Final = 10
_MADV_HUGEPAGE: Final = 14
_MADV_DONTDUMP: Final = 16
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14
_MAP_NORESERVE: Final = 0x4000
_MPOL_PREFERRED: Final = 1
_SYS_MBIND: Final = {"x86_64": 237, "aarch64": 235}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.syscall.restype = ctypes.c_long


def map_memory(num_bytes: int) -> int:
    """Map this many bytes (whole pages), from a huge-page boundary when large.

    The memory stays out of core dumps and forked children. Raises ``CapacityError``.
    """
    large = num_bytes >= HUGE_PAGE_BYTES
    slack = HUGE_PAGE_BYTES if large else 0
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    address = _libc.mmap(None, num_bytes + slack, protection, flags, -1, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        raise CapacityError(
            f"mapping {num_bytes} bytes of host memory failed: errno {ctypes.get_errno()}"
        )
    base = int(address)
    if large:
        base = -(-base // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        unmap_memory(address, base - address)
        unmap_memory(base + num_bytes, address + slack - base)
    advices = [_MADV_DONTDUMP, _MADV_DONTFORK] + ([_MADV_HUGEPAGE] if large else [])
    for advice in advices:
        if _libc.madvise(base, num_bytes, advice):
            logger.debug("madvise %d refused: errno %d", advice, ctypes.get_errno())
    return base


def unmap_memory(address: int, num_bytes: int) -> None:
    """Give the memory back; nothing happens for no bytes."""
    if num_bytes and _libc.munmap(address, num_bytes):
        logger.error("unmapping %d bytes failed: errno %d", num_bytes, ctypes.get_errno())


def populate(address: int, num_bytes: int) -> None:
    """Fault pages in for writing (fresh memory only: it may be zeroed). Runs without the GIL."""
    if _libc.madvise(address, num_bytes, _MADV_POPULATE_WRITE):
        ctypes.memset(address, 0, num_bytes)


def prefer_node(address: int, num_bytes: int, node: int) -> None:
    """Let pages that are not there yet come from this NUMA node if they can."""
    number = _SYS_MBIND.get(platform.machine())
    if number is None or not 0 <= node < 64:
        return
    mask = ctypes.c_uint64(1 << node)
    arguments = (address, num_bytes, _MPOL_PREFERRED)
    failed = _libc.syscall(
        ctypes.c_long(number),
        *(ctypes.c_ulong(argument) for argument in arguments),
        ctypes.byref(mask),
        ctypes.c_ulong(65),
        ctypes.c_uint(0),
    )
    if failed:
        logger.debug("binding to NUMA node %d refused: errno %d", node, ctypes.get_errno())


def tensor_at(address: int, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
    """A 1-D tensor over memory that it does not own; empty for no bytes."""
    if num_bytes == 0:
        return torch.empty(0, dtype=dtype)
    buffer = (ctypes.c_char * num_bytes).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype)

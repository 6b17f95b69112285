"""A stand-in for the CUDA driver, so that Triton's real launch path runs where there is no GPU.

Triton's launcher is C code that is linked against ``libcuda.so.1``. We build a small library of
that name whose calls succeed and do nothing, load it, and make Triton's own ``CudaDriver`` the
active one on top of it. Everything above the driver API is then the code that runs on a GPU:
specialisation of the arguments, compilation to a cubin, the kernel cache, packing of the arguments
in C. Missing are the driver call itself and the kernel's work: nothing is copied.

CPU tensors are taken as device tensors: a pointer is translated to itself. ``install`` changes the
whole process and cannot be undone, so run it in a process of its own.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# Attribute numbers are those of CUdevice_attribute and CUfunction_attribute in cuda.h. The figures
# describe an H100 SXM: Triton reads the shared memory, register and thread limits.
_LIBCUDA_SOURCE = r"""
#include <stdint.h>
#include <string.h>
typedef struct { unsigned grid[3], block[3], shared_bytes; } config_head;
static long long num_launches, num_modules;
static unsigned last_grid;
static int capability = 90;
static int num_recorded;
static uint64_t recorded[64];

void standin_set_capability(int value) { capability = value; }
long long standin_num_launches(void) { return num_launches; }
long long standin_num_modules(void) { return num_modules; }
unsigned standin_last_grid(void) { return last_grid; }
void standin_record(int num_parameters) { num_recorded = num_parameters; }
uint64_t standin_parameter(int index) { return recorded[index]; }

int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)1; return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuCtxGetLimit(uint64_t *value, int limit) { *value = 0; return 0; }
int cuCtxSetLimit(int limit, uint64_t value) { return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  switch (attribute) {
  case 10: *value = 32; break;              /* warp size */
  case 12: *value = 65536; break;           /* registers per block */
  case 16: *value = 132; break;             /* multiprocessors */
  case 75: *value = capability / 10; break;
  case 76: *value = capability % 10; break;
  case 81: *value = 228 * 1024; break;      /* shared memory per multiprocessor */
  case 97: *value = 227 * 1024; break;      /* shared memory per block, opted in */
  default: *value = 1;
  }
  return 0;
}
int cuFuncGetAttribute(int *value, int attribute, void *function) {
  *value = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0;
  return 0;
}
int cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
int cuFuncSetCacheConfig(void *function, int config) { return 0; }
int cuGetErrorString(int error, const char **text) { *text = "stand-in"; return 0; }
int cuModuleLoadData(void **module, const void *image) {
  *module = (void *)++num_modules;
  return 0;
}
int cuModuleUnload(void *module) { return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) {
  *function = module;
  return 0;
}
int cuOccupancyMaxActiveClusters(int *clusters, void *function, const void *config) {
  *clusters = 1;
  return 0;
}
int cuPointerGetAttribute(void *data, int attribute, uint64_t pointer) {
  *(uint64_t *)data = pointer;
  return 0;
}
int cuStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
int cuTensorMapEncodeTiled(void) { return 801; }   /* CUDA_ERROR_NOT_SUPPORTED */
int cuTensorMapEncodeIm2col(void) { return 801; }
int cuLaunchKernelEx(const config_head *config, void *function, void **params, void **extra) {
  last_grid = config->grid[0];
  for (int i = 0; i < num_recorded; ++i) memcpy(&recorded[i], params[i], 8);
  ++num_launches;
  return 0;
}
"""


class StandinDriver:
    """What the stand-in library has counted since the process began."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.standin_num_launches.restype = ctypes.c_longlong
        library.standin_num_modules.restype = ctypes.c_longlong
        library.standin_last_grid.restype = ctypes.c_uint
        library.standin_parameter.restype = ctypes.c_uint64
        self._widths_bits: tuple[int, ...] = ()

    @property
    def num_launches(self) -> int:
        """Launches that reached the driver API."""
        return int(self._library.standin_num_launches())

    @property
    def num_modules(self) -> int:
        """Binaries loaded: one for each kernel variant that was launched."""
        return int(self._library.standin_num_modules())

    @property
    def last_grid(self) -> int:
        """Number of programs of the latest launch, on the first axis."""
        return int(self._library.standin_last_grid())

    def record(self, widths_bits: Sequence[int]) -> None:
        """From the next launch on, keep its first parameters, which are so many bits wide."""
        if len(widths_bits) > 64:
            raise ValueError(f"at most 64 parameters can be recorded, got {len(widths_bits)}")
        self._widths_bits = tuple(widths_bits)
        self._library.standin_record(len(widths_bits))

    @property
    def last_parameters(self) -> list[int]:
        """The recorded parameters of the latest launch, as unsigned numbers."""
        return [
            int(self._library.standin_parameter(index)) & ((1 << bits) - 1)
            for index, bits in enumerate(self._widths_bits)
        ]


def install(capability: int = 90) -> StandinDriver:
    """Build the stand-in and make it Triton's active driver; the target is sm_`capability`.

    Raises RuntimeError when Triton's interpreter is on, when a real driver is loaded already, or
    when there is no C compiler (Triton itself needs one for its launcher).
    """
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise RuntimeError("TRITON_INTERPRET is set: the interpreter never reaches a driver")
    if "libcuda.so.1" in Path("/proc/self/maps").read_text():
        raise RuntimeError("a CUDA driver is loaded in this process: the stand-in is for none")
    folder = Path(tempfile.mkdtemp(prefix="kvferry-standin-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = ctypes.CDLL(str(_build_library(folder)), mode=ctypes.RTLD_GLOBAL)
    library.standin_set_capability(capability)

    from triton import knobs
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import driver

    knobs.nvidia.libcuda_path = str(folder)
    nvidia.libcuda_dirs.cache_clear()
    nvidia.library_dirs.cache_clear()
    driver.set_active(_cuda_driver(nvidia, capability))
    return StandinDriver(library)


def count_compilations() -> Callable[[], dict[str, int]]:
    """Start counting; the function returned gives compilations per kernel name until now.

    A variant found in Triton's cache on disk counts as well: in an empty cache it would compile.
    """
    from triton import knobs

    counts: dict[str, int] = {}

    def hook(*_: Any, fn: Any, **__: Any) -> None:
        counts[fn.name] = counts.get(fn.name, 0) + 1

    knobs.runtime.jit_post_compile_hook = hook
    return lambda: dict(counts)


def _build_library(folder: Path) -> Path:
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError("no C compiler (gcc, clang or $CC); Triton's launcher needs one too")
    source, library = folder / "standin.c", folder / "libcuda.so.1"
    source.write_text(_LIBCUDA_SOURCE)
    command = [compiler, "-shared", "-fPIC", "-O2", "-w", str(source), "-o", str(library)]
    # The soname lets the launcher that Triton links against this library find it already loaded.
    subprocess.run([*command, "-Wl,-soname,libcuda.so.1"], check=True)
    return library


def _cuda_driver(nvidia: Any, capability: int) -> Any:
    """Triton's CUDA driver, asking nothing of torch.cuda, which a CPU build does not have."""

    class Driver(nvidia.CudaDriver):  # type: ignore[misc]
        def __init__(self) -> None:
            self.utils = nvidia.CudaUtils()
            self.launcher_cls = nvidia.CudaLauncher
            self.get_current_device = lambda: 0
            self.set_current_device = lambda device: None
            self.get_current_stream = lambda device: 0
            self.get_device_capability = lambda device: divmod(capability, 10)

    return Driver()

"""The runtime protocol on CUDA: torch's streams and events, the driver's copies, registered memory.

Thin on purpose: this is the only part of the CUDA device that the simulator does not run. A thread
of the arena calls ``register``, so nothing here relies on which device a thread has made current.
"""

import ctypes
import importlib
import time
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch

from .runtime import Copies, Event, KernelLaunch, Priority, Stream

_cuda: Any = torch.cuda  # much of it carries no types
_PORTABLE: Final = 1  # cudaHostRegisterPortable
_POLL_S: Final = 50e-6
_TORCH_PRIORITY: Final = {Priority.LOW: 0, Priority.HIGH: -1}  # in torch, lower goes first


class CudaRuntime:
    """See the module docstring. ``device`` must be a CUDA device with an index."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda" or device.index is None:
            raise ValueError(f"device is {device}; allowed: a CUDA device with its index")
        self._device = device
        self._driver = _find_driver()
        self._attributes: Any = None
        if self._driver is not None:
            order = self._driver.CUmemcpySrcAccessOrder
            self._attributes = self._driver.CUmemcpyAttributes()
            self._attributes.srcAccessOrder = order.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        self._libcuda = ctypes.CDLL("libcuda.so.1")
        self._libcuda.cuMemcpyAsync.argtypes = [
            ctypes.c_uint64,
            ctypes.c_uint64,
            ctypes.c_size_t,
            ctypes.c_void_p,
        ]

    @property
    def identity(self) -> str:
        version = Path("/proc/driver/nvidia/version")
        driver = version.read_text().splitlines()[0] if version.exists() else "driver unknown"
        batched = "batched" if self._driver is not None else "single copies"
        name = torch.cuda.get_device_name(self._device)
        return f"{name}; {driver}; CUDA {torch.version.cuda}; {batched}"

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def numa_node(self) -> int | None:
        """From sysfs, by the PCI address; None where the system does not say."""
        properties = _cuda.get_device_properties(self._device)
        try:
            address = (
                f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:"
                f"{properties.pci_device_id:02x}.0"
            )
            node = int(Path(f"/sys/bus/pci/devices/{address}/numa_node").read_text())
        except (AttributeError, OSError, ValueError):
            return None
        return node if node >= 0 else None

    def now_s(self) -> float:
        return time.monotonic()

    def compute_stream(self) -> Stream:
        return torch.cuda.current_stream(self._device)

    def create_stream(self, name: str, priority: Priority) -> Stream:
        return cast(Stream, _cuda.Stream(self._device, priority=_TORCH_PRIORITY[priority]))

    def create_event(self, *, timed: bool = False) -> Event:
        return cast(Event, _cuda.Event(enable_timing=timed))

    def record(self, event: Event, stream: Stream) -> None:
        _event(event).record(_stream(stream))

    def wait(self, stream: Stream, event: Event) -> None:
        _stream(stream).wait_event(_event(event))

    def is_done(self, event: Event) -> bool:
        return bool(_event(event).query())

    def wait_on_host(self, event: Event, timeout_s: float) -> bool:
        """Polls: CUDA knows no wait with a timeout."""
        deadline_s = time.monotonic() + timeout_s
        while not _event(event).query():
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(_POLL_S)  # CUDA's own wait could not be left at the deadline
        return True

    def elapsed_s(self, start: Event, end: Event) -> float:
        return float(_event(start).elapsed_time(_event(end))) / 1e3

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def allocate_pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def write_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def read_host(self, source: torch.Tensor) -> torch.Tensor:
        return source.clone()

    def register(self, address: int, num_bytes: int) -> None:
        with torch.cuda.device(self._device):
            code = int(_cuda.cudart().cudaHostRegister(address, num_bytes, _PORTABLE))
            if code:
                self._clear_error()
                raise RuntimeError(f"cudaHostRegister: error {code} for {num_bytes} bytes")

    def unregister(self, address: int) -> None:
        with torch.cuda.device(self._device):
            code = int(_cuda.cudart().cudaHostUnregister(address))
            if code:
                self._clear_error()
                raise RuntimeError(f"cudaHostUnregister: error {code} for {address:#x}")

    def copy(self, stream: Stream, copies: Copies) -> None:
        handle = _stream(stream).cuda_stream
        with torch.cuda.device(self._device):
            if copies.pinned and self._driver is not None:
                self._copy_batch(handle, copies)
            else:
                self._copy_singly(handle, copies)

    def launch(self, stream: Stream, kernel: KernelLaunch) -> None:
        with torch.cuda.stream(_stream(stream)):
            kernel.run()

    def close(self) -> None:
        """Streams, events and buffers go with the objects that hold them."""

    def _copy_batch(self, handle: int, copies: Copies) -> None:
        driver, count = self._driver, len(copies.sizes)
        result = driver.cuMemcpyBatchAsync(
            [driver.CUdeviceptr(address) for address in copies.targets.tolist()],
            [driver.CUdeviceptr(address) for address in copies.sources.tolist()],
            copies.sizes.tolist(),
            count,
            [self._attributes],
            [0],
            1,
            driver.CUstream(handle),
        )
        # CUDA 12 also tells the index of the copy that failed.
        if int(result[0]):
            raise RuntimeError(f"cuMemcpyBatchAsync of {count} copies: {result}")

    def _copy_singly(self, handle: int, copies: Copies) -> None:
        """One call a copy. From or to pageable memory the driver may let the host wait."""
        columns = np.stack((copies.targets, copies.sources, copies.sizes), axis=1)
        for target, source, size in columns.tolist():
            code = self._libcuda.cuMemcpyAsync(target, source, size, handle)
            if code:
                raise RuntimeError(f"cuMemcpyAsync of {size} bytes: error {code}")

    def _clear_error(self) -> None:
        """The runtime keeps the last error of a thread, and the next check would raise it."""
        runtime = _loaded_cudart()
        if runtime is not None:
            runtime.cudaGetLastError()
            return
        try:
            torch.cuda.current_stream(self._device).query()
        except RuntimeError:
            return  # torch has taken the error with it


def _find_driver() -> Any:
    """``cuda.bindings.driver`` where it is installed and knows batched copies, else None."""
    try:
        driver = importlib.import_module("cuda.bindings.driver")
    except ImportError:
        return None
    return driver if hasattr(driver, "cuMemcpyBatchAsync") else None


def _loaded_cudart() -> ctypes.CDLL | None:
    """The CUDA runtime library that torch has loaded; another copy would have errors of its own."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if "/libcudart.so" in path:
            return ctypes.CDLL(path)
    return None


def _stream(stream: Stream) -> torch.cuda.Stream:
    assert isinstance(stream, torch.cuda.Stream)
    return stream


def _event(event: Event) -> Any:
    assert isinstance(event, torch.cuda.Event)
    return event

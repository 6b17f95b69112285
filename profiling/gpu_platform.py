"""What the GPU benchmark runs on: streams, events and plain copies of CUDA, or of a dry run.

A dry run puts "GPU" memory on the CPU, runs the kernels in Triton's interpreter, and takes the
host's clock for events. Its figures mean nothing; it shows that every measurement runs, and that
the bytes that it checks are right.
"""

from __future__ import annotations

import ctypes
import subprocess
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from ..engine.devices.runtime import Copies, Event, Stream

Ints = npt.NDArray[np.int64]


class Platform(Protocol):
    """Streams and events are opaque; ``elapsed_s`` is between two events that have happened."""

    device: torch.device

    def identity(self) -> dict[str, str]: ...
    def stream(self) -> Stream: ...
    def use(self, stream: Stream) -> AbstractContextManager[Any]: ...
    def event(self, stream: Stream) -> Event: ...
    def elapsed_s(self, start: Event, end: Event) -> float: ...
    def synchronize(self) -> None: ...
    def copy(
        self, stream: Stream, targets: Ints, sources: Ints, sizes: Ints, to_host: bool
    ) -> None: ...
    def pinned(self, num_bytes: int) -> torch.Tensor: ...


class CudaPlatform:
    """One CUDA device, through the runtime that the engine uses too."""

    def __init__(self, index: int = 0) -> None:
        from ..engine.devices.cuda_runtime import CudaRuntime

        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        self._runtime = CudaRuntime(self.device)
        self._cuda: Any = torch.cuda

    def identity(self) -> dict[str, str]:
        """The device, its driver, its link as it is now, and its NUMA node."""
        fields = (
            "pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,"
            "pcie.link.width.max,power.limit"
        )
        told = {"device": self._runtime.identity, "numa node": str(self._runtime.numa_node)}
        try:
            answer = subprocess.run(
                [
                    "nvidia-smi", f"--id={self.device.index}", f"--query-gpu={fields}",
                    "--format=csv,noheader",
                ],
                check=True, capture_output=True, text=True, timeout=30,
            ).stdout.strip()  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            return told | {"link": f"unknown: {error}"}
        return told | dict(zip(fields.split(","), answer.split(", "), strict=False))

    def stream(self) -> Stream:
        return self._cuda.Stream(self.device)  # type: ignore[no-any-return]

    def use(self, stream: Stream) -> AbstractContextManager[Any]:
        return self._cuda.stream(stream)  # type: ignore[no-any-return]

    def event(self, stream: Stream) -> Event:
        event = self._runtime.create_event(timed=True)
        self._runtime.record(event, stream)
        return event

    def elapsed_s(self, start: Event, end: Event) -> float:
        return self._runtime.elapsed_s(start, end)

    def synchronize(self) -> None:
        self._cuda.synchronize(self.device)

    def copy(
        self, stream: Stream, targets: Ints, sources: Ints, sizes: Ints, to_host: bool
    ) -> None:
        self._runtime.copy(stream, Copies("benchmark", targets, sources, sizes, to_host, True))

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


class DryPlatform:
    """Everything at once and in order, on the CPU."""

    device = torch.device("cpu")

    def identity(self) -> dict[str, str]:
        return {"device": "dry run: figures mean nothing"}

    def stream(self) -> Stream:
        return object()

    def use(self, stream: Stream) -> AbstractContextManager[Any]:
        return nullcontext()

    def event(self, stream: Stream) -> Event:
        return time.perf_counter()

    def elapsed_s(self, start: Event, end: Event) -> float:
        assert isinstance(start, float)
        assert isinstance(end, float)
        return end - start

    def synchronize(self) -> None:
        """Nothing is ever in flight."""

    def copy(
        self, stream: Stream, targets: Ints, sources: Ints, sizes: Ints, to_host: bool
    ) -> None:
        for target, source, size in zip(targets, sources, sizes, strict=True):
            ctypes.memmove(int(target), int(source), int(size))

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)


def timed(
    platform: Platform, run: Callable[[Stream], None], num_rounds: int
) -> tuple[list[float], list[float], list[float]]:
    """(event, submit, wall) seconds of each round: on the GPU, on the CPU until control is back,
    and from the call to the end. One round before is not counted. Every round has a fresh stream.
    """
    device_s, submit_s, wall_s = [], [], []
    for index in range(num_rounds + 1):
        stream = platform.stream()
        platform.synchronize()
        begin = time.perf_counter()
        start = platform.event(stream)
        run(stream)
        end = platform.event(stream)
        submitted = time.perf_counter()
        platform.synchronize()
        done = time.perf_counter()
        if index:
            device_s.append(platform.elapsed_s(start, end))
            submit_s.append(submitted - begin)
            wall_s.append(done - begin)
    return device_s, submit_s, wall_s

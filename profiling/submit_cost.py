"""Host time to submit a store: kvferry's op against vLLM's general worker, in one run.

Nothing is copied: a stand-in takes the place of the CUDA driver (`standin_driver`), and vLLM's copy
call, streams and events are replaced by nothing, so what remains is the Python and C that runs on
the CPU before a transfer is under way. vLLM hands its descriptors, one for each block and layer, to
the driver in one call, at about 0.5 us each on top of what is measured here. kvferry's side is
complete but for the driver's part of a launch: ids are validated, and there is one launch for
each slice of 32 MiB.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from ..kernels.copy import op
from ..kernels.entries import Entries
from ..kernels.table import Fragment, FragmentTable, HostSlots
from .standin_driver import StandinDriver, install

NUM_LAYERS: Final = (1, 32, 64, 128)
NUM_BLOCKS: Final = (16, 512, 4096)
PAGE_BYTES: Final = 32 << 10
TARGET_CASE: Final = (64, 512)
TARGET_S: Final = 100e-6
TARGET_RATIO: Final = 3.0
_POOL_BLOCKS: Final = 8192
_TURN_ROUNDS: Final = 20
_SEED: Final = 20261130
_MAP_NORESERVE: Final = 0x4000  # Linux; the mmap module of Python 3.11 does not name it

Submit = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Cost:
    """Medians of one case; ``vllm_s`` and ``ratio`` are None where vLLM is not installed."""

    num_layers: int
    num_blocks: int
    num_launches: int
    kvferry_s: float
    vllm_s: float | None
    ratio: float | None


def measure(
    num_layers: int, num_blocks: int, *, driver: StandinDriver, with_vllm: bool, num_rounds: int
) -> Cost:
    """Median time of one submission by each side, measured in turns."""
    rng = np.random.default_rng(_SEED)
    block_ids = rng.permutation(_POOL_BLOCKS)[:num_blocks]
    slot_ids = rng.permutation(_POOL_BLOCKS)[:num_blocks]
    submit = kvferry_store(num_layers, block_ids, slot_ids)
    before = driver.num_launches
    submit()
    num_launches = driver.num_launches - before
    submits = [submit]
    if with_vllm:
        submits.append(vllm_store(num_layers, block_ids, slot_ids))
    medians = in_turns(submits, num_rounds)
    vllm_s = medians[1] if with_vllm else None
    ratio = vllm_s / medians[0] if vllm_s is not None else None
    return Cost(num_layers, num_blocks, num_launches, medians[0], vllm_s, ratio)


def in_turns(submits: Sequence[Submit], num_rounds: int) -> list[float]:
    """The median seconds of each.

    They take turns, so that a slow spell meets all of them, of several calls each, so that one does
    not time how the other left the caches.
    """
    times: list[list[float]] = [[] for _ in submits]
    for submit in submits:
        submit()  # compiles, and fills the pools
    gc.collect()
    gc.freeze()  # as vLLM's engine does at start
    for first in range(0, num_rounds, _TURN_ROUNDS):
        for submit, taken in zip(submits, times, strict=True):
            for _ in range(min(_TURN_ROUNDS, num_rounds - first)):
                begin = time.perf_counter()
                submit()
                taken.append(time.perf_counter() - begin)
    return [statistics.median(taken) for taken in times]


def kvferry_store(
    num_layers: int, block_ids: npt.NDArray[np.int64], slot_ids: npt.NDArray[np.int64]
) -> Submit:
    """A store of whole pages, one a layer, through the op that validates."""
    num_slots = len(slot_ids)
    order = np.argsort(np.argsort(slot_ids))  # the same order, in an arena of just this size
    fragments = [Fragment(1 << 40, PAGE_BYTES, PAGE_BYTES)] * num_layers
    table = FragmentTable(fragments, num_blocks=_POOL_BLOCKS, device="cpu")
    memory = _address_space(num_slots * table.block_bytes)
    slots = HostSlots(memory, table.block_bytes, num_slots, blocks_per_chunk=1)
    entries = Entries.build(block_ids, order, np.zeros(num_slots, dtype=np.int64))
    return lambda: op.store(table, slots, entries)


def _address_space(num_bytes: int) -> torch.Tensor:
    """Addresses for which no memory is ever used: the stand-in touches none of it."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=torch.uint8)


class _OnDevice(torch.Tensor):
    """A CPU tensor that says it is on a GPU, for the assertions in vLLM's constructor."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


class _Nothing:
    """A stream, and an event that has always happened."""

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record(self, stream: object) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: object) -> float:
        return 0.0


def vllm_store(
    num_layers: int, block_ids: npt.NDArray[np.int64], slot_ids: npt.NDArray[np.int64]
) -> Submit:
    """The same store through ``transfer_async`` of vLLM's worker, up to its call of the driver."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm.v1.kv_offload.base import (
        BlockIDsLoadStoreSpec,
        CanonicalKVCacheRef,
        GPULoadStoreSpec,
    )
    from vllm.v1.kv_offload.cpu import gpu_worker

    class SlotsSpec(BlockIDsLoadStoreSpec):
        @staticmethod
        def medium() -> str:
            return "CPU"

    # Every layer is the same memory: only its address and stride are read.
    pages = _address_space(_POOL_BLOCKS * PAGE_BYTES).view(torch.int8).view(-1, PAGE_BYTES)
    on_device = pages.as_subclass(_OnDevice)
    handler: Any = gpu_worker.SingleDirectionOffloadingHandler(
        gpu_tensors=[on_device] * num_layers,
        cpu_tensors=[pages] * num_layers,
        blocks_per_chunk=1,
        layer_refs_per_group=[[CanonicalKVCacheRef(i, PAGE_BYTES) for i in range(num_layers)]],
        gpu_to_cpu=True,
    )
    handler.src_tensors = [pages] * num_layers  # a subclass would slow down every attribute
    handler._swap_blocks_batch = lambda *args, **kwargs: None
    nothing = _Nothing()
    handler._stream_pool = [nothing]
    handler._event_pool = [nothing, nothing]
    platform = SimpleNamespace(
        current_stream=lambda: nothing,
        stream=lambda stream: nullcontext(),
        is_xpu=lambda: False,
    )
    setattr(gpu_worker, "current_platform", platform)  # noqa: B010
    source = GPULoadStoreSpec(block_ids.tolist(), [len(block_ids)], [0])
    target = SlotsSpec(slot_ids.tolist())

    def submit() -> None:
        handler.transfer_async(0, source, target)
        handler.get_finished()  # gives buffers and streams back: a few us of the 370

    return submit


def table(costs: Sequence[Cost]) -> str:
    """The costs as aligned text."""
    lines = [f"{'layers':>6} {'blocks':>6} {'launches':>8} {'kvferry us':>11} {'vLLM us':>9} ratio"]
    for c in costs:
        vllm = f"{c.vllm_s * 1e6:9.1f}" if c.vllm_s is not None else "        -"
        ratio = f"{c.ratio:5.2f}" if c.ratio is not None else "    -"
        lines.append(
            f"{c.num_layers:6} {c.num_blocks:6} {c.num_launches:8} {c.kvferry_s * 1e6:11.1f} "
            f"{vllm} {ratio}"
        )
    return "\n".join(lines)


def missed(costs: Sequence[Cost]) -> list[str]:
    """What the case with a target missed; empty when it was met or not among the costs."""
    found = [c for c in costs if (c.num_layers, c.num_blocks) == TARGET_CASE]
    problems = []
    for c in found:
        if c.kvferry_s > TARGET_S:
            problems.append(f"{c.kvferry_s * 1e6:.1f} us, allowed are {TARGET_S * 1e6:.0f}")
        if c.ratio is not None and c.ratio < TARGET_RATIO:
            problems.append(f"{c.ratio:.2f} times less than vLLM, wanted is {TARGET_RATIO:.0f}")
    return problems


def _parse_counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        told = f"counts are numbers with commas between, got {text!r}"
        raise argparse.ArgumentTypeError(told) from None
    if any(not 1 <= count <= _POOL_BLOCKS for count in counts):
        raise argparse.ArgumentTypeError(f"counts must be 1 to {_POOL_BLOCKS}, got {text!r}")
    return counts


def main(argv: Sequence[str]) -> int:
    """Print the table (or JSON); 1 when the case of 64 layers x 512 blocks misses its target."""
    parser = argparse.ArgumentParser(prog="kvferry submit-cost", description=__doc__)
    parser.add_argument("--layers", type=_parse_counts, default=NUM_LAYERS)
    parser.add_argument("--blocks", type=_parse_counts, default=NUM_BLOCKS)
    parser.add_argument("--rounds", type=int, default=200, help="submissions timed in each case")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}; allowed: from 1")
    driver = install()
    with_vllm = importlib.util.find_spec("vllm") is not None
    costs = [
        measure(layers, blocks, driver=driver, with_vllm=with_vllm, num_rounds=options.rounds)
        for layers in options.layers
        for blocks in options.blocks
    ]
    problems = missed(costs)
    if options.json:
        json.dump({"costs": [asdict(c) for c in costs], "missed": problems}, sys.stdout, indent=1)
        print()
    else:
        print(table(costs))
        if not with_vllm:
            print("vLLM is not installed: no ratio")
        print("\n".join(f"MISSED at 64 layers x 512 blocks: {p}" for p in problems) or "target met")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

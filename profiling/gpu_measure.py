"""What the GPU benchmark measures: one function for each item, each giving rows for the report.

A row is a flat dictionary: what was measured, and seconds or GB/s (10^9 bytes a second).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from ..engine.devices.runtime import Stream
from ..kernels.config import CopyConfig
from . import gpu_cases
from .gpu_cases import DIRECTIONS, Case, Run, build, check, zero_copy
from .gpu_platform import Platform, timed
from .gpu_report import Row, smallest_grid
from .percentiles import percentile

KIB: Final = 1 << 10


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything; ``max_bytes`` leaves out cases that would move more."""

    ceiling_bytes: int
    fragments_bytes: tuple[int, ...]
    num_fragments: tuple[int, ...]
    grids: tuple[int, ...]
    tiles_bytes: tuple[int, ...]
    stages: tuple[int, ...]
    warps: tuple[int, ...]
    gemm: int
    decode_tokens: int
    num_rounds: int
    max_bytes: int


FULL: Final = Sizes(
    ceiling_bytes=256 << 20,
    fragments_bytes=tuple(k * KIB // 2 for k in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)),
    num_fragments=(16, 64, 256, 1024, 4096, 16384, 65536),
    grids=(1, 2, 4, 6, 8, 12, 16, 32),
    tiles_bytes=(8192, 16384, 32768),
    stages=(1, 2, 3, 4),
    warps=(4, 8),
    gemm=4096,
    decode_tokens=2048,
    num_rounds=10,
    max_bytes=2 << 30,
)
QUICK: Final = Sizes(
    ceiling_bytes=256 << 20,
    fragments_bytes=(4 * KIB, 32 * KIB, 128 * KIB),
    num_fragments=(64, 1024, 16384),
    grids=(1, 2, 4, 8, 16),
    tiles_bytes=(16384,),
    stages=(1, 4),
    warps=(4,),
    gemm=4096,
    decode_tokens=1024,
    num_rounds=5,
    max_bytes=1 << 30,
)
DRY: Final = Sizes(
    ceiling_bytes=1 << 16,
    fragments_bytes=(512, 4 * KIB),
    num_fragments=(4,),
    grids=(1, 2),
    tiles_bytes=(8192,),
    stages=(1, 2),
    warps=(4,),
    gemm=16,
    decode_tokens=16,
    num_rounds=2,
    max_bytes=1 << 20,
)


def ceiling(platform: Platform, sizes: Sizes) -> Iterator[Row]:
    """Item 1: one copy of the copy engine each way, and both at once."""
    num_bytes = sizes.ceiling_bytes
    device = [torch.empty(num_bytes, dtype=torch.uint8, device=platform.device) for _ in "ab"]
    host = [platform.pinned(num_bytes) for _ in "ab"]
    size = np.array([num_bytes])

    def move(index: int, to_host: bool) -> Run:
        here, there = (np.array([t[index].data_ptr()]) for t in (device, host))
        target, source = (there, here) if to_host else (here, there)
        return lambda stream: platform.copy(stream, target, source, size, to_host)

    store, load = move(0, True), move(1, False)
    for name, run, factor in (
        ("store", store, 1),
        ("load", load, 1),
        ("both", together(platform, store, load), 2),
    ):
        _, _, wall_s = timed(platform, run, sizes.num_rounds)
        yield {"direction": name, "gb_per_s": factor * num_bytes / statistics.median(wall_s) / 1e9}


def together(platform: Platform, first: Run, second: Run) -> Run:
    """Both on streams of their own; the given stream waits for nothing, so take the wall time."""
    streams = platform.stream(), platform.stream()

    def run(stream: Stream) -> None:
        first(streams[0])
        second(streams[1])

    return run


def strategies(platform: Platform, sizes: Sizes) -> Iterator[Row]:
    """Item 2: direction x fragment x number of fragments x strategy, bytes checked first."""
    for case in _cases(platform, sizes):
        yield from _compare(case, gpu_cases.STRATEGIES, sizes.num_rounds)


def checksums(platform: Platform, sizes: Sizes) -> Iterator[Row]:
    """Item 6: each strategy with checksums against without (nothing quantises yet)."""
    each = {**gpu_cases.STRATEGIES, **gpu_cases.CHECKSUMMED}
    for case in _cases(platform, sizes):
        yield from _compare(case, each, sizes.num_rounds)


def _cases(platform: Platform, sizes: Sizes) -> Iterator[Case]:
    for fragment_bytes in sizes.fragments_bytes:
        for num_fragments in sizes.num_fragments:
            if fragment_bytes * num_fragments <= sizes.max_bytes:
                yield build(platform, fragment_bytes, num_fragments)


def _compare(
    case: Case, strategies: Mapping[str, gpu_cases.Strategy], num_rounds: int
) -> Iterator[Row]:
    for name, strategy in strategies.items():
        for direction in DIRECTIONS:
            run = strategy(case, direction)
            check(case, direction, run)
            device_s, submit_s, wall_s = timed(case.platform, run, num_rounds)
            yield {
                "strategy": name,
                "direction": direction,
                "fragment_bytes": int(case.pages.shape[2]),
                "num_fragments": case.table.num_fragments * len(case.block_ids),
                "device_s": statistics.median(device_s),
                "submit_s": statistics.median(submit_s),
                "wall_s": statistics.median(wall_s),
                "gb_per_s": case.num_bytes / statistics.median(device_s) / 1e9,
            }


def _middle_case(platform: Platform, sizes: Sizes) -> Case:
    """32 KiB fragments where there are any, and as many as fit."""
    near = min(sizes.fragments_bytes, key=lambda b: abs(b - 32 * KIB))
    counts = [n for n in sizes.num_fragments if n * near <= sizes.max_bytes]
    return build(platform, near, max(counts))


def grids(platform: Platform, sizes: Sizes) -> Iterator[Row]:
    """Item 3: programs x tile x stages x warps, and the smallest grid within 5 % of the best."""
    case = _middle_case(platform, sizes)
    for direction in DIRECTIONS:
        rows: list[Row] = []
        for config in _configs(sizes):
            run = zero_copy(config)(case, direction)
            check(case, direction, run)
            device_s, _, _ = timed(platform, run, sizes.num_rounds)
            rows.append(
                {
                    "direction": direction,
                    "num_programs": config.num_programs,
                    "tile_bytes": config.tile_bytes,
                    "num_stages": config.num_stages,
                    "num_warps": config.num_warps,
                    "gb_per_s": case.num_bytes / statistics.median(device_s) / 1e9,
                    "chosen": False,
                }
            )
        smallest_grid(rows)["chosen"] = True
        yield from rows


def _configs(sizes: Sizes) -> Iterator[CopyConfig]:
    for programs in sizes.grids:
        for tile_bytes in sizes.tiles_bytes:
            for stages in sizes.stages:
                for warps in sizes.warps:
                    yield CopyConfig(programs, tile_bytes, stages, warps)


def both_ways(platform: Platform, sizes: Sizes) -> Iterator[Row]:
    """Item 4: a store and a load of other pages at once, by every pair of strategies."""
    first, second = _middle_case(platform, sizes), _middle_case(platform, sizes)
    for store_name, store in gpu_cases.STRATEGIES.items():
        for load_name, load in gpu_cases.STRATEGIES.items():
            run = together(platform, store(first, "store"), load(second, "load"))
            _, _, wall_s = timed(platform, run, sizes.num_rounds)
            num_bytes = first.num_bytes + second.num_bytes
            yield {
                "store": store_name,
                "load": load_name,
                "gb_per_s": num_bytes / statistics.median(wall_s) / 1e9,
            }


def beside_work(platform: Platform, sizes: Sizes) -> Iterator[Row]:
    """Item 5: how a GEMM and a paged decode fare beside nothing, and beside each transfer."""
    case = _middle_case(platform, sizes)
    quiet: dict[str, Callable[[Stream], None]] = {"nothing": lambda stream: None}
    transfers = quiet | {
        f"{direction}, {name}": strategy(case, direction)
        for name, strategy in gpu_cases.STRATEGIES.items()
        for direction in DIRECTIONS
    }
    for work_name, work in (("gemm", _gemm(platform, sizes)), ("decode", _decode(platform, sizes))):
        for transfer_name, transfer in transfers.items():
            taken_s = _work_times(platform, work, transfer, sizes.num_rounds)
            yield {
                "work": work_name,
                "beside": transfer_name,
                "p50_s": percentile(taken_s, 50),
                "p99_s": percentile(taken_s, 99),
            }


def _work_times(
    platform: Platform, work: Callable[[], object], transfer: Run, num_rounds: int
) -> list[float]:
    """Event time of every piece of work while transfers are kept in flight on another stream."""
    compute, lane = platform.stream(), platform.stream()
    taken_s: list[float] = []
    for _ in range(num_rounds):
        transfer(lane)
        marks = []
        with platform.use(compute):
            for _ in range(10):
                start = platform.event(compute)
                work()
                marks.append((start, platform.event(compute)))
        platform.synchronize()
        taken_s.extend(platform.elapsed_s(start, end) for start, end in marks)
    return taken_s


def _gemm(platform: Platform, sizes: Sizes) -> Callable[[], object]:
    kind = torch.float32 if platform.device.type == "cpu" else torch.bfloat16
    a = torch.randn(sizes.gemm, sizes.gemm, device=platform.device, dtype=kind)
    out = torch.empty_like(a)
    return lambda: torch.mm(a, a, out=out)


def _decode(platform: Platform, sizes: Sizes) -> Callable[[], object]:
    """One token each of 32 sequences over a paged cache: bound by reading memory."""
    kind: Any = torch.float32 if platform.device.type == "cpu" else torch.bfloat16
    num_sequences, num_heads, head_size, block_tokens = 32, 8, 128, 16
    num_blocks = num_sequences * sizes.decode_tokens // block_tokens
    cache = torch.randn(
        num_blocks, 2, block_tokens, num_heads, head_size, device=platform.device, dtype=kind
    )
    order = torch.randperm(num_blocks, device=platform.device).view(num_sequences, -1)
    query = torch.randn(num_sequences, num_heads, 1, head_size, device=platform.device, dtype=kind)

    def step() -> torch.Tensor:
        pages = cache[order]  # [sequences, blocks, 2, tokens, heads, head]
        keys, values = (pages[:, :, i].flatten(1, 2).transpose(1, 2).contiguous() for i in (0, 1))
        return torch.nn.functional.scaled_dot_product_attention(query, keys, values)

    return step

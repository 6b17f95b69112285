"""The GPU benchmark: how fast pages cross the link, by every strategy, beside which work.

Bytes are checked before anything is timed. Everything is also given as a share of what the copy
engine reaches on the same link in the same run. Results go to a folder, as JSON, tables and plots.
"""

from __future__ import annotations

import argparse
import os
import platform as machine
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import triton

from . import gpu_measure, gpu_report
from .gpu_cases import WrongBytesError
from .gpu_measure import Sizes
from .gpu_platform import CudaPlatform, DryPlatform, Platform
from .gpu_report import Row

ITEMS: Final[dict[str, Callable[[Platform, Sizes], Iterator[Row]]]] = {
    "ceiling": gpu_measure.ceiling,
    "strategies": gpu_measure.strategies,
    "grids": gpu_measure.grids,
    "both_ways": gpu_measure.both_ways,
    "beside_work": gpu_measure.beside_work,
    "checksums": gpu_measure.checksums,
}
WITH_SHARES: Final = ("strategies", "grids", "checksums")
EXIT_FAILED: Final = 1
EXIT_NO_GPU: Final = 3


def measure(platform: Platform, sizes: Sizes, items: Sequence[str]) -> dict[str, Any]:
    """Run the items in their order. The ceiling comes first, whether asked for or not."""
    results: dict[str, Any] = {"about": about(platform)}
    for item in ITEMS:
        if item != "ceiling" and item not in items:
            continue
        print(f"{time.strftime('%H:%M:%S')} {item}", file=sys.stderr, flush=True)
        rows = list(ITEMS[item](platform, sizes))
        if item in WITH_SHARES:
            rows = gpu_report.shares(rows, results["ceiling"])
        results[item] = rows
    if "strategies" in results:
        results["winners"] = gpu_report.winners(results["strategies"])
    return results


def about(platform: Platform) -> dict[str, str]:
    """Where and when: without it no figure can be compared."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": machine.python_version(),
        "host": f"{machine.machine()}, {os.cpu_count()} CPUs",
        **platform.identity(),
    }


def _parse_items(given: str) -> tuple[str, ...]:
    names = tuple(given.split(","))
    for name in names:
        if name not in ITEMS:
            raise argparse.ArgumentTypeError(f"unknown item {name!r}; allowed: {', '.join(ITEMS)}")
    return names


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="kvferry gpu-transfer", description=__doc__)
    made.add_argument("--items", type=_parse_items, default=tuple(ITEMS), metavar="NAME,NAME")
    made.add_argument("--out", type=Path, default=Path("gpu-transfer"), help="folder of results")
    made.add_argument("--device", type=int, default=0, help="index of the CUDA device")
    size = made.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="fewer cases: a few minutes")
    size.add_argument(
        "--dry-run",
        action="store_true",
        help="tiny cases on the CPU in Triton's interpreter (needs TRITON_INTERPRET=1); it shows "
        "that everything runs and that the bytes are right, and the figures mean nothing",
    )
    return made


def main(argv: Sequence[str]) -> int:
    """Measure and write; 1 when bytes were wrong, 3 when there is no GPU."""
    options = parser().parse_args(argv)
    interpreted = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    if options.dry_run != interpreted:
        parser().error("TRITON_INTERPRET=1 and --dry-run need each other")
    platform: Platform
    if options.dry_run:
        platform, sizes = DryPlatform(), gpu_measure.DRY
    elif not torch.cuda.is_available():
        print(
            "kvferry gpu-transfer: no CUDA device here (torch.cuda.is_available() is false); "
            "this benchmark measures a link to a GPU. TRITON_INTERPRET=1 and "
            "--dry-run show that it runs.",
            file=sys.stderr,
        )
        return EXIT_NO_GPU
    else:
        platform = CudaPlatform(options.device)
        sizes = gpu_measure.QUICK if options.quick else gpu_measure.FULL
    try:
        results = measure(platform, sizes, options.items)
    except WrongBytesError as error:
        print(f"kvferry gpu-transfer: {error}", file=sys.stderr)
        return EXIT_FAILED
    for path in gpu_report.write(results, options.out):
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""``kvferry bench transfer`` on a GPU: every strategy against one large copy over the same link."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from .bench_result import Plot, Progress, Result, Series, Table
from .gpu_report import Row, shares, winners

DIRECTIONS: Final = ("store", "load")


def measure_link(
    *, quick: bool, progress: Progress, fragment_kib: Sequence[int] | None, rounds: int | None
) -> Result:
    """Measure on the first CUDA device. Raises ValueError when there is none, RuntimeError when a
    strategy moved wrong bytes."""
    import torch

    from . import gpu_cases, gpu_measure
    from .gpu_platform import CudaPlatform

    if not torch.cuda.is_available():
        raise ValueError("--device cuda, but torch finds no CUDA device; allowed here: cpu")
    sizes = gpu_measure.QUICK if quick else gpu_measure.FULL
    if fragment_kib is not None:
        sizes = replace(sizes, fragments_bytes=tuple(kib << 10 for kib in fragment_kib))
    if rounds is not None:
        sizes = replace(sizes, num_rounds=rounds)
    num_cases = sum(
        size * number <= sizes.max_bytes
        for size in sizes.fragments_bytes
        for number in sizes.num_fragments
    )
    num_rows = 3 + num_cases * len(gpu_cases.STRATEGIES) * len(DIRECTIONS)
    platform = CudaPlatform()

    def rows() -> Iterator[tuple[str, Row]]:
        yield from (("ceiling", row) for row in gpu_measure.ceiling(platform, sizes))
        yield from (("strategies", row) for row in gpu_measure.strategies(platform, sizes))

    try:
        return result_of(_gathered(rows, num_rows, progress), platform.identity())
    except gpu_cases.WrongBytesError as error:
        raise RuntimeError(str(error)) from error


def _gathered(
    rows: Callable[[], Iterator[tuple[str, Row]]], num_rows: int, progress: Progress
) -> dict[str, list[Row]]:
    progress(0, num_rows, "one large copy")
    results: dict[str, list[Row]] = {"ceiling": [], "strategies": []}
    for number, (item, row) in enumerate(rows(), 1):
        results[item].append(row)
        what = f"{row['fragment_bytes'] / 1024:g} KiB, " if item == "strategies" else ""
        progress(number, num_rows, f"{what}{row['direction']}")
    return results


def result_of(results: Mapping[str, list[Row]], identity: Mapping[str, str]) -> Result:
    """Tables and plots of rows as `gpu_measure` gives them; ``identity`` is the device's."""
    rows = shares(results["strategies"], results["ceiling"])
    best = winners(rows)
    peak = {row["direction"]: row["gb_per_s"] for row in results["ceiling"]}
    data: dict[str, Any] = {
        "device": dict(identity),
        "peak_gb_per_s": peak,
        "cases": rows,
        "winners": best,
        "missed": [],
    }
    tables = [
        Table("The link: one large copy", ["direction", "GB/s"], [[*one] for one in peak.items()]),
        _winners_table(best),
        Table("The device", ["what", "value"], [[*one] for one in identity.items()]),
    ]
    plots = [_plot(rows, direction, peak[direction]) for direction in DIRECTIONS]
    title = "Transfers: strategies against the measured peak of the link"
    return Result("transfer", title, _summary(best, peak), tables, plots, data)


def _summary(best: Sequence[Row], peak: Mapping[str, float]) -> list[str]:
    lines = []
    for direction in DIRECTIONS:
        of_it = [row for row in best if row["direction"] == direction]
        top = max(of_it, key=lambda row: row["gb_per_s"])
        lines.append(
            f"A {direction} reaches up to {100 * top['share']:.0f} % of the link's "
            f"{peak[direction]:.1f} GB/s, with {top['strategy']} at "
            f"{top['fragment_bytes'] / 1024:g} KiB."
        )
    return lines


def _winners_table(best: Sequence[Row]) -> Table:
    columns = [
        "direction", "fragment, KiB", "fragments", "fastest strategy", "GB/s",
        "share of the peak, %", "submitting, us",
    ]  # fmt: skip
    rows = [
        [
            row["direction"],
            row["fragment_bytes"] / 1024,
            row["num_fragments"],
            row["strategy"],
            row["gb_per_s"],
            100 * row["share"],
            row["submit_s"] * 1e6,
        ]
        for row in best
    ]
    return Table("The fastest strategy of each case", columns, rows)


def _plot(rows: Sequence[Row], direction: str, peak: float) -> Plot:
    of_it = [row for row in rows if row["direction"] == direction]
    sizes = sorted({row["fragment_bytes"] for row in of_it})
    kib = [size / 1024 for size in sizes]
    series = [
        Series(name, kib, [_most(of_it, name, size) for size in sizes])
        for name in dict.fromkeys(row["strategy"] for row in of_it)
    ]
    series.append(Series("peak: one large copy", kib, [peak] * len(kib), reference=True))
    return Plot(
        f"transfer-{direction}",
        f"{direction.capitalize()}: rate over fragment size",
        "fragment, KiB",
        "GB/s",
        series,
        log_x=True,
        caption="For each size, the number of fragments with which a strategy was fastest.",
    )


def _most(rows: Sequence[Row], strategy: str, fragment_bytes: int) -> float:
    wanted = (strategy, fragment_bytes)
    found: list[float] = [
        r["gb_per_s"] for r in rows if (r["strategy"], r["fragment_bytes"]) == wanted
    ]
    return max(found)

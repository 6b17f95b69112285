"""``kvferry bench transfer``: what the transfers reach, against what one plain copy reaches.

On a machine with a GPU that is the link, and every strategy; elsewhere the CPU device, with as many
threads as asked for, against the highest plain copy of the run.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Final, get_args

from ..engine.pieces import Integrity
from .bench_result import Plot, Progress, Result, Series, Table
from .transfer import Speed, cases, judge, speeds_of

FRAGMENT_KIB: Final = (4, 8, 16, 32, 64, 128)
QUICK_FRAGMENT_KIB: Final = (4, 16, 64)
DEVICES: Final = ("auto", "cpu", "cuda")
DIRECTIONS: Final = ("store", "load")

FRAGMENT: Final = "fragment, KiB"
RATE: Final = "GB/s"


def at_least(least: int, most: int | None = None) -> Callable[[str], int]:
    """An argument's type: a whole number in these bounds."""

    def number(text: str) -> int:
        allowed = f"from {least}" + ("" if most is None else f" to {most}")
        try:
            value = int(text)
        except ValueError:
            told = f"{text!r}; allowed: a whole number {allowed}"
            raise argparse.ArgumentTypeError(told) from None
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"{value}; allowed: {allowed}")
        return value

    return number


def add_options(parser: argparse.ArgumentParser) -> None:
    """What is to be measured; where an option is not given, ``--quick`` decides."""
    positive = at_least(1)
    parser.add_argument(
        "--device", choices=DEVICES, default="auto", help="auto: cuda where there is a GPU"
    )
    parser.add_argument(
        "--fragment-kib", type=positive, nargs="+", metavar="KIB", help="fragment sizes"
    )
    parser.add_argument("--rounds", type=positive, help="how often each case is timed")
    parser.add_argument(
        "--threads", type=at_least(1, 64), nargs="+", metavar="N", help="CPU only: copying threads"
    )
    parser.add_argument(
        "--integrity", nargs="+", choices=get_args(Integrity), help="CPU only: checksums"
    )
    parser.add_argument("--mib", type=positive, help="CPU only: what one job moves, MiB")


def measure_transfer(
    *,
    quick: bool,
    progress: Progress,
    device: str = "auto",
    fragment_kib: Sequence[int] | None = None,
    rounds: int | None = None,
    threads: Sequence[int] | None = None,
    integrity: Sequence[Integrity] | None = None,
    mib: int | None = None,
) -> Result:
    """Measure on ``device``; None leaves a choice to ``quick``.

    Raises ValueError for options that the device has no use for, RuntimeError for wrong bytes.
    """
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        from .bench_link import measure_link

        given = {"--threads": threads, "--integrity": integrity, "--mib": mib}
        if wrong := [name for name, value in given.items() if value is not None]:
            raise ValueError(f"{', '.join(wrong)} given, allowed: only with --device cpu")
        return measure_link(
            quick=quick, progress=progress, fragment_kib=fragment_kib, rounds=rounds
        )
    return measure_copies(
        fragment_kib=fragment_kib or (QUICK_FRAGMENT_KIB if quick else FRAGMENT_KIB),
        threads=threads or (1, 2),
        integrity=integrity or (("off", "full") if quick else ("off", "sample", "full")),
        num_rounds=rounds or (5 if quick else 15),
        mib=mib or (32 if quick else 128),
        progress=progress,
    )


def measure_copies(
    *,
    fragment_kib: Sequence[int],
    threads: Sequence[int],
    integrity: Sequence[Integrity],
    num_rounds: int,
    mib: int,
    progress: Progress,
) -> Result:
    """The CPU device. Each page is one fragment; raises RuntimeError for wrong bytes."""
    chosen = cases([kib << 10 for kib in fragment_kib], threads, integrity)
    judged_by, load = judge(), os.getloadavg()[0]
    speeds: list[Speed] = []
    for case in chosen:
        what = f"{case.page_bytes >> 10} KiB, {_threads(case.num_threads)}, {case.integrity}"
        progress(len(speeds), 2 * len(chosen), what)
        speeds += speeds_of(case, mib << 20, num_rounds, judged_by)
    progress(len(speeds), len(speeds), "done")
    return result_of(speeds, load=load, mib=mib, num_rounds=num_rounds)


def result_of(speeds: Sequence[Speed], *, load: float, mib: int, num_rounds: int) -> Result:
    """Tables, plots and verdicts of figures; ``load`` is the machine's before the first."""
    missed = [_verdict(one) for one in speeds if not one.met]
    plots = [plot for direction in DIRECTIONS for plot in _plots(speeds, direction)]
    data: dict[str, Any] = {
        "device": "cpu",
        "num_rounds": num_rounds,
        "job_mib": mib,
        "load_before": load,
        "peak_gb_per_s": {way: _peak(speeds, way) for way in DIRECTIONS},
        "cases": [asdict(one) | {"met": one.met} for one in speeds],
        "missed": missed,
    }
    title = "Transfers: the CPU device against one plain memory copy"
    return Result("transfer", title, _summary(speeds, load, missed), [_table(speeds)], plots, data)


def _peak(speeds: Sequence[Speed], direction: str) -> float:
    return max(one.best_copy_gb_per_s for one in speeds if one.direction == direction)


def _threads(number: int) -> str:
    return "1 thread" if number == 1 else f"{number} threads"


def _verdict(one: Speed) -> str:
    return (
        f"{one.direction}, {one.page_bytes >> 10} KiB, {_threads(one.num_threads)}: "
        f"{one.ratio:.2f} of a plain copy ({one.judged_by} time), wanted {one.target}"
    )


def _summary(speeds: Sequence[Speed], load: float, missed: Sequence[str]) -> list[str]:
    lines = []
    for direction in DIRECTIONS:
        of_it = [one for one in speeds if one.direction == direction]
        ratios = [one.ratio for one in of_it if one.integrity == of_it[0].integrity]
        lines.append(
            f"A {direction} reaches {min(ratios):.2f} to {max(ratios):.2f} of the speed of a plain "
            f"copy of the same bytes by as many threads (integrity {of_it[0].integrity}); "
            f"the fastest plain copy reached {_peak(speeds, direction):.1f} GB/s."
        )
    num_targets = sum(one.target is not None for one in speeds)
    if num_targets:
        lines.append(f"{num_targets - len(missed)} of {num_targets} targets are met.")
    if speeds[0].judged_by == "wall":
        lines.append("Ratios are of wall time.")
    else:
        lines.append(
            "Ratios are of processor time: other work kept the processors busy (load "
            f"{load:.1f} before the run), so that rates, which are of wall time, say little."
        )
    return lines


def _table(speeds: Sequence[Speed]) -> Table:
    columns = [
        "direction", FRAGMENT, "threads", "integrity", RATE, "plain copy, GB/s",
        "ratio, wall time", "ratio, processor time", "share of the peak, %", "wanted ratio", "met",
    ]  # fmt: skip
    rows = [
        [
            one.direction,
            one.page_bytes >> 10,
            one.num_threads,
            one.integrity,
            one.gb_per_s,
            one.copy_gb_per_s,
            one.wall_ratio,
            one.cpu_ratio,
            100 * one.gb_per_s / _peak(speeds, one.direction),
            one.target,
            None if one.target is None else "yes" if one.met else "no",
        ]
        for one in speeds
    ]
    caption = (
        "A ratio is the plain copy's time through the engine's, the median over the rounds: 1 is "
        "as fast. The peak is the fastest plain copy of the whole run in that direction."
    )
    return Table("Every case", columns, rows, caption)


def _plots(speeds: Sequence[Speed], direction: str) -> list[Plot]:
    of_it = [one for one in speeds if one.direction == direction]
    integrity, widest = of_it[0].integrity, max(one.num_threads for one in of_it)
    sizes = list(dict.fromkeys(one.page_bytes >> 10 for one in of_it))
    by_threads = [
        _series(_threads(number), same)
        for number in dict.fromkeys(one.num_threads for one in of_it)
        if (same := [s for s in of_it if (s.num_threads, s.integrity) == (number, integrity)])
    ]
    peak = Series(
        "peak: plain copy", sizes, [_peak(speeds, direction)] * len(sizes), reference=True
    )
    plots = [
        Plot(
            f"transfer-{direction}",
            f"{direction.capitalize()}: rate over fragment size",
            FRAGMENT,
            RATE,
            [*by_threads, peak],
            log_x=True,
            caption=f"The whole engine, integrity {integrity}. Dashed: the fastest plain copy.",
        )
    ]
    checked = list(dict.fromkeys(one.integrity for one in of_it))
    if len(checked) > 1:
        series = [
            Series(kind, [f"{kib} KiB" for kib in sizes], [one.gb_per_s for one in same])
            for kind in checked
            if (same := [s for s in of_it if (s.num_threads, s.integrity) == (widest, kind)])
        ]
        title = f"{direction.capitalize()}: what checksums cost"
        caption = f"{_threads(widest)}." + (
            " With sample, one chunk in sixteen is checked." if "sample" in checked else ""
        )
        name = f"transfer-{direction}-integrity"
        plots.append(Plot(name, title, "fragment", RATE, series, "bar", caption=caption))
    return plots


def _series(label: str, speeds: Sequence[Speed]) -> Series:
    return Series(label, [one.page_bytes >> 10 for one in speeds], [one.gb_per_s for one in speeds])

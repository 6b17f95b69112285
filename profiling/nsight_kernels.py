"""Reads what ``ncu --csv --print-units base`` prints: a line for each metric of each launch."""

import csv
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from .nsight_summary import Timed

DURATION: Final = "gpu__time_duration.sum"
READ: Final = "pcie__read_bytes.sum"
WRITTEN: Final = "pcie__write_bytes.sum"
REGISTERS: Final = "launch__registers_per_thread"
OCCUPANCY: Final = "sm__warps_active.avg.pct_of_peak_sustained_active"
METRICS: Final = (DURATION, READ, WRITTEN, REGISTERS, OCCUPANCY)

_COLUMNS: Final = {"ID", "Kernel Name", "Grid Size", "Metric Name", "Metric Value"}


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a kernel. A metric that this GPU does not have is absent."""

    kernel: str
    grid: str
    metrics: dict[str, float]

    def timed(self) -> Timed:
        """Its time and the bytes that it moved over the link."""
        moved = self.metrics.get(READ, 0.0) + self.metrics.get(WRITTEN, 0.0)
        duration = int(self.metrics.get(DURATION, 0.0))
        return Timed(f"{self.kernel} {self.grid}", 0, duration, int(moved), duration)


def read_launches(lines: Iterable[str]) -> list[Launch]:
    """The launches in what ncu has printed; what the profiled program printed is passed over.

    Raises ValueError when no table of ncu's is in it.
    """
    kept = [line for line in lines if line.startswith('"')]
    table = csv.DictReader(kept)
    if _COLUMNS - set(table.fieldnames or ()):
        raise ValueError("ncu printed no table of metrics; its own message says why")
    launches: dict[tuple[str, str], Launch] = {}
    for row in table:
        key = (row.get("Process ID") or "", row["ID"])
        launch = launches.setdefault(key, Launch(row["Kernel Name"], row["Grid Size"], {}))
        try:
            launch.metrics[row["Metric Name"]] = float(row["Metric Value"].replace(",", ""))
        except ValueError:  # "n/a": the metric does not exist here
            continue
    return list(launches.values())


def occupancy_lines(launches: Iterable[Launch]) -> list[str]:
    """Registers and active warps of each kernel: medians over its launches."""
    by_kernel: dict[str, list[Launch]] = {}
    for one in launches:
        by_kernel.setdefault(one.kernel, []).append(one)
    lines = []
    for kernel, ones in by_kernel.items():
        told = [
            f"{statistics.median(values):g} {unit}"
            for metric, unit in ((REGISTERS, "registers a thread"), (OCCUPANCY, "% warps active"))
            if (values := [one.metrics[metric] for one in ones if metric in one.metrics])
        ]
        lines.append(f"{kernel}: {', '.join(told) or 'no metrics of occupancy here'}")
    return lines

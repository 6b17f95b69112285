"""The GPU benchmark's results: statistics, the JSON file, the plots and the printed table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

Row = dict[str, Any]
Results = Mapping[str, Any]
"""``{"about": {...}, item: [row, ...], ...}`` as `gpu_transfer` writes it."""

NEAR_BEST: Final = 0.95


def smallest_grid(rows: Sequence[Row]) -> Row:
    """The fastest of the rows with the fewest programs that come within 5 % of the best."""
    best = max(row["gb_per_s"] for row in rows)
    near = [row for row in rows if row["gb_per_s"] >= NEAR_BEST * best]
    return min(near, key=lambda row: (row["num_programs"], -row["gb_per_s"]))


def shares(rows: Sequence[Row], ceiling: Sequence[Row]) -> list[Row]:
    """The rows with their share of the copy engine's best in the same direction."""
    best = {row["direction"]: row["gb_per_s"] for row in ceiling}
    return [{**row, "share": row["gb_per_s"] / best[row["direction"]]} for row in rows]


def winners(rows: Sequence[Row]) -> list[Row]:
    """The fastest strategy of each (direction, fragment size, number of fragments)."""
    best: dict[tuple[str, int, int], Row] = {}
    for row in rows:
        key = (row["direction"], row["fragment_bytes"], row["num_fragments"])
        if key not in best or row["gb_per_s"] > best[key]["gb_per_s"]:
            best[key] = row
    return [best[key] for key in sorted(best)]


def text(results: Results) -> str:
    """The results as a page of tables: Markdown, one for each item."""
    lines = [f"{key}: {value}" for key, value in results["about"].items()]
    for item, rows in results.items():
        if item == "about" or not rows:
            continue
        lines += ["", f"## {item}", "", "| " + " | ".join(rows[0]) + " |"]
        lines.append("|" + " --- |" * len(rows[0]))
        lines += ["| " + " | ".join(_cell(k, v) for k, v in row.items()) + " |" for row in rows]
    return "\n".join(lines)


def _cell(name: str, value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value * 1e6:.1f} us" if name.endswith("_s") and "per" not in name else f"{value:.2f}"


def write(results: Results, folder: Path) -> list[Path]:
    """Write JSON, the tables and, where matplotlib is installed, the plots; the paths written."""
    folder.mkdir(parents=True, exist_ok=True)
    record, tables = folder / "gpu_transfer.json", folder / "gpu_transfer.md"
    record.write_text(json.dumps(results, indent=1) + "\n")
    tables.write_text(text(results) + "\n")
    return [record, tables, *plot(results, folder)]


def plot(results: Results, folder: Path) -> list[Path]:
    """One PNG for a direction's strategies and one for its grids; none without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return []
    paths = []
    ceiling = {row["direction"]: row["gb_per_s"] for row in results.get("ceiling", ())}
    for direction in ("store", "load"):
        for item, group, axis in (
            ("strategies", "strategy", "fragment_bytes"),
            ("checksums", "strategy", "fragment_bytes"),
            ("grids", "num_stages", "num_programs"),
        ):
            rows = [r for r in results.get(item, ()) if r["direction"] == direction]
            if not rows:
                continue
            figure = Figure(figsize=(8, 5), layout="constrained")
            axes = figure.subplots()
            _draw(axes, rows, group, axis)
            if direction in ceiling:
                axes.axhline(
                    ceiling[direction], color="black", linestyle="--", label="one large copy"
                )
            points = sorted({row[axis] for row in rows})
            axes.set_xscale("log", base=2)
            axes.set_xticks(points, [str(point) for point in points])
            axes.set(title=f"{item}: {direction}", xlabel=axis, ylabel="GB/s")
            axes.legend(loc="upper left")
            path = folder / f"{item}_{direction}.png"
            figure.savefig(path, dpi=120)
            paths.append(path)
    return paths


def _draw(axes: Any, rows: Sequence[Row], group: str, axis: str) -> None:
    """The best figure of each group at each point of the axis."""
    for name in dict.fromkeys(row[group] for row in rows):
        best: dict[int, float] = {}
        for row in rows:
            if row[group] == name:
                best[row[axis]] = max(best.get(row[axis], 0.0), row["gb_per_s"])
        axes.plot(list(best), list(best.values()), marker="o", label=f"{group} {name}")

"""A result as text for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .bench_result import Cell, Result, Table


def text_of(result: Result) -> str:
    """Title, summary and tables. Plots are left to the report."""
    parts = [result.title, *(f"  {sentence}" for sentence in result.summary)]
    for table in result.tables:
        parts += ["", table.title, *_lines(table)]
        parts += [f"  {table.caption}"] if table.caption else []
    return "\n".join(parts)


def column_text(cells: Sequence[Cell]) -> list[str]:
    """The cells of one column with as many decimals as the largest of them needs for three digits
    that count; thousands apart, and a dash for what there is not."""
    sizes = [abs(cell) for cell in cells if isinstance(cell, float) and math.isfinite(cell)]
    most = max(sizes, default=0.0)
    decimals = 0 if most >= 100 else 1 if most >= 10 else 2 if most >= 0.1 else 4
    return [_cell_text(cell, decimals) for cell in cells]


def _cell_text(cell: Cell, decimals: int) -> str:
    if cell is None or (isinstance(cell, float) and not math.isfinite(cell)):
        return "–"  # noqa: RUF001
    if isinstance(cell, str):
        return cell
    if isinstance(cell, int):
        return f"{cell:,}"
    text = f"{cell:,.{decimals}f}"
    return f"{cell:.2g}" if cell and float(text.replace(",", "")) == 0 else text


def is_numeric(cells: Sequence[Cell]) -> bool:
    """Whether a column holds numbers and nothing else, which then stand to the right."""
    there = [cell for cell in cells if cell is not None]
    return bool(there) and all(isinstance(cell, int | float) for cell in there)


def columns_of(table: Table) -> list[list[Cell]]:
    """The cells by column, from the left."""
    return [[row[index] for row in table.rows] for index in range(len(table.columns))]


def _lines(table: Table) -> list[str]:
    columns = columns_of(table)
    texts = [
        [head, *(" ".join(text.split()) for text in column_text(cells))]
        for head, cells in zip(table.columns, columns, strict=True)
    ]
    aligned = []
    for column, cells in zip(texts, columns, strict=True):
        width, right = max(map(len, column)), is_numeric(cells)
        aligned.append([text.rjust(width) if right else text.ljust(width) for text in column])
    return ["  ".join(["", *line]).rstrip() for line in zip(*aligned, strict=True)]

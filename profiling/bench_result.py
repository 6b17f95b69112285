"""What a benchmark hands to the report: its figures as plain data, tables and plots of them.

A benchmark returns one :class:`Result`; `kvferry bench` prints its tables, and writes the JSON, the
plots and the report of all of it. Nothing in here draws or measures.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Cell = str | int | float | None
"""What a table's cell holds; None is shown as a dash."""


@dataclass(frozen=True)
class Series:
    """One labelled line (or set of bars) of a plot; ``x`` and ``y`` are of one length.

    A ``reference`` is what the others are held against, such as a peak: it is drawn dashed.
    """

    label: str
    x: Sequence[float | str]
    y: Sequence[float]
    reference: bool = False

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise ValueError(f"series {self.label!r} has {len(self.x)} x and {len(self.y)} y")


@dataclass(frozen=True)
class Plot:
    """A plot; ``name`` is its file name without ``.png``. Labels carry their units."""

    name: str
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    kind: Literal["line", "bar"] = "line"
    log_x: bool = False
    log_y: bool = False
    caption: str = ""


@dataclass(frozen=True)
class Table:
    """A table; every row has as many cells as there are columns, and headers carry the units."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"{self.title!r}: {len(row)} cells for {len(self.columns)} columns"
                )


@dataclass(frozen=True)
class Result:
    """What one benchmark found.

    ``summary`` are sentences for a reader, the most important first; ``data`` is all of it as what
    JSON can hold, for machines.
    """

    name: str
    title: str
    summary: Sequence[str]
    tables: Sequence[Table]
    plots: Sequence[Plot]
    data: dict[str, Any] = field(default_factory=dict)


class Progress(Protocol):
    """What a benchmark says while it runs: called at each step, from 0 to ``num_steps`` done."""

    def __call__(self, num_done: int, num_steps: int, what: str) -> None: ...

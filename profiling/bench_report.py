"""What ``--out`` leaves in a folder: a JSON file and plots for each benchmark, one report of all.

The JSON file is the record: the report is made of every one in the folder, so that `transfer`,
`schedule` and `serve` can be run one after the other into the same folder.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from .bench_html import page
from .bench_plots import Theme, can_draw, draw
from .bench_result import Plot, Result, Series, Table

FORMAT: Final = 1
REPORT: Final = "report.html"
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]*")


class ReportError(ValueError):
    """No report can be written; the message says what was given, and what is allowed."""


@dataclass(frozen=True, slots=True)
class Record:
    """A result, and where and with what it was measured."""

    about: dict[str, str]
    result: Result


def document(record: Record) -> dict[str, Any]:
    """The record as what JSON can hold: numbers that JSON has no word for become null."""
    made: dict[str, Any] = {"format": FORMAT, "about": record.about, **asdict(record.result)}
    plain: dict[str, Any] = _plain(made)
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value


def read(path: Path) -> Record:
    """The record of a file that ``write`` has left. Raises ReportError for anything else."""
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        if given["format"] != FORMAT:
            raise ValueError(f"format {given['format']}, not {FORMAT}")
        tables = [Table(**one) for one in given["tables"]]
        plots = [Plot(**one | {"series": _series(one["series"])}) for one in given["plots"]]
        parts = given["name"], given["title"], given["summary"], tables, plots, given["data"]
        return Record(given["about"], Result(*parts))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ReportError(
            f"{path} is no record of this version ({error}); allowed: a folder without it"
        ) from error


def _series(given: Sequence[dict[str, Any]]) -> list[Series]:
    return [
        Series(**one | {"y": [math.nan if y is None else y for y in one["y"]]}) for one in given
    ]


def prepare(folder: Path, names: Sequence[str], name: str) -> list[Record]:
    """Make ``folder`` before anything is measured, and read the records of the other benchmarks of
    ``names`` in it. Raises ReportError when ``name``'s could not be written there later."""
    if not can_draw():
        raise ReportError(
            "--out draws plots with matplotlib, which is not installed; allowed: installing it "
            "with kvferry's extra `bench` (in a clone: pip install '.[bench]'), or no --out"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ReportError(
            f"--out {folder}: {error.strerror or error}; allowed: a folder that can be written to"
        ) from error
    others = (folder / f"{one}.json" for one in names if one != name)
    return [read(path) for path in others if path.exists()]


def write(record: Record, others: Sequence[Record], folder: Path) -> list[Path]:
    """Write ``NAME.json``, a PNG for each plot and the report of ``record`` and ``others``; returns
    the paths. Raises ReportError for a name that makes no file name, or comes twice."""
    result = record.result
    drawn = [plot.name for one in (record, *others) for plot in one.result.plots]
    for name in (result.name, *drawn):
        if not _NAME.fullmatch(name) or drawn.count(name) > 1:
            raise ReportError(
                f"the name {name!r}; allowed: a-z, 0-9, - and _, and each plot's only once"
            )
    images: dict[tuple[str, Theme], bytes] = {}

    def drawn_once(plot: Plot, theme: Theme) -> bytes:
        if (plot.name, theme) not in images:
            images[plot.name, theme] = draw(plot, theme)
        return images[plot.name, theme]

    record_path = folder / f"{result.name}.json"
    text = json.dumps(document(record), indent=1, ensure_ascii=False, allow_nan=False)
    _replace(record_path, f"{text}\n".encode())
    paths = [record_path]
    for plot in result.plots:
        paths.append(folder / f"{plot.name}.png")
        _replace(paths[-1], drawn_once(plot, "light"))
    sections = sorted((record, *others), key=lambda one: one.result.name != result.name)
    paths.append(folder / REPORT)
    shown = [(one.about, one.result) for one in sections]
    _replace(paths[-1], page(shown, drawn_once).encode())
    return paths


def _replace(path: Path, content: bytes) -> None:
    """All of it or nothing: a run that is stopped leaves the file of the run before."""
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(content)
    os.replace(part, path)

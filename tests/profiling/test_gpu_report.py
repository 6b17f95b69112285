"""Statistics, files and plots of the GPU benchmark, from results written here."""

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
from kvferry.profiling import gpu_report
from kvferry.profiling.percentiles import percentile

CEILING = [{"direction": "store", "gb_per_s": 50.0}, {"direction": "load", "gb_per_s": 40.0}]


def row(strategy: str, gb_per_s: float, direction: str = "store", size: int = 4096) -> Any:
    return {
        "strategy": strategy,
        "direction": direction,
        "fragment_bytes": size,
        "num_fragments": 64,
        "submit_s": 12e-6,
        "gb_per_s": gb_per_s,
    }


def grid(num_programs: int, num_stages: int, gb_per_s: float) -> Any:
    return {
        "direction": "load",
        "num_programs": num_programs,
        "num_stages": num_stages,
        "gb_per_s": gb_per_s,
    }


RESULTS = {
    "about": {"device": "made by the test"},
    "ceiling": CEILING,
    "strategies": [row("packed", 30.0), row("zero-copy", 20.0), row("packed", 40.0, size=8192)],
    "grids": [grid(1, 4, 30.0), grid(2, 4, 39.0)],
}


@pytest.mark.parametrize(
    ("percent", "expected"), [(50, 5), (99, 10), (100, 10), (1, 1), (10, 1), (11, 2)]
)
def test_percentile(percent: float, expected: float) -> None:
    assert percentile([10, 1, 9, 2, 8, 3, 7, 4, 6, 5], percent) == expected


def test_percentile_refuses_what_has_none() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        percentile([], 50)
    with pytest.raises(ValueError, match="got 0"):
        percentile([1.0], 0)


def test_the_smallest_grid_within_five_percent_wins_and_of_equals_the_fastest() -> None:
    rows = [grid(1, 1, 90.0), grid(2, 1, 95.0), grid(2, 4, 96.0), grid(8, 1, 100.0)]
    assert gpu_report.smallest_grid(rows) is rows[2]
    assert gpu_report.smallest_grid(rows[:1]) is rows[0]


def test_shares_are_of_the_same_direction() -> None:
    found = gpu_report.shares([row("a", 25.0), row("a", 10.0, "load")], CEILING)
    assert [r["share"] for r in found] == [0.5, 0.25]


def test_winners_are_found_for_each_case_apart() -> None:
    rows = [row("a", 1.0), row("b", 2.0), row("a", 3.0, size=512), row("a", 4.0, "load")]
    assert [(r["direction"], r["fragment_bytes"], r["strategy"]) for r in
            gpu_report.winners(rows)] == [
        ("load", 4096, "a"), ("store", 512, "a"), ("store", 4096, "b")
    ]  # fmt: skip


def test_everything_written_can_be_read_again(tmp_path: Path) -> None:
    paths = gpu_report.write(RESULTS, tmp_path / "new")
    assert json.loads((tmp_path / "new" / "gpu_transfer.json").read_text()) == RESULTS
    tables = (tmp_path / "new" / "gpu_transfer.md").read_text()
    assert "| packed | store | 4096 | 64 | 12.0 us | 30.00 |" in tables
    assert all(path.stat().st_size for path in paths)


def test_plots_are_pictures_one_for_each_direction_that_has_rows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = gpu_report.plot(RESULTS, tmp_path)
    assert [p.name for p in paths] == ["strategies_store.png", "grids_load.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in paths)


def test_without_matplotlib_there_are_just_no_plots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    paths = gpu_report.write(RESULTS, tmp_path)
    assert [p.name for p in paths] == ["gpu_transfer.json", "gpu_transfer.md"]

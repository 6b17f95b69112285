"""What a benchmark leaves in a folder: a record, plots, and a page that needs nothing else."""

import json
import math
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from kvferry.profiling import bench_about, bench_report
from kvferry.profiling.bench_html import size_of_png
from kvferry.profiling.bench_plots import DPI, SIZE_INCHES, draw
from kvferry.profiling.bench_report import Record, ReportError, document, prepare, read, write
from kvferry.profiling.bench_result import Plot, Result, Series, Table
from kvferry.profiling.bench_text import column_text, is_numeric, text_of

NAMES = ("transfer", "schedule", "serve")
NONE = "  none        –"  # noqa: RUF001
WICKED = "<script>alert('$x_1$ & \"')</script>"


def plots(prefix: str, label: str = "kvferry") -> list[Plot]:
    line = Series(label, [4, 16, 64], [1.0, math.nan, 3.0])
    peak = Series("peak", [4, 16, 64], [4.0] * 3, reference=True)
    bars = [Series(label, ["a", "b"], [10.0, 2000.0]), Series("other", ["b"], [7.0])]
    return [
        Plot(f"{prefix}-line", label, "KiB", "GB/s", [line, peak], log_x=True),
        Plot(f"{prefix}-bar", label, "side", "us", bars, "bar", log_y=True, caption=label),
        Plot(f"{prefix}-none", label, "side", "us", []),
    ]


def record(name: str, label: str = "kvferry", **data: Any) -> Record:
    table = Table(label, ["what", "GB/s"], [[label, 1.25], ["none", None]], label)
    title = f"Title of {name}"
    result = Result(name, title, [label, "second"], [table], plots(name, label), data)
    return Record({"command": f"kvferry bench {name}", "machine": label}, result)


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots are the first that was drawn: drawing is not what the test is about."""
    png = first_plot()
    monkeypatch.setattr(bench_report, "draw", lambda _plot, _theme: png)


@cache
def first_plot() -> bytes:
    return draw(Plot("none", "none", "x", "y", []), "light")


def test_all_is_written_and_the_record_reads_back(tmp_path: Path) -> None:
    given = record("transfer", cases=[{"x": math.inf}])
    paths = write(given, [], tmp_path)
    assert sorted(path.name for path in paths) == sorted(path.name for path in tmp_path.iterdir())
    assert {path.name for path in paths} == {
        "transfer.json",
        "transfer-line.png",
        "transfer-bar.png",
        "transfer-none.png",
        "report.html",
    }
    size = tuple(round(inches * DPI) for inches in SIZE_INCHES)
    drawn = [path.read_bytes() for path in paths if path.suffix == ".png"]
    assert [size_of_png(png) for png in drawn] == [size] * 3
    assert len(set(drawn)) == 3
    again = read(tmp_path / "transfer.json")
    assert again.result.data == {"cases": [{"x": None}]}
    assert document(again) == json.loads((tmp_path / "transfer.json").read_text())
    assert math.isnan(again.result.plots[0].series[0].y[1])


@pytest.mark.usefixtures("quickly")
def test_the_page_has_everything_and_fetches_nothing(tmp_path: Path) -> None:
    write(record("transfer"), [], tmp_path)
    page = (tmp_path / "report.html").read_text()
    sources = re.findall(r'(?:src|srcset|href)="([^"]*)"', page)
    assert len(sources) == 1 + 3 * 2
    assert all(one.startswith(("data:image/png;base64,", "#")) for one in sources)
    assert "http:" not in page
    assert "https:" not in page
    assert "url(" not in page
    assert "<script" not in page
    assert "default-src &#x27;none&#x27;" in page
    for text in ("Title of transfer", "second", "GB/s", "1.25", "kvferry bench transfer"):
        assert text in page


@pytest.mark.usefixtures("quickly")
def test_what_looks_like_markup_or_a_formula_is_text(tmp_path: Path) -> None:
    write(record("transfer", WICKED), [], tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "<script" not in page
    # Summary, alt texts (two with title and label, one with a title), caption, table and its cell
    # and note, and a fact.
    assert page.count("&lt;script&gt;") == 1 + 2 * 2 + 1 + 1 + 1 + 1 + 1 + 1


def test_a_label_that_looks_like_a_broken_formula_is_drawn() -> None:
    label = r"costs $\frac$"
    assert draw(Plot("prices", label, label, label, [Series(label, [label], [1.0])], "bar"), "dark")


@pytest.mark.usefixtures("quickly")
def test_the_page_is_of_all_records_in_the_folder(tmp_path: Path) -> None:
    write(record("transfer"), prepare(tmp_path, NAMES, "transfer"), tmp_path)
    write(record("schedule"), prepare(tmp_path, NAMES, "schedule"), tmp_path)
    others = prepare(tmp_path, NAMES, "schedule")
    assert [one.result.name for one in others] == ["transfer"]
    write(record("schedule", "once more"), others, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert page.count("<section") == 2
    assert page.count("<figure") == 6
    assert page.index("Title of schedule") < page.index("Title of transfer")
    assert "once more" in page


@pytest.mark.parametrize("text", ["", "[]", '{"format": 0}', '{"format": 1, "name": "transfer"}'])
def test_a_file_that_is_no_record_is_named_before_anything_is_measured(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / "transfer.json").write_text(text)
    with pytest.raises(ReportError, match=r"transfer\.json is no record of this version .*allowed"):
        prepare(tmp_path, NAMES, "serve")
    prepare(tmp_path, NAMES, "transfer")


def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "below"):
        with pytest.raises(ReportError, match=rf"--out {folder}: .*; allowed: a folder"):
            prepare(folder, NAMES, "transfer")
    prepare(tmp_path / "new" / "folder", NAMES, "transfer")
    assert list((tmp_path / "new" / "folder").iterdir()) == []


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_report, "can_draw", lambda: False)
    with pytest.raises(ReportError, match=r"extra `bench` \(in a clone: pip install '\.\[bench\]'"):
        prepare(tmp_path / "out", NAMES, "transfer")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["../up", "a b", "", "same"])
def test_a_plot_that_makes_no_file_of_its_own_is_refused(tmp_path: Path, name: str) -> None:
    wrong = Plot(name, "t", "x", "y", [])
    twice = [wrong, wrong] if name == "same" else [wrong]
    given = Record({}, Result("transfer", "t", [], [], twice))
    with pytest.raises(ReportError, match="allowed: a-z"):
        write(given, [], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_drawing_leaves_the_settings_of_matplotlib_alone() -> None:
    import matplotlib

    before = matplotlib.rcParams.copy()
    draw(record("transfer").result.plots[0], "dark")
    assert matplotlib.rcParams.copy() == before


def test_numbers_of_a_column_have_one_number_of_decimals() -> None:
    assert column_text([1234.5, 0.25, 3, None, "x"]) == ["1,234", "0.25", "3", "–", "x"]  # noqa: RUF001
    assert column_text([12.34, 1.0]) == ["12.3", "1.0"]
    assert column_text([0.61, 1.0, math.nan]) == ["0.61", "1.00", "–"]  # noqa: RUF001
    assert column_text([0.00121]) == ["0.0012"]


def test_only_numbers_stand_to_the_right() -> None:
    assert is_numeric([1, None, 2.5])
    assert not is_numeric([1, "two"])
    assert not is_numeric([None])


def test_text_for_a_terminal_is_aligned() -> None:
    lines = text_of(record("transfer").result).splitlines()
    assert lines[:3] == ["Title of transfer", "  kvferry", "  second"]
    assert lines[4:] == ["kvferry", "  what     GB/s", "  kvferry  1.25", NONE, "  kvferry"]


def test_where_and_with_what_is_told() -> None:
    facts = bench_about.about(["kvferry", "bench", "transfer", "--out", "my folder"])
    assert facts["command"] == "kvferry bench transfer --out 'my folder'"
    assert {"date", "commit", "machine", "GPU", "Python", "torch", "Triton", "vLLM"} <= set(facts)
    assert all(isinstance(value, str) and value for value in facts.values())


def test_the_commit_is_that_of_the_checkout_with_this_code(tmp_path: Path) -> None:
    assert bench_about.commit(tmp_path) is None
    name = Path(bench_about.__file__).name
    (tmp_path / name).touch()

    def git(*words: str) -> str:
        identity = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
        command = ["git", "-C", str(tmp_path), *identity, *words]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        return done.stdout.strip()

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "another project's")
    assert bench_about.commit(tmp_path) is None
    git("add", name)
    git("commit", "-q", "-m", "ours")
    assert bench_about.commit(tmp_path) == git("rev-parse", "--short=12", "HEAD")
    (tmp_path / name).write_text("changed")
    found = bench_about.commit(tmp_path)
    assert found is not None
    assert found.endswith(", with changes that are not committed")

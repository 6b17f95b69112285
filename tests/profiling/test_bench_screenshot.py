"""The report in a real browser: every plot is there, and something is drawn in it."""

import re
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from kvferry.profiling.bench_plots import DPI, GROUNDS, PALETTES, SIZE_INCHES, Theme
from kvferry.profiling.bench_report import Record, write
from kvferry.profiling.bench_result import Plot, Result, Series, Table

sys.path.insert(0, str(Path(__file__).parent))
from chromium import Pixels, find, screenshot

SIZE = 1240, 1500
RATIO = SIZE_INCHES[0] / SIZE_INCHES[1]
NAMES = ("lines", "bars")


def rgb(colour: str) -> npt.NDArray[np.int64]:
    return np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])


def near(pixels: Pixels, colour: str, distance: int = 12) -> npt.NDArray[np.bool_]:
    """Which pixels have this colour, or one next to it."""
    return (np.abs(pixels - rgb(colour)) <= distance).all(axis=-1)


def mark_of(name: str) -> str:
    """A colour that nothing else on the page has."""
    return f"#ff00f{NAMES.index(name)}"


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """A report of two plots whose place can be seen: each has a frame of a colour of its own."""
    find()
    sizes, names = [4.0, 16.0, 64.0], ["cold", "warm"]
    lines = [Series("ours", sizes, [1.0, 2.0, 3.0]), Series("theirs", sizes, [3.0, 1.0, 2.0])]
    bars = [Series("ours", names, [10.0, 20.0]), Series("theirs", names, [15.0, 5.0])]
    plots = [
        Plot("lines", "Lines", "fragment, KiB", "GB/s", lines, log_x=True),
        Plot("bars", "Bars", "request", "ms", bars, "bar", caption="Each has a caption."),
    ]
    table = Table("A table", ["what", "GB/s"], [["copy", 12.5], ["move", None]])
    result = Result("transfer", "A benchmark", ["It went well."], [table], plots)
    *_, page = write(Record({"command": "kvferry bench"}, result), [], tmp_path)
    frames = "".join(
        f"#plot-{name} img {{ outline: 3px solid {mark_of(name)}; }}\n" for name in NAMES
    )
    text = page.read_text().replace("</style>", f"{frames}</style>", 1)
    assert frames in text
    page.write_text(text)
    return page


def inside(pixels: Pixels, name: str) -> Pixels:
    """What is inside the frame of a plot."""
    rows, columns = np.nonzero(near(pixels, mark_of(name), 0))
    assert len(rows), f"no frame of the plot {name!r}"
    top, bottom, left, right = rows.min(), rows.max() + 1, columns.min(), columns.max() + 1
    frame = pixels[top:bottom, left:right]
    return frame[3:-3, 3:-3]


def assert_drawn(pixels: Pixels, name: str, theme: Theme) -> None:
    """Of the size that a plot has, on its ground, with both series and with ink beside them."""
    plot = inside(pixels, name)
    height, width, _ = plot.shape
    assert 400 < width < SIZE_INCHES[0] * DPI
    assert width / height == pytest.approx(RATIO, rel=0.02)
    ground = near(plot, GROUNDS[theme])
    assert 0.5 < ground.mean() < 0.98
    series = [near(plot, colour) for colour in PALETTES[theme][:2]]
    for index, mask in enumerate(series):
        assert mask.sum() > 300, f"series {index} of {name}"
    others = ~ground & ~series[0] & ~series[1]
    assert others.sum() > 1000


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_plot_is_there_and_not_empty(report: Path, theme: Theme) -> None:
    pixels = screenshot(report, report.parent, *SIZE, theme)
    for name in NAMES:
        assert_drawn(pixels, name, theme)
    corner = pixels[:8, :8].mean()
    assert corner > 230 if theme == "light" else corner < 40


def test_a_plot_that_does_not_show_would_be_seen(report: Path) -> None:
    """One image is broken and the other is blank, to see the checks above fail."""
    broken, blank = report.read_text().split('<figure id="plot-bars">')
    broken = broken.replace("base64,iVBORw0KGgo", "base64,AAAA")
    blank = re.sub(r"<picture>.*?</picture>", f"<picture>{EMPTY}</picture>", blank, count=1)
    report.write_text(f'{broken}<figure id="plot-bars">{blank}')
    pixels = screenshot(report, report.parent, *SIZE, "light")
    for name in NAMES:
        with pytest.raises(AssertionError):
            assert_drawn(pixels, name, "light")


EMPTY = (
    f'<img width="{SIZE_INCHES[0] * DPI:.0f}" height="{SIZE_INCHES[1] * DPI:.0f}" src="data:image/'
    "png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8////"
    'fwAJ+wP9BUNFygAAAABJRU5ErkJggg==">'
)
"""A picture of one white pixel, as large as a plot."""

"""The plots of a report as PNG, in colours for a light and for a dark page."""

from __future__ import annotations

import importlib.util
import io
import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from .bench_result import Plot

Theme = Literal["light", "dark"]

SIZE_INCHES: Final = (7.2, 4.2)
DPI: Final = 150
MOST_TICKS: Final = 12
MOST_BAR_LABELS: Final = 24
MOST_WIDE_GROUPS: Final = 4
LETTERS_ACROSS: Final = 72
"""As many letters of a group's name go beside each other."""

# Told apart by people with any colour vision, and of a like weight on either ground.
PALETTES: Final[Mapping[Theme, Sequence[str]]] = {
    "light": ("#2f6fb3", "#c8702a", "#2a8f5b", "#8a3ffc", "#c23b4e", "#5b6472"),
    "dark": ("#6ea8e6", "#e6a05e", "#5cc48d", "#b794f6", "#ef7d8d", "#a0a7b4"),
}
GROUNDS: Final[Mapping[Theme, str]] = {"light": "#ffffff", "dark": "#161b22"}
_INKS: Final[Mapping[Theme, str]] = {"light": "#24292f", "dark": "#d7dde4"}
_GRIDS: Final[Mapping[Theme, str]] = {"light": "#d8dee4", "dark": "#30363d"}


def can_draw() -> bool:
    """Whether matplotlib is installed; it is not imported for that."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(plot: Plot, theme: Theme) -> bytes:
    """``plot`` as PNG, ``SIZE_INCHES`` at ``DPI``. Needs matplotlib; changes none of its state."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_settings(theme)):
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        axes = figure.subplots()
        if plot.kind == "bar":
            _bars(axes, plot)
        else:
            _lines(axes, plot, _INKS[theme])
        if plot.log_y:
            axes.set_yscale("log")
            _mark_powers(axes.yaxis)
        elif _least(plot) >= 0:
            axes.set_ylim(bottom=0)
        axes.set(xlabel=plot.x_label, ylabel=plot.y_label)
        axes.set_title(plot.title, loc="left", weight="bold")
        axes.grid(axis="y", which="major")
        if len(plot.series) > 1:
            columns = len(plot.series) if len(plot.series) <= 4 else 3
            figure.legend(loc="outside lower center", ncols=columns)
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=DPI)
    return image.getvalue()


def _settings(theme: Theme) -> Any:
    from matplotlib import rcParamsDefault
    from cycler import cycler  # isort: skip  # comes with matplotlib

    ink, ground = _INKS[theme], GROUNDS[theme]
    inks = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color")
    unwanted = ("backend", "interactive", "toolbar", "timezone")
    defaults = {k: v for k, v in rcParamsDefault.items() if k.split(".")[0] not in unwanted}
    return (
        defaults
        | dict.fromkeys(inks, ink)
        | {
            "text.parse_math": False,  # a label is text, a dollar sign in it too
            "font.size": 10,
            "axes.titlesize": 12,
            "axes.axisbelow": True,
            "axes.edgecolor": _GRIDS[theme],
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.prop_cycle": cycler(color=list(PALETTES[theme])),
            "figure.facecolor": ground,
            "axes.facecolor": ground,
            "savefig.facecolor": ground,
            "figure.constrained_layout.w_pad": 0.12,
            "figure.constrained_layout.h_pad": 0.1,
            "grid.color": _GRIDS[theme],
            "legend.frameon": False,
        }
    )


def _least(plot: Plot) -> float:
    return min((y for one in plot.series for y in one.y if not math.isnan(y)), default=0.0)


def _lines(axes: Any, plot: Plot, ink: str) -> None:
    for one in plot.series:
        if one.reference:
            axes.plot(one.x, one.y, linestyle="--", linewidth=1.5, color=ink, label=one.label)
        else:
            marker = "o" if len(one.x) <= MOST_TICKS else None
            axes.plot(one.x, one.y, linewidth=2, marker=marker, markersize=5, label=one.label)
    if plot.log_x:
        axes.set_xscale("log")
        _mark_powers(axes.xaxis)
        points = list(plot.series[0].x) if plot.series else []
        if 0 < len(points) <= MOST_TICKS and all(list(one.x) == points for one in plot.series):
            axes.set_xticks(points, [_number(float(x)) for x in points])


def _mark_powers(axis: Any) -> None:
    """Ticks of a logarithmic axis, written as numbers: 1, 2 and 5 of each power where there are few
    powers, else the powers."""
    from matplotlib.ticker import LogLocator, NullLocator

    low, high = axis.get_view_interval()
    few = low > 0 and high / low < 1000
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,)))
    axis.set_major_formatter(_tick)
    axis.set_minor_locator(NullLocator())


def _bars(axes: Any, plot: Plot) -> None:
    """Series side by side in each group; a group is a value of x, in the order of appearance."""
    groups = list(dict.fromkeys(itertools.chain.from_iterable(one.x for one in plot.series)))
    width = 0.8 / max(1, len(plot.series))
    labelled = sum(len(one.x) for one in plot.series) <= MOST_BAR_LABELS
    for index, one in enumerate(plot.series):
        offset = (index - (len(plot.series) - 1) / 2) * width
        places = [groups.index(x) + offset for x in one.x]
        bars = axes.bar(places, one.y, width=width * 0.92, label=one.label)
        if labelled:
            axes.bar_label(bars, labels=[_number(y) for y in one.y], padding=2, fontsize=8)
    size = 9 if len(groups) <= MOST_WIDE_GROUPS else 8
    axes.set_xticks(range(len(groups)), [_group_name(g, len(groups)) for g in groups], size=size)
    axes.margins(y=0.12)


def _group_name(group: float | str, num_groups: int) -> str:
    """In lines that stand beside each other."""
    if not isinstance(group, str):
        return _number(group)
    width = max(6, LETTERS_ACROSS // num_groups)
    return "\n".join(textwrap.wrap(group, width, break_long_words=False)) or group


def _tick(value: float, _position: int | None = None) -> str:
    return _number(value)


def _number(value: float) -> str:
    """Short: three digits that count, thousands apart."""
    if math.isnan(value):
        return ""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"

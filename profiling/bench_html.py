"""The report: one page that opens from disk, with everything in it and nothing to be fetched."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Sequence
from html import escape
from typing import Final

from .bench_plots import Theme
from .bench_result import Plot, Result, Table
from .bench_text import column_text, columns_of, is_numeric

Draw = Callable[[Plot, Theme], bytes]
Section = tuple[dict[str, str], Result]

TITLE: Final = "kvferry benchmarks"
POLICY: Final = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""The browser itself refuses to load anything, whatever ends up in the page."""

_STYLE: Final = """
:root { color-scheme: light dark; --ink: #24292f; --soft: #57606a; --page: #f6f8fa; --card: #ffffff;
  --line: #d8dee4; --mark: #2f6fb3; }
@media (prefers-color-scheme: dark) { :root { --ink: #d7dde4; --soft: #9aa4af; --page: #0d1117;
  --card: #161b22; --line: #30363d; --mark: #6ea8e6; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 28px; margin: 0 0 4px; }
h2 { font-size: 22px; margin: 48px 0 12px; padding-top: 20px; border-top: 3px solid var(--mark); }
h3 { font-size: 17px; margin: 32px 0 8px; }
a { color: var(--mark); }
nav { color: var(--soft); }
.summary { margin: 0 0 20px; padding: 14px 18px 14px 34px; background: var(--card);
  border: 1px solid var(--line); border-left: 4px solid var(--mark); border-radius: 6px; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr));
  gap: 20px; margin: 20px 0; }
figure { margin: 0; padding: 12px; background: var(--card); border: 1px solid var(--line);
  border-radius: 6px; }
figure img { display: block; width: 100%; height: auto; }
figcaption, .note { color: var(--soft); font-size: 14px; }
figcaption { padding: 8px 4px 0; }
.table { overflow-x: auto; background: var(--card); border: 1px solid var(--line);
  border-radius: 6px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { padding: 6px 11px; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); }
tr:last-child > * { border-bottom: 0; }
thead th { color: var(--soft); vertical-align: bottom; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
td.number { white-space: nowrap; }
.about th { width: 140px; white-space: nowrap; color: var(--soft); font-weight: 600; }
.about td { overflow-wrap: anywhere; }
code { font: 14px ui-monospace, "DejaVu Sans Mono", monospace; }
@media print { :root { --page: #ffffff; } figure, .table { break-inside: avoid; } }
"""


def page(sections: Sequence[Section], draw: Draw) -> str:
    """The page of all ``sections``; every plot is drawn for a light and for a dark ground."""
    links = " · ".join(
        f'<a href="#{escape(result.name)}">{escape(result.title)}</a>' for _, result in sections
    )
    body = "\n".join(_section(about, result, draw) for about, result in sections)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{TITLE}</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<h1>{TITLE}</h1>
<nav>{links}</nav>
{body}
</main>
</body>
</html>
"""


def _section(about: dict[str, str], result: Result, draw: Draw) -> str:
    sentences = "".join(f"<li>{escape(sentence)}</li>" for sentence in result.summary)
    plots = "\n".join(_figure(plot, draw) for plot in result.plots)
    tables = "\n".join(_table(table) for table in result.tables)
    return f"""<section id="{escape(result.name)}">
<h2>{escape(result.title)}</h2>
<ul class="summary">{sentences}</ul>
<div class="plots">
{plots}
</div>
{tables}
<h3>Measured with</h3>
{_about(about)}
</section>"""


def _figure(plot: Plot, draw: Draw) -> str:
    light, dark = draw(plot, "light"), draw(plot, "dark")
    width, height = size_of_png(light)
    caption = f"<figcaption>{escape(plot.caption)}</figcaption>" if plot.caption else ""
    labels = ", ".join(one.label for one in plot.series)
    words = escape(f"{plot.title}: {plot.y_label} over {plot.x_label}, for {labels}")
    return (
        f'<figure id="plot-{escape(plot.name)}"><picture>'
        f'<source media="(prefers-color-scheme: dark)" srcset="{_uri(dark)}">'
        f'<img src="{_uri(light)}" width="{width}" height="{height}" alt="{words}">'
        f"</picture>{caption}</figure>"
    )


def _uri(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def size_of_png(png: bytes) -> tuple[int, int]:
    """Width and height in pixels. Raises ValueError when it is not a PNG."""
    if len(png) < 24 or png[:8] != b"\x89PNG\r\n\x1a\n":
        raise ValueError(f"not a PNG: {png[:8]!r}")
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def _table(table: Table) -> str:
    columns = columns_of(table)
    kinds = [' class="number"' if is_numeric(cells) else "" for cells in columns]
    head = "".join(
        f'<th scope="col"{kind}>{escape(column)}</th>'
        for column, kind in zip(table.columns, kinds, strict=True)
    )
    rows = "\n".join(_row(texts, kinds) for texts in zip(*map(column_text, columns), strict=True))
    note = f'<p class="note">{escape(table.caption)}</p>' if table.caption else ""
    return (
        f"<h3>{escape(table.title)}</h3>\n"
        f'<div class="table"><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody></table></div>\n{note}"
    )


def _row(texts: Sequence[str], kinds: Sequence[str]) -> str:
    cells = zip(texts, kinds, strict=True)
    return f"<tr>{''.join(f'<td{kind}>{escape(text)}</td>' for text, kind in cells)}</tr>"


def _about(about: dict[str, str]) -> str:
    rows = "\n".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{_fact(name, value)}</td></tr>'
        for name, value in about.items()
    )
    return f'<div class="table"><table class="about"><tbody>\n{rows}\n</tbody></table></div>'


def _fact(name: str, value: str) -> str:
    return f"<code>{escape(value)}</code>" if name == "command" else escape(value)

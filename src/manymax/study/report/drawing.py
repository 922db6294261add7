"""A figure of the report as data, and its two renderings: plotly's JSON for the page, matplotlib for files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from manymax.study.report.runs import order

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as MatplotlibFigure

# Middle tones, to be read on white and on black; a loss keeps its colour in every figure.
COLOURS = (
    "#4c78a8",
    "#f58518",
    "#e45756",
    "#45a39c",
    "#54a24b",
    "#c99a1c",
    "#b279a2",
    "#f0738b",
    "#9d755d",
    "#8a8a8a",
    "#6f8fd6",
)
DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}  # plotly's names and matplotlib's
SYMBOLS = {"circle": "o", "square": "s", "diamond": "D", "triangle-up": "^", "x": "x"}
COLUMNS = 3  # panels side by side in a file
ZERO = "#000000"  # entries that are exactly 0 in a heat map, as in the paper


@dataclass(frozen=True)
class Line:
    """Points with a name; `spread` is drawn as error bars, `joined` says whether a line goes through the points."""

    name: str
    x: Sequence[Any]
    y: Sequence[float]
    loss: str
    variant: int = 0
    spread: Sequence[float] | None = None
    joined: bool = True

    @property
    def colour(self) -> str:
        """The colour of its loss."""
        return COLOURS[order(self.loss) % len(COLOURS)]


@dataclass(frozen=True)
class Panel:
    """Lines, or a heat map of `values`, in one pair of axes."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...] = ()
    values: tuple[tuple[float, ...], ...] = ()
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Figure:
    """Panels that belong together; `note` says how to read them, or what is missing if there are none."""

    name: str
    title: str
    note: str
    panels: tuple[Panel, ...]


def interactive(panel: Panel) -> dict[str, Any]:
    """The panel for plotly: `data` and `layout`; the page adds colours for light and dark."""
    axis = {"automargin": True, "zeroline": False}
    layout = {
        "xaxis": {"title": {"text": panel.x_label}, "type": _axis_type(panel), **axis},
        "yaxis": {"title": {"text": panel.y_label}, **axis, **({"type": "log"} if panel.log_y else {})},
    }
    if panel.values:
        return {"data": [_heat(panel)], "layout": layout}
    return {"data": [_trace(line) for line in panel.lines], "layout": layout}


def _axis_type(panel: Panel) -> str:
    if any(isinstance(x, str) for line in panel.lines for x in line.x):
        return "category"
    return "log" if panel.log_x else "linear"


def _trace(line: Line) -> dict[str, Any]:
    trace: dict[str, Any] = {
        "type": "scatter",
        "name": line.name,
        "x": list(line.x),
        "y": [y if math.isfinite(y) else None for y in line.y],
        "mode": "lines+markers" if line.joined else "markers",
        "line": {"color": line.colour, "dash": _nth(DASHES, line.variant), "width": 2},
        "marker": {"color": line.colour, "symbol": _nth(SYMBOLS, line.variant), "size": 5 if line.joined else 10},
    }
    if line.spread is not None:
        trace["error_y"] = {"type": "data", "array": list(line.spread), "thickness": 1, "width": 3}
    return trace


def _nth(table: dict[str, str], index: int) -> str:
    return list(table)[index % len(table)]


def _heat(panel: Panel) -> dict[str, Any]:
    """log10 of the sizes; a cell that is exactly 0 is left out and shows the black behind it."""
    logs = [[math.log10(abs(v)) if v and math.isfinite(v) else None for v in row] for row in panel.values]
    return {"type": "heatmap", "z": logs, "colorscale": "Viridis", "colorbar": {"title": {"text": "log10"}}}


def draw(figure: Figure) -> MatplotlibFigure:
    """The figure for PNG and SVG."""
    from matplotlib.figure import Figure as MatplotlibFigure

    columns = min(COLUMNS, len(figure.panels))
    rows = math.ceil(len(figure.panels) / columns)
    drawn = MatplotlibFigure(figsize=(5.2 * columns, 3.8 * rows), layout="constrained")
    for index, panel in enumerate(figure.panels):
        _draw_panel(drawn.add_subplot(rows, columns, index + 1), panel)
    drawn.suptitle(_plain(figure.title))
    named = {h.get_label(): h for axes in drawn.axes for h in axes.get_legend_handles_labels()[0]}
    if named:  # one legend for all panels
        drawn.legend(handles=list(named.values()), loc="outside lower center", ncols=columns * 2, fontsize="x-small")
    drawn.draw_without_rendering()
    drawn.set_layout_engine("none")  # laid out once, for both files
    return drawn


def _draw_panel(axes: Axes, panel: Panel) -> None:
    axes.set(title=_plain(panel.title), xlabel=_plain(panel.x_label), ylabel=_plain(panel.y_label))
    if panel.values:
        _draw_heat(axes, panel)
        return
    if panel.log_x:
        axes.set_xscale("log")
    if panel.log_y:
        axes.set_yscale("log")
    for line in panel.lines:
        axes.errorbar(
            list(line.x),
            list(line.y),
            yerr=line.spread,
            color=line.colour,
            linestyle=DASHES[_nth(DASHES, line.variant)] if line.joined else "",
            marker=SYMBOLS[_nth(SYMBOLS, line.variant)],
            markersize=3 if line.joined else 7,
            linewidth=1.5,
            label=_plain(line.name),
        )
    axes.grid(alpha=0.3)


def _draw_heat(axes: Axes, panel: Panel) -> None:
    logs = [[math.log10(abs(v)) if v and math.isfinite(v) else math.nan for v in row] for row in panel.values]
    axes.set_facecolor(ZERO)
    image = axes.imshow(logs, aspect="auto", interpolation="nearest", cmap="viridis")
    axes.figure.colorbar(image, ax=axes, label="log10")


def _plain(text: str) -> str:
    """Text in which matplotlib finds no formulas; a leading underscore would hide a legend's entry."""
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text

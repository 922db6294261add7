"""Figures of the report as data, and their two renderings: plotly's JSON for the page, matplotlib for files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from manymax.study.plain_text import in_lines
from manymax.study.report.point_labels import SIDES, room, sides
from manymax.study.report.trials import loss_position

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as MatplotlibFigure

# Tones of middle brightness, because the page may be white or black; a loss has the same colour in every figure.
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
    "#2f9ec4",
    "#a05195",
    "#7a8b3c",
    "#d45087",
    "#5d8f7b",
    "#b5651d",
)
NEUTRAL = ""  # in place of the name of a loss: grey, for what is about no loss
NEUTRAL_COLOUR = "#8f99a3"
DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}  # plotly's names and matplotlib's
SYMBOLS = {"circle": "o", "square": "s", "diamond": "D", "triangle-up": "^", "x": "x"}
MOST_TICKS = 8  # labels on a logarithmic axis
MOST_MARKERS = 30  # a line with more points is drawn without markers
PANELS_PER_ROW = 3  # in a PNG or SVG file; the page arranges panels by the width of the window
ZERO_COLOUR = "#000000"  # of entries that are exactly 0 in a heat map, as in the paper


@dataclass(frozen=True)
class Line:
    """Points with a name in the legend.

    Args:
        name: what the legend calls it.
        x, y: the coordinates; x may be words, for an axis of categories.
        loss: the loss that it is about, which gives the colour.
        variant: tells lines of one loss apart by dashes and symbols; 0 is a solid line.
        spread: half the length of the error bar at each point; None for none.
        joined: whether a line goes through the points.
        markers: whether the points of a joined line are marked.
    """

    name: str
    x: Sequence[Any]
    y: Sequence[float]
    loss: str
    variant: int = 0
    spread: Sequence[float] | None = None
    joined: bool = True
    markers: bool = True

    @property
    def marked(self) -> bool:
        """Whether its points are drawn too."""
        return self.markers and len(self.x) <= MOST_MARKERS

    @property
    def colour(self) -> str:
        """The colour of the loss, the same in every figure."""
        return NEUTRAL_COLOUR if self.loss == NEUTRAL else COLOURS[loss_position(self.loss) % len(COLOURS)]


@dataclass(frozen=True)
class Panel:
    """One pair of axes with lines, or with a heat map.

    Args:
        title: above the axes.
        x_label, y_label: along the axes.
        lines: what is drawn, unless it is a heat map.
        values: the rows of a heat map; the colour of an entry is log10 of its size.
        log_x, log_y: whether an axis is logarithmic.
        decades: the least and the largest exponent of the colours of a heat map; None for those of its values.
        labelled: whether single points have their names beside them; a legend is then not needed.
    """

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...] = ()
    values: tuple[tuple[float, ...], ...] = ()
    log_x: bool = False
    log_y: bool = False
    decades: tuple[float, float] | None = None
    labelled: bool = False

    def ticks(self) -> tuple[list[float] | None, list[float] | None]:
        """Positions of the labels on the x and the y axis; None leaves them to the renderer.

        Only logarithmic axes get positions. If the x values are a few whole numbers, such as numbers of negatives, each
        of them is labelled.
        """
        x: set[float] = {value for line in self.lines for value in line.x} if self.log_x else set()
        if self.labelled:  # where all points lie close together, there may be no round number among them
            return log_ticks(room(self.lines)), None
        y = [value for line in self.lines for value in line.y] if self.log_y else []
        label_each = len(x) <= MOST_TICKS and all(isinstance(value, int) for value in x)
        return sorted(x) if x and label_each else log_ticks(x), log_ticks(y)


@dataclass(frozen=True)
class Figure:
    """Panels that belong together.

    Args:
        name: what its files are called, without a suffix.
        title: the line above the panels.
        note: the sentences below the title that say how to read the panels and what is missing.
        panels: one or more; a figure without panels is not shown.
    """

    name: str
    title: str
    note: str
    panels: tuple[Panel, ...]


def log_ticks(values: Iterable[float]) -> list[float] | None:
    """Labels of a logarithmic axis: 1, 2 and 5 times the powers of ten that cover `values`.

    Where that would be more than `MOST_TICKS`, the powers of ten alone; None where no value is positive.

    >>> log_ticks([0.09, 0.45]), log_ticks([3, 20_000]), log_ticks([])
    ([0.1, 0.2, 0.5], [1.0, 10.0, 100.0, 1000.0, 10000.0, 100000.0], None)
    """
    exponents = [math.log10(value) for value in values if 0 < value < math.inf]
    if not exponents:
        return None
    low, high = min(exponents) - 0.1, max(exponents) + 0.1
    powers = range(math.floor(low), math.ceil(high) + 1)
    finer = [float(f"{step}e{n}") for n in powers for step in (1, 2, 5) if low <= n + math.log10(step) <= high]
    return finer if len(finer) <= MOST_TICKS else [float(f"1e{n}") for n in powers]


def interactive(panel: Panel) -> dict[str, Any]:
    """The panel as plotly's {"data", "layout"}; the script of the page adds the colours of the light or dark theme."""
    (x_ticks, y_ticks), y_type = panel.ticks(), "log" if panel.log_y else "linear"
    layout = {
        "xaxis": _axis(panel.x_label, _axis_type(panel), x_ticks),
        "yaxis": _axis(panel.y_label, y_type, y_ticks) | ({"autorange": "reversed"} if panel.values else {}),
    }
    if panel.values:
        return {"data": [_heat_trace(panel)], "layout": layout}
    traces = [_line_trace(line) for line in panel.lines]
    if panel.labelled:
        layout["xaxis"] |= {"range": [math.log10(end) for end in room(panel.lines)], "autorange": False}
        for trace, side in zip(traces, sides(panel.lines), strict=True):
            if side is not None:
                trace |= {"mode": "markers+text", "text": [trace["name"]], "textposition": SIDES[side][0]}
    return {"data": traces, "layout": layout}


def _axis(label: str, kind: str, ticks: Sequence[float] | None) -> dict[str, Any]:
    axis: dict[str, Any] = {
        "title": {"text": label, "standoff": 10},
        "type": kind,
        "automargin": True,
        "zeroline": False,
    }
    return axis if ticks is None else axis | {"tickvals": list(ticks), "ticktext": [f"{tick:,.12g}" for tick in ticks]}


def _axis_type(panel: Panel) -> str:
    if any(isinstance(x, str) for line in panel.lines for x in line.x):
        return "category"
    return "log" if panel.log_x else "linear"


def _line_trace(line: Line) -> dict[str, Any]:
    trace: dict[str, Any] = {
        "type": "scatter",
        "name": line.name,
        "legendrank": 100 * loss_position(line.loss) + line.variant,
        "x": list(line.x),
        "y": [y if math.isfinite(y) else None for y in line.y],
        "mode": ("lines+markers" if line.marked else "lines") if line.joined else "markers",
        "line": {"color": line.colour, "dash": _nth(DASHES, line.variant), "width": 2},
        "marker": {"color": line.colour, "symbol": _nth(SYMBOLS, line.variant), "size": 5 if line.joined else 10},
    }
    if line.spread is not None:
        trace["error_y"] = {"type": "data", "array": list(line.spread), "thickness": 1, "width": 3}
    return trace


def _nth(table: dict[str, str], index: int) -> str:
    return list(table)[index % len(table)]


def _heat_trace(panel: Panel) -> dict[str, Any]:
    """A heat map of log10 |value|; an entry that is exactly 0 is left out, so that the black behind it shows."""
    logs = [[math.log10(abs(v)) if v and math.isfinite(v) else None for v in row] for row in panel.values]
    heat = {"type": "heatmap", "z": logs, "colorscale": "Viridis", "colorbar": {"title": {"text": "log10"}}}
    return heat if panel.decades is None else heat | dict(zip(("zmin", "zmax"), panel.decades, strict=True))


def draw(figure: Figure) -> MatplotlibFigure:
    """The figure as matplotlib draws it, for PNG and SVG files."""
    from matplotlib.figure import Figure as MatplotlibFigure

    columns = min(PANELS_PER_ROW, len(figure.panels))
    rows = math.ceil(len(figure.panels) / columns)
    drawn = MatplotlibFigure(figsize=(5.2 * columns, 3.8 * rows), layout="constrained")
    for index, panel in enumerate(figure.panels):
        _draw_panel(drawn.add_subplot(rows, columns, index + 1), panel)
    drawn.suptitle(_escape_text(figure.title))
    named = {h.get_label(): h for axes in drawn.axes for h in axes.get_legend_handles_labels()[0]}
    if named:  # one legend for all panels, because they have the same lines
        drawn.legend(handles=list(named.values()), loc="outside lower center", ncols=columns * 2, fontsize="x-small")
    drawn.draw_without_rendering()
    drawn.set_layout_engine("none")  # keep this layout: saving would compute it again for each file
    return drawn


def _draw_panel(axes: Axes, panel: Panel) -> None:
    axes.set(title=_escape_text(panel.title), xlabel=_escape_text(panel.x_label), ylabel=_escape_text(panel.y_label))
    if panel.values:
        _draw_heat_map(axes, panel)
        return
    for line in panel.lines:
        axes.errorbar(
            list(line.x),
            list(line.y),
            yerr=line.spread,
            color=line.colour,
            linestyle=DASHES[_nth(DASHES, line.variant)] if line.joined else "",
            marker=SYMBOLS[_nth(SYMBOLS, line.variant)] if line.marked or not line.joined else "",
            markersize=3 if line.joined else 7,
            linewidth=1.5,
            label=_escape_text(line.name),
        )
    for line, side in zip(panel.lines, sides(panel.lines) if panel.labelled else (), strict=False):
        if side is not None:
            place: Any = SIDES[side][1]
            axes.annotate(_escape_text(line.name), (line.x[0], line.y[0]), textcoords="offset points", **place)
    for scale, set_scale, ticks in zip("xy", (axes.set_xscale, axes.set_yscale), panel.ticks(), strict=True):
        if ticks is not None:
            set_scale("log")
            getattr(axes, f"set_{scale}ticks")(ticks, [f"{tick:,.12g}" for tick in ticks])
            getattr(axes, f"{scale}axis").minorticks_off()
    axes.grid(alpha=0.3)


def _draw_heat_map(axes: Axes, panel: Panel) -> None:
    logs = [[math.log10(abs(v)) if v and math.isfinite(v) else math.nan for v in row] for row in panel.values]
    axes.set_facecolor(ZERO_COLOUR)
    low, high = panel.decades or (None, None)
    image = axes.imshow(logs, aspect="auto", interpolation="nearest", cmap="viridis", vmin=low, vmax=high)
    axes.figure.colorbar(image, ax=axes, label="log10")


def _escape_text(text: str) -> str:
    """`text` for matplotlib and for the XML of an SVG file, in which control characters must not be.

    A $ would begin a formula, and a leading underscore would hide the entry of a legend.
    """
    text = in_lines(text).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text

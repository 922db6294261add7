"""A figure of the report as data, and its two renderings: plotly's JSON for the page, matplotlib for files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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
FEW = 8  # numbers of an axis that are all labelled
MANY = 30  # points from which a line goes without markers
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
    """Lines, or a heat map of `values`, in one pair of axes; colours reach over the exponents `decades`."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...] = ()
    values: tuple[tuple[float, ...], ...] = ()
    log_x: bool = False
    log_y: bool = False
    decades: tuple[float, float] | None = None

    def ticks(self) -> tuple[list[float] | None, list[float] | None]:
        """Where the axes are labelled if they are logarithmic: whole numbers of x at themselves where they are few."""
        x = {value for line in self.lines for value in line.x} if self.log_x else set()
        y = [value for line in self.lines for value in line.y] if self.log_y else []
        themselves = len(x) <= FEW and all(isinstance(value, int) for value in x)
        return sorted(x) if x and themselves else log_ticks(x), log_ticks(y)


@dataclass(frozen=True)
class Figure:
    """Panels that belong together; `note` says how to read them, or what is missing if there are none."""

    name: str
    title: str
    note: str
    panels: tuple[Panel, ...]


def log_ticks(values: Iterable[float]) -> list[float] | None:
    """1, 2 and 5 times powers of ten about the values, or the powers alone where these are many.

    >>> log_ticks([0.09, 0.45]), log_ticks([3, 20_000]), log_ticks([])
    ([0.1, 0.2, 0.5], [1.0, 10.0, 100.0, 1000.0, 10000.0, 100000.0], None)
    """
    exponents = [math.log10(value) for value in values if 0 < value < math.inf]
    if not exponents:
        return None
    low, high = min(exponents) - 0.1, max(exponents) + 0.1
    powers = range(math.floor(low), math.ceil(high) + 1)
    finer = [float(f"{step}e{n}") for n in powers for step in (1, 2, 5) if low <= n + math.log10(step) <= high]
    return finer if len(finer) <= FEW else [float(f"1e{n}") for n in powers]


def interactive(panel: Panel) -> dict[str, Any]:
    """The panel for plotly: `data` and `layout`; the page adds colours for light and dark."""
    (x_ticks, y_ticks), y_type = panel.ticks(), "log" if panel.log_y else "linear"
    layout = {
        "xaxis": _axis(panel.x_label, _axis_type(panel), x_ticks),
        "yaxis": _axis(panel.y_label, y_type, y_ticks) | ({"autorange": "reversed"} if panel.values else {}),
    }
    if panel.values:
        return {"data": [_heat(panel)], "layout": layout}
    return {"data": [_trace(line) for line in panel.lines], "layout": layout}


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


def _trace(line: Line) -> dict[str, Any]:
    trace: dict[str, Any] = {
        "type": "scatter",
        "name": line.name,
        "legendrank": 100 * order(line.loss) + line.variant,
        "x": list(line.x),
        "y": [y if math.isfinite(y) else None for y in line.y],
        "mode": ("lines" if len(line.x) > MANY else "lines+markers") if line.joined else "markers",
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
    heat = {"type": "heatmap", "z": logs, "colorscale": "Viridis", "colorbar": {"title": {"text": "log10"}}}
    return heat if panel.decades is None else heat | dict(zip(("zmin", "zmax"), panel.decades, strict=True))


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
    for line in panel.lines:
        axes.errorbar(
            list(line.x),
            list(line.y),
            yerr=line.spread,
            color=line.colour,
            linestyle=DASHES[_nth(DASHES, line.variant)] if line.joined else "",
            marker="" if line.joined and len(line.x) > MANY else SYMBOLS[_nth(SYMBOLS, line.variant)],
            markersize=3 if line.joined else 7,
            linewidth=1.5,
            label=_plain(line.name),
        )
    for scale, set_scale, ticks in zip("xy", (axes.set_xscale, axes.set_yscale), panel.ticks(), strict=True):
        if ticks is not None:
            set_scale("log")
            getattr(axes, f"set_{scale}ticks")(ticks, [f"{tick:,.12g}" for tick in ticks])
            getattr(axes, f"{scale}axis").minorticks_off()
    axes.grid(alpha=0.3)


def _draw_heat(axes: Axes, panel: Panel) -> None:
    logs = [[math.log10(abs(v)) if v and math.isfinite(v) else math.nan for v in row] for row in panel.values]
    axes.set_facecolor(ZERO)
    low, high = panel.decades or (None, None)
    image = axes.imshow(logs, aspect="auto", interpolation="nearest", cmap="viridis", vmin=low, vmax=high)
    axes.figure.colorbar(image, ax=axes, label="log10")


def _plain(text: str) -> str:
    """Text in which matplotlib finds no formulas; a leading underscore would hide a legend's entry."""
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text

"""The figures of heads.py as Markdown tables, and the page that they are written into."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from head_curves import slope, time_ratio
from measure import write_between_marks


def tables(figures: dict[str, Any], plot_path: str) -> list[str]:
    """Lines of Markdown: all comparisons with their bars, the trajectory, the growth, and the limits of the machine.

    Args:
        figures: the content of the JSON file.
        plot_path: of the plot of growth, relative to the page.
    """
    groups = figures["groups"]
    lines = ["| scores | ours / other | ratio | bar | |", "| --- | --- | --- | --- | --- |"]
    for group in groups.values():
        for entry in group["lines"]:
            bar = "-" if entry["bar"] is None else f"{entry['bar']:.3g}"
            cells = [entry["problem"], entry["what"], f"{entry['ratio']:.3g}", bar, entry["verdict"]]
            lines.append(f"| {' | '.join(cells)} |")
    if "rows" in groups.get("trajectory", {}):
        lines += ["", *trajectory_table(groups["trajectory"])]
    if "seconds" in groups.get("growth", {}):
        lines += ["", *growth_table(groups["growth"], plot_path)]
    peaks = "; ".join(f"{name} {value:.3g}" for name, value in next(iter(groups.values()))["limits"].items())
    about = figures["environment"]
    lines += ["", f"{about['machine']}, threads: {about['threads']}, torch {about['torch']}. Limits measured: {peaks}."]
    return lines


def trajectory_table(group: dict[str, Any]) -> list[str]:
    """Time over that of softmax, and support, for every second stretch of steps."""
    names = list(group["cheaper_from"])
    lines = [
        f"Time of a step over that of softmax, and support (median), C = {group['classes']:,}, to step:",
        "",
        f"| step | {' | '.join(names)} |",
        "| --- |" + " --- |" * len(names),
    ]
    for row in group["rows"][::2]:
        cells = [f"{time_ratio(row, name):.2f} ({row[name]['support']:.0f})" for name in names]
        lines.append(f"| {row['step']} | {' | '.join(cells)} |")
    steps = [f"{number}" if number is not None else "never" for number in group["cheaper_from"].values()]
    return [*lines, f"| cheaper from | {' | '.join(steps)} |"]


def growth_table(group: dict[str, Any], plot_path: str) -> list[str]:
    """Milliseconds of a step against C, the slope, and the cost of an epoch that the paper states."""
    counts = group["classes"]
    lines = [
        f"Milliseconds of a step, N = 128, and the slope on [log-log lines]({plot_path}):",
        "",
        f"| member | {' | '.join(f'C = {c:,}' for c in counts)} | slope | an epoch, as the paper has it |",
        "| --- |" + " --- |" * (len(counts) + 2),
    ]
    for name, values in group["seconds"].items():
        cells = [f"{1e3 * value:.3g}" for value in values] + [f"{slope(counts, values):.2f}"]
        paper = group["paper"].get(name.removesuffix(", compiled"), "-").replace("|", r"\|")
        lines.append(f"| {name} | {' | '.join(cells)} | {paper} |")
    return lines


def write_page(page: Path, source: Path) -> None:
    """Write the tables of the JSON file `source` between the marks of a page."""
    plot_path = os.path.relpath(source.with_suffix(".svg"), page.parent)
    write_between_marks(page, "speed", tables(json.loads(source.read_text(encoding="utf-8")), plot_path))

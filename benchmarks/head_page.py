"""The page of heads.py, made of its record alone: a figure, five ratios, and all tables folded below."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from measure import write_between_marks

# The five ratios: (question, beginning of the problem, beginning of the figure, what to say of it).
HEADLINES = (
    ("peers", "real C=41,000", "softmax / eager", "softmax / plain torch: `F.linear` and `F.cross_entropy`"),
    ("limit", "real C=41,000", "softmax / three products", "softmax / its three matrix products, the limit"),
    ("limit", "real C=41,000", "sparsemax / softmax", "sparsemax / our softmax"),
    ("peers", "real C=41,000", "entmax-1.5 / package", "entmax-1.5 / the entmax package at its best k"),
    (
        "sampled",
        "Zipf",
        "ours, C = 1,000,000 / nn.Embedding",
        "sampled softmax over 10^6 classes with its optimiser step / `nn.Embedding(sparse=True)` and `SparseAdam`",
    ),
)
TITLES = {
    "limit": "How far is each loss from the limit, and from our softmax?",
    "peers": "Ours against torch and the entmax package",
    "memory": "Peaks of memory above inputs and gradients",
    "sampled": "Sampled softmax with its optimiser step",
    "neighbour": "Beside a process that keeps one core busy",
    "backends": "What the default back end saves against plain torch",
    "unwanted": "Work that nobody wants: ignored rows, frozen tensors, no gradient",
    "epoch": "An epoch of matrix factorisation",
    "growth": "Growth with the number of classes",
}
STYLES: dict[str, dict[str, Any]] = {  # of the lines of the figure: ours are solid, those of others dashed
    "softmax": {"color": "#1f4e9c", "linewidth": 2.5},
    "sparsemax": {"color": "#d1495b", "linewidth": 2.5},
    "entmax-1.5": {"color": "#2e8b57", "linewidth": 2.5},
    "torch: eager": {"color": "#1f4e9c", "linestyle": "--"},
    "torch: linear_cross_entropy": {"color": "#6fa8dc", "linestyle": "--"},
    "entmax package: sparsemax": {"color": "#d1495b", "linestyle": "--"},
    "entmax package: entmax-1.5": {"color": "#2e8b57", "linestyle": "--"},
}


def write_page(page: Path, source: Path) -> None:
    """Write the record `source` between the marks of a page, and the figure as SVG next to the record."""
    record, drawing = json.loads(source.read_text(encoding="utf-8")), source.with_suffix(".svg")
    if "curves" in record["questions"].get("growth", {}):
        draw(drawing, record["questions"]["growth"])
    write_between_marks(page, "speed", page_lines(record, os.path.relpath(drawing, page.parent)))


def page_lines(record: dict[str, Any], drawing: str) -> list[str]:
    """The lines of the page: figure, five ratios, machine, and a folded table per question."""
    lines = [f"![Time and peak memory of a step against the number of classes]({drawing})", ""]
    lines += [*headlines(record), "", *machine(record), ""]
    folded = [("Bars that are not reached", missed_bars(record))]
    for name, found in record["questions"].items():
        folded.append((TITLES[name] + ("" if found["complete"] else " (not complete)"), table(name, found)))
    for title, content in folded:
        if content:
            lines += ["<details>", f"<summary>{title}</summary>", "", *content, "", "</details>", ""]
    return lines[:-1]


def headlines(record: dict[str, Any]) -> list[str]:
    """The table of the five ratios; one that the record does not have is left out."""
    lines = ["| time of a step, ours / other | ratio |", "| --- | --- |"]
    for question, problem, figure, text in HEADLINES:
        for line in record["questions"].get(question, {"lines": []})["lines"]:
            if line["problem"].startswith(problem) and line["figure"].startswith(figure):
                lines.append(f"| {text} | **{line['ratio']:.2f}** |")
                break
    return lines


def machine(record: dict[str, Any]) -> list[str]:
    """Where the figures were measured, and how many bars are reached."""
    about = record["environment"]
    bars = sum(line["bar"] is not None for found in record["questions"].values() for line in found["lines"])
    missed = max(0, len(missed_bars(record)) - 2)  # without the head of the table
    text = [
        f"Measured on {about['date']}: {about['machine']} ({', '.join(about['instruction_sets'])}), threads:"
        f" {about['threads']}, torch {about['torch']}, back end: {about['backend'] or 'not recorded'}.",
        f"Of {bars} bars, goals that were set beforehand, {bars - missed} are reached.",
    ]
    if record["quick"]:
        text.append("**These are figures of small sizes, made to try the program.**")
    return text


def missed_bars(record: dict[str, Any]) -> list[str]:
    """A table of the figures above their bars; nothing if there is none."""
    lines = [line for found in record["questions"].values() for line in found["lines"]]
    rows = [
        [line["problem"], line["figure"], cell(line), repeats(line)]
        for line in lines
        if line["verdict"] == "not reached"
    ]
    return markdown(["scores", "ours / other", "ratio > bar", "repeats"], rows) if rows else []


def table(question: str, found: dict[str, Any]) -> list[str]:
    """The table of a question, below what is known of its scores."""
    lines = [*facts(found["facts"]), ""] if found["facts"] else []
    if question == "growth":
        return lines + curves(found)
    figures = list(dict.fromkeys(line["figure"] for line in found["lines"]))
    problems = list(dict.fromkeys(line["problem"] for line in found["lines"]))
    cells = {(line["problem"], line["figure"]): cell(line) for line in found["lines"]}
    if len(cells) == len(figures) * len(problems) and len(problems) > 1:  # every figure of every problem
        rows = [[problem, *(cells[problem, figure] for figure in figures)] for problem in problems]
        return lines + markdown(["scores", *figures], rows)
    rows = [[line["problem"], line["figure"], cell(line), repeats(line)] for line in found["lines"]]
    return lines + markdown(["scores", "ours / other", "ratio", "repeats"], rows)


def cell(line: dict[str, Any]) -> str:
    """A ratio with its bar; in bold type if the bar is not reached."""
    if line["bar"] is None:
        return f"{line['ratio']:.3g}"
    return (
        f"**{line['ratio']:.3g}** > {line['bar']:g}"
        if line["verdict"] == "not reached"
        else (f"{line['ratio']:.3g} ≤ {line['bar']:g}")
    )


def repeats(line: dict[str, Any]) -> str:
    """How many runs the two medians of a ratio are of."""
    return ", ".join(str(taken["repeats"]) for taken in line.get("times", {}).values())


def facts(known: dict[str, Any]) -> list[str]:
    """What the speed of sparse losses depends on, per problem."""
    members = list(next(iter(known.values()))["support"])
    rows = [
        [problem, of["source"], f"{of['largest_score']:.2f}", f"{of['within_1_of_it']:.3f}"]
        + [f"{of['support'][name]:,.0f}" for name in members]
        for problem, of in known.items()
    ]
    return markdown(
        ["scores", "made of", "largest", "share within 1 of it", *(f"{name} keeps" for name in members)], rows
    )


def curves(found: dict[str, Any]) -> list[str]:
    """Milliseconds and peaks against C."""
    counts = [f"C = {count:,}" for count in found.get("classes", ())]
    rows = []
    for name, curve in found.get("curves", {}).items():
        peaks = ["-" if peak is None else f"{peak:.0f} MB" for peak in curve["peak_mb"]]
        both = zip(curve["seconds"], peaks, strict=True)
        rows.append([name, *(f"{1e3 * seconds:.3g} ms, {peak}" for seconds, peak in both)])
    return markdown([f"N = {found.get('rows')}", *counts], rows)


def markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    """A table in Markdown."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def draw(path: Path, found: dict[str, Any]) -> None:
    """Draw time and memory against C with logarithmic axes, one above the other so that a phone shows them legibly."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "manymax", "font.size": 13})  # the same figures give the same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 1, figsize=(5.5, 8), sharex=True, layout="constrained")
    for axis, key, factor in ((axes[0], "seconds", 1e3), (axes[1], "peak_mb", 1.0)):
        for name, curve in found["curves"].items():
            points = [
                (c, factor * v) for c, v in zip(found["classes"], curve[key], strict=True) if v is not None and v > 0
            ]
            axis.loglog(
                *zip(*points, strict=True),
                marker="o",
                markersize=4,
                label=name if ":" in name else f"ours: {name}",
                **STYLES[name],
            )
        axis.grid(alpha=0.3)
    axes[0].set(title="Time of a step, ms")
    axes[1].set(title="Peak memory of a step, MB", xlabel=f"classes C; N = {found['rows']}, d = 64")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=10.5)
    new = path.with_suffix(".tmp")
    figure.savefig(new, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    new.replace(path)

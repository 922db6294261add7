"""`docs/reproduction.md`: the paper's questions answered from kept records, with the paper's numbers beside ours.

`collected` reads what the page is made of; the other modules write its sections.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from manymax.errors import ManymaxError
from manymax.paper.findings_file import FINDINGS_FILE, decide
from manymax.paper.reproduction.accuracy import accuracy, large_differences, negatives
from manymax.paper.reproduction.collected import CAUSES, RESULTS, Collected, read
from manymax.paper.reproduction.comparisons import comparison_figures, method_comparisons
from manymax.paper.reproduction.convergence import convergence, curve_figures, probe_figures, trained_models
from manymax.paper.reproduction.findings_board import findings_board
from manymax.paper.reproduction.first_screen import first_screen
from manymax.paper.reproduction.markup import FIGURE_PREFIX, FIGURES
from manymax.paper.reproduction.origin import data, how_it_was_run, missing
from manymax.study.files import atomic_write, write_json
from manymax.study.report.drawing import Figure, draw
from manymax.study.report.trials import trials

__all__ = ["CAUSES", "PAGE", "RESULTS", "Collected", "drawings", "page", "read", "write"]

PAGE = Path("docs/reproduction.md")

INTRODUCTION = """# The paper's tables, run again

The paper "Is Softmax Loss all you need?" compares losses for recommenders. Here are its tables from runs of our own.
"""

CONVENTIONS = """Written by `manymax reproduction` from the records in `results/study`; nothing is typed by hand but
the introduction and the causes in `docs/causes.toml`. Every number of ours is of the test part, at the epoch and the
tuned settings (learning rate; for alternating least squares the ridge) that are best on the validation part. In
brackets stands what the paper prints for the same data, backbone and loss at its own best learning rate by N@20.
Where there are several seeds, the mean is given with the standard deviation over seeds: seeds change the split too.
Where batches were made in several ways, a number is of the one nearest to the paper's, which are of pairs; learning
rates are compared in the way in which most of them were run.
Seconds are those of the clock, on a machine that other work shared at times: between runs they are no benchmark.
"""


def write(root: Path, originals: Sequence[Path] = ()) -> list[Path]:
    """Write the page and its figures from `results/study`.

    Args:
        root: the top folder of a checkout.
        originals: folders with original runs, to decide the findings anew with the metrics of their users.

    Returns:
        The files that were written.
    """
    if originals:
        known = read(root)
        write_json(root / RESULTS / FINDINGS_FILE, decide(known.done, originals, known.cases))
    collected = read(root)
    folder = root / FIGURES
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = [_save(figure, folder) for figure in drawings(collected)]
        for stale in set(folder.glob(f"{FIGURE_PREFIX}*.svg")) - set(written):
            stale.unlink()
        with atomic_write(root / PAGE) as partial:
            partial.write_text(page(collected), encoding="utf-8")
    except OSError as error:
        raise ManymaxError(f"the page in {root / PAGE} cannot be written: {error.strerror or error}.") from None
    return [root / PAGE, *written]


def _save(figure: Figure, folder: Path) -> Path:
    import matplotlib

    path = folder / f"{FIGURE_PREFIX}{figure.name}.svg"
    drawn = draw(figure)
    # Equal records give equal files: without a fixed salt, matplotlib numbers the parts of an SVG at random.
    with matplotlib.rc_context({"svg.hashsalt": figure.name}), atomic_write(path) as partial:
        drawn.savefig(partial, format="svg", metadata={"Date": None})
    return path


def page(collected: Collected) -> str:
    """The page in Markdown."""
    made = trials(collected.done)
    parts = [
        INTRODUCTION,
        *first_screen(collected, made),
        "## How to read the rest\n",
        CONVENTIONS,
        *findings_board(collected),
        *accuracy(made),
        *negatives(made),
        *large_differences(made, collected.causes),
        *convergence(made),
        *trained_models(made),
        *method_comparisons(collected),
        *data(made),
        *how_it_was_run(collected),
        *missing(made, collected),
    ]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def drawings(collected: Collected) -> list[Figure]:
    """Every figure of the page."""
    made = trials(collected.done)
    return [*curve_figures(made), *probe_figures(made), *comparison_figures(collected)]

"""Diagnosis of given scores: bias and variance of every approximation, and which classes get a gradient.

It is what `manymax diagnose` prints and draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from manymax.engine.member import Kind, Member
from manymax.errors import ArgumentError, ManymaxError
from manymax.members import BASELINE, FAMILY
from manymax.ops.tree import HuffmanTree
from manymax.study.data.interactions import PADDING
from manymax.study.files import atomic_write, write_json
from manymax.study.serve import Served
from manymax.theory.approximations import approximations, tree_log_probs, variant_names
from manymax.theory.bias_variance import divergences, drawn, estimate
from manymax.theory.gradient_deviation import exact_gradient, gradient_estimators, predicted_gradient
from manymax.theory.gradients import by_score, gradient, tie_loss, top_jacobian, undrawn_probability, without_signal
from manymax.theory.inputs import MASKED_LOG_PROB
from manymax.theory.jacobian import spectral_norm
from manymax.theory.order_preservation import member_map

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ASSUMED_DIM = 16  # size of the vectors behind scores whose vectors are not known
RUN_PROPOSALS = ("uniform", "popularity")  # proposals that `of_run` can make
FIGURE_SUFFIXES = ("png", "svg")
KINDS_IN_ORDER: tuple[Kind, ...] = ("sampled", "tree", "quadratic", "exact")  # how a table sorts approximations
NORM_ROWS, NORM_STEPS = 8, 100  # rows and steps of the power iteration; two correct digits are enough here

GRADIENT_ROWS, EXACT_CLASSES = 4, 5000  # rows and classes of exact deviations: tenths of a second for each


@dataclass(frozen=True)
class Subject:
    """The scores that are diagnosed.

    name: of the scores, for the output.
    scores: (N, C) float64.
    target: (N,) the label of each row.
    log_q: (C,) log-probabilities of the proposal for negatives.
    dim: size of the vectors whose inner products the scores are.
    counts: (C,) how often each class occurs in the data, or None if that is not known.
    """

    name: str
    scores: Tensor
    target: Tensor
    log_q: Tensor
    dim: int
    counts: Tensor | None = None

    @property
    def num_classes(self) -> int:
        """C."""
        return self.scores.shape[-1]


def _gaussian(rows: int, num_classes: int, generator: torch.Generator) -> Tensor:
    return 2 * torch.randn(rows, num_classes, generator=generator, dtype=torch.float64)


def _zipf(rows: int, num_classes: int, generator: torch.Generator) -> Tensor:
    ranks = torch.rand(rows, num_classes, generator=generator).argsort(-1) + 1
    return -1.2 * ranks.double().log()


def _inner_products(rows: int, num_classes: int, generator: torch.Generator) -> Tensor:
    shapes = ((rows, ASSUMED_DIM), (num_classes, ASSUMED_DIM))
    queries, items = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return queries @ items.T / 2


BUILT_IN: dict[str, Callable[[int, int, torch.Generator], Tensor]] = {
    "gaussian": _gaussian,  # normal with standard deviation 2
    "zipf": _zipf,  # P falls like rank^-1.2, in a random order
    "factors": _inner_products,  # of random vectors in 16 dimensions
}


def built_in(name: str, rows: int, num_classes: int, generator: torch.Generator) -> Subject:
    """Random scores of one of the kinds in `BUILT_IN`."""
    return from_scores(name, BUILT_IN[name](rows, num_classes, generator), rows, generator)


def from_scores(name: str, scores: Tensor, rows: int, generator: torch.Generator) -> Subject:
    """The first `rows` rows of given scores (N, C); labels are drawn from their softmax, the proposal is uniform."""
    if scores.ndim != 2 or not scores.numel() or not scores.is_floating_point():
        raise ArgumentError(
            f"scores must be a float table (rows, classes); {name} has shape {tuple(scores.shape)}, {scores.dtype}."
        )
    scores = scores[:rows].double()
    probs = scores.softmax(-1)
    if not probs.isfinite().all():
        raise ArgumentError(
            f"scores must be finite, or -inf to mask a class, and each row needs a finite score; {name} has a row that"
            " breaks this rule."
        )
    target = torch.multinomial(probs, 1, generator=generator).squeeze(-1)
    return Subject(name, scores, target, torch.full_like(probs[0], -math.log(scores.shape[-1])), ASSUMED_DIM)


@torch.no_grad()
def of_run(folder: Path, rows: int, proposal: str, generator: torch.Generator) -> Subject:
    """The scores of a trained model.

    Args:
        folder: of a finished run.
        rows: number of users, drawn from those with a test item; the label of a user is the first test item.
        proposal: one of `RUN_PROPOSALS`.
        generator: for the choice of users.
    """
    served = Served.load(folder)
    split, model = served.split, served.model
    candidates = (split.test.lengths > 0).nonzero().squeeze(-1)
    users = candidates[torch.randperm(len(candidates), generator=generator)[:rows]]
    vectors = model.backbone.vectors()
    # Queries from the training items only: `served.known` would include the label in a history.
    queries = replace(served, known=split.train).queries(users, vectors)
    scores = model.head.scores(queries, linear_weight=vectors.for_head(model.head))
    counts = split.train.items.bincount(minlength=split.num_items).double()
    smoothed = counts + 1  # so that an item without interactions can be drawn too
    log_q = smoothed.log() if proposal == "popularity" else torch.zeros_like(smoothed)
    target = split.test.padded(users)[:, 0]
    assert (target != PADDING).all()
    return Subject(str(folder), scores.double(), target, log_q.log_softmax(-1), served.config.backbone.dim, counts)


def bias_variance(
    subject: Subject, sizes: Sequence[int], draws: int, generator: torch.Generator
) -> Iterator[dict[str, Any]]:
    """Bias and variance, one row for each approximation and number of negatives: means over the rows of scores.

    All rows of scores share the same draws, so their errors are not independent: the mean of the rows' standard errors
    bounds the standard error of the mean, and is what is stated.

    Args:
        subject: the scores.
        sizes: numbers of negatives.
        draws: number of draws to measure from; 0 for none.
        generator: for the draws.
    """
    drawing, named = approximations(drawing=True), variant_names()
    for name, settings in _approximations(subject, sizes):
        found = estimate(name, subject.scores, subject.target, **settings)
        row: dict[str, Any] = {"member": name, **{key: settings.get(key) for key in (*named, "num_negatives")}}
        parts = ("asymptotic", "curvature", "variance", "exact_bias", "exact_variance", "deviation", "offset")
        row |= {part: float(getattr(found, part).mean()) for part in parts}
        row["in_range"] = float(found.in_range.double().mean())
        if draws and name in drawing:
            result = drawn(name, subject.scores, subject.target, **settings, draws=draws, generator=generator)
            row |= {f"drawn_{key}": float(value.mean()) for key, value in vars(result).items()}
        yield row


def variant_title(row: Mapping[str, Any]) -> str:
    """The title of a row of `bias_variance`: the member and the settings that tell its variants apart."""
    return " ".join(str(row[key]) for key in ("member", *variant_names()) if row.get(key) is not None)


def _approximations(subject: Subject, sizes: Sequence[int]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(member, keywords of `estimate`) for every approximation; the baseline has no bias and is left out.

    If some scores are masked (-inf), variants that cannot handle masks are left out too.
    """
    masked = bool((subject.scores.log_softmax(-1) <= MASKED_LOG_PROB).any())
    known = approximations()
    for name in sorted(known, key=lambda name: KINDS_IN_ORDER.index(FAMILY[name].kind)):
        given: dict[str, Any] = {}
        if known[name].needs_tree:
            if too_few_rows(subject):
                continue
            tree = HuffmanTree(subject.log_q.exp() if subject.counts is None else subject.counts)
            given["tree"] = tree_log_probs(subject.scores, tree, subject.dim)
        variants = [variant.settings for variant in known[name].variants if variant.masked or not masked]
        if known[name].draws is not None:
            yield from (
                (name, {"log_q": subject.log_q, "num_negatives": k, **given, **variant})
                for variant in variants
                for k in sizes
            )
        elif name != BASELINE.name:
            yield from ((name, {**given, **variant}) for variant in variants)


def too_few_rows(subject: Subject) -> bool:
    """Whether the rows cannot tell how well the node vectors of a tree fit.

    A tree's table of log-odds, rows by nodes, is fitted by one of rank `dim`: with at most `dim` rows the fit is
    perfect whatever the scores are. Twice as many are the least that say something.
    """
    return len(subject.scores) < min(2 * subject.dim, subject.num_classes - 1)


def deviations(subject: Subject, sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Bias and noise of sampled gradients in parts of the exact gradient's length: a row per estimate and size.

    They are means over the first `GRADIENT_ROWS` rows: exact ones, None where there are too many classes for that, and
    those that the Delta method predicts. Nothing if a class is masked or never drawn.
    """
    if not (subject.scores.isfinite().all() and subject.log_q.isfinite().all()):
        return
    scores, target = subject.scores[:GRADIENT_ROWS], subject.target[:GRADIENT_ROWS]
    for name, estimator in gradient_estimators().items():
        for k in sizes:
            how: dict[str, Any] = {"log_q": subject.log_q, "num_negatives": k}
            predicted = predicted_gradient(estimator, scores, target, **how)
            row = {"estimate": name, "num_negatives": k, "bias": None, "noise": None}
            row |= {"predicted_bias": predicted.bias(), "predicted_noise": predicted.noise()}
            if subject.num_classes <= EXACT_CLASSES:
                exact = exact_gradient(estimator, scores, target, **how)
                row |= {"bias": exact.bias(), "noise": exact.noise()}
            yield row


def notes(subject: Subject) -> list[str]:
    """Sentences on what these scores cannot tell."""
    trees = [name for name, each in approximations().items() if each.needs_tree]
    if not trees or not too_few_rows(subject):
        return []
    return [
        f"{', '.join(trees)}: left out, because {len(subject.scores)} rows cannot tell how well vectors of size"
        f" {subject.dim} fit, and would fit perfectly. Take at least {2 * subject.dim} (--rows)."
    ]


def signals(subject: Subject, sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Gradients of negatives, steepness of the map and cost of ties: one row per member, for sampled ones per size.

    silent: share of the negatives whose gradient is exactly 0; for sampled members the probability of not being drawn.
    norm: spectral norm of the Jacobian of the map, the mean over `NORM_ROWS` rows.
    tie_loss: DCG that is lost if classes are ranked by their probabilities and ties are broken at random; the label is
        the only relevant class.
    """
    relevant = torch.nn.functional.one_hot(subject.target, subject.num_classes).bool()
    negatives = (subject.scores > -torch.inf) & ~relevant
    for member in _mapped():
        map = member_map(member, subject.target, **member.examples[0])
        map_of_norm_rows = member_map(member, subject.target[:NORM_ROWS], **member.examples[0])
        gradients = gradient(member, subject.scores, subject.target, **member.examples[0])
        yield {
            "member": member.name,
            "num_negatives": None,
            "silent": float((without_signal(gradients, subject.target) & negatives).sum() / negatives.sum().clamp(1)),
            "norm": float(spectral_norm(map_of_norm_rows, subject.scores[:NORM_ROWS], iterations=NORM_STEPS).mean()),
            "tie_loss": float(tie_loss(map(subject.scores), relevant).mean()),
        }
    for name in approximations(drawing=True):
        for k in sizes:
            silent = float(undrawn_probability(subject.log_q, k).mean())
            yield {"member": name, "num_negatives": k, "silent": silent, "norm": None, "tie_loss": None}


def _mapped() -> list[Member]:
    """The members with a map from scores to probabilities: those whose loss depends on all scores."""
    return [member for member in FAMILY.values() if member.map is not None]


def heat_maps(subject: Subject, classes: int) -> dict[str, Figure]:
    """Heat maps of the gradients (rows x classes) and Jacobians (classes x classes) of all members with a map.

    Classes are sorted by score, best first, and the best `classes` of them are drawn. Exact zeros are black. The colour
    scale of a panel is logarithmic down to a thousandth of its largest entry, and linear below.
    """
    scores, target = subject.scores, subject.target
    gradients, jacobians = [], []
    for member in _mapped():
        setting = member.examples[0]
        title = " ".join([member.name, *(str(value) for value in setting.values())])
        gradients.append((title, by_score(gradient(member, scores, target, **setting), scores)[:, :classes]))
        map = member_map(member, target[0], **setting)
        jacobians.append((title, top_jacobian(map, scores[0], min(classes, subject.num_classes))))
    return {
        "gradients": _panels(gradients, "classes by score", "rows"),
        "jacobians": _panels(jacobians, "classes by score", "classes by score"),
    }


def _panels(matrices: Sequence[tuple[str, Tensor]], horizontal: str, vertical: str) -> Figure:
    """One figure with a heat map for each (title, matrix), and labels for the two axes."""
    import matplotlib
    from matplotlib.colors import SymLogNorm
    from matplotlib.figure import Figure

    colours = matplotlib.colormaps["RdBu_r"].with_extremes(bad="black")
    columns = 3
    rows = -(-len(matrices) // columns)
    figure = Figure(figsize=(4.4 * columns, 3.6 * rows))
    figure.subplots_adjust(0.05, 0.09, 0.97, 0.89, wspace=0.3, hspace=0.4)  # a layout engine would take seconds
    for number, (title, matrix) in enumerate(matrices, 1):
        axes = figure.add_subplot(rows, columns, number)
        largest = float(matrix.abs().max()) or 1.0
        norm = SymLogNorm(linthresh=largest / 1000, vmin=-largest, vmax=largest)
        shown = torch.where(matrix == 0, torch.nan, matrix).numpy()  # matplotlib draws nan in the colour of `bad`
        image = axes.imshow(shown, cmap=colours, norm=norm, aspect="auto", interpolation="nearest")
        axes.set(title=title, xlabel=horizontal, ylabel=vertical)
        bar = figure.colorbar(image, ax=axes, ticks=[sign * largest / 10**n for sign in (1, -1) for n in range(3)])
        bar.ax.set_yticklabels([f"{tick:.1g}" for tick in bar.get_ticks()])
        bar.minorticks_off()
    figure.suptitle("black: exactly 0")
    return figure


def diagnose(subject: Subject, sizes: Sequence[int], draws: int, generator: torch.Generator) -> dict[str, Any]:
    """The content of `diagnosis.json`: divergences of the proposal, `bias_variance`, `deviations`, `signals`.

    Args: as of `bias_variance`.
    """
    between = {k: divergences(subject.scores, subject.log_q, k) for k in sizes}
    return {
        "scores": subject.name,
        "rows": len(subject.scores),
        "classes": subject.num_classes,
        "draws": draws,
        "divergences": [
            {"num_negatives": k, **{name: float(values.mean()) for name, values in found.items()}}
            for k, found in between.items()
        ],
        "bias_variance": list(bias_variance(subject, sizes, draws, generator)),
        "deviations": list(deviations(subject, sizes)),
        "signals": list(signals(subject, sizes)),
        "notes": notes(subject),
    }


def write(folder: Path, content: dict[str, Any], figures: dict[str, Figure]) -> list[Path]:
    """Write the numbers as `diagnosis.json` and each figure as PNG and SVG, each file atomically.

    Returns:
        The paths of the files.
    """
    import matplotlib

    paths = [folder / "diagnosis.json"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(paths[0], content)
        for name, figure in figures.items():
            with matplotlib.rc_context({"svg.hashsalt": name}):  # fixed ids in the SVG: equal scores give equal files
                for suffix in FIGURE_SUFFIXES:
                    paths.append(folder / f"{name}.{suffix}")
                    with atomic_write(paths[-1]) as partial:
                        metadata = {"Date": None} if suffix == "svg" else None
                        figure.savefig(partial, format=suffix, dpi=120, metadata=metadata)
    except OSError as error:
        raise ManymaxError(f"`--out` {folder} cannot be written to: {error.strerror}. Choose another folder.") from None
    return paths

"""`manymax diagnose`: bias, variance and gradients of every loss on given scores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from manymax.cli import console as display
from manymax.cli.tensors import read_tensor
from manymax.errors import ArgumentError, check_choice, unknown_name
from manymax.members import BASELINE
from manymax.study import diagnosis
from manymax.study.diagnosis import BUILT_IN, RUN_PROPOSALS, Subject
from manymax.study.seeds import generator

BIAS_VARIANCE_HEADERS = (
    "member",
    "k",
    "asymptotic",
    "curvature",
    "exact bias",
    "drawn",
    "variance",
    "exact",
    "drawn",
    "deviation",
    "in range",
)
DEVIATION_HEADERS = ("gradient of", "k", "bias", "Delta", "noise", "Delta")
GRADIENT_HEADERS = ("member", "k", "negatives without signal", "Jacobian norm", "DCG lost by ties")
BIAS_VARIANCE_NOTE = (
    f"All numbers are means over the rows. bias: the loss minus the {BASELINE.name} loss, less what does not depend on"
    " the scores. The Delta method predicts the bias as asymptotic + curvature, and the variance; `in range` is the"
    " share of rows where it can be trusted. drawn: measured by Monte Carlo, ± one standard error. deviation: bias^2 +"
    " variance."
)
DEVIATION_NOTE = (
    f"How far sampled gradients are from that of {BASELINE.name}, in parts of its length. bias: of their mean. noise:"
    f" of one of them from their mean. Delta: as predicted. Means over {diagnosis.GRADIENT_ROWS} rows at most."
)
GRADIENT_NOTE = (
    "negatives without signal: the share of negatives whose gradient is exactly 0, or that are not drawn. DCG lost by"
    " ties: what a ranking by the probabilities loses because several classes share one value, such as 0."
)


def diagnose(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SCORES",
            help=f"Scores, shape (rows, classes), in a .npy, .pt or .safetensors file; or the folder of a trained run;"
            f" or a built-in example: {', '.join(BUILT_IN)}.",
        ),
    ] = "gaussian",
    num_negatives: Annotated[
        list[int] | None,
        typer.Option(
            help="k, negatives per row; may be given several times. [default: 5, 20, 100]", show_default=False
        ),
    ] = None,
    proposal: Annotated[
        str,
        typer.Option(
            help="What negatives are drawn from: uniform; popularity (of a run); or a file with log q (classes,)."
        ),
    ] = "uniform",
    rows: Annotated[int, typer.Option(min=1, help="How many rows of scores to look at.")] = 64,
    classes: Annotated[int, typer.Option(min=2, help="The number of classes of built-in scores.")] = 1000,
    dim: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Size of the vectors behind the scores, which a tree's error depends on. [default: 16, or the run's]",
            show_default=False,
        ),
    ] = None,
    draws: Annotated[
        int, typer.Option(min=0, help="Monte Carlo draws for the columns `drawn`; 0 leaves them out.")
    ] = 2000,
    shown: Annotated[int, typer.Option(min=2, help="Classes in a heat map, from the highest score downward.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of built-in scores, labels and draws.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for heat maps (PNG, SVG) and the numbers (JSON); none if left out.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Measure bias, variance and gradients of the losses on scores.

    Use it to find out how many negatives, or which proposal, your model needs: scores of your own model tell more than
    any rule. The first table says how far each approximate loss is from softmax, the second how far sampled gradients
    are, the third how many negatives get no gradient. With --out, heat maps of gradients and Jacobians are drawn.

    \b
    Examples:
      manymax diagnose                                   built-in scores
      manymax diagnose zipf --num-negatives 10 --out diagnosis
      manymax diagnose scores.npy --proposal log_q.npy --json
      manymax diagnose runs/first --proposal popularity --out diagnosis
    """
    sizes = num_negatives or [5, 20, 100]
    if min(sizes) < 1 or draws == 1:
        raise ArgumentError("`--num-negatives` must be at least 1, and `--draws` 0 or at least 2.")
    subject = read_subject(source, proposal, rows, classes, seed)
    if dim is not None:
        subject = replace(subject, dim=dim)
    content = diagnosis.diagnose(subject, sizes, draws, generator(seed, "draws"))
    paths = [] if out is None else diagnosis.write(out, content, diagnosis.heat_maps(subject, shown))
    if json:
        display.put_json(content | {"files": [str(path) for path in paths]})
        return
    console = display.open_console()
    display.put(console, f"{content['scores']}: {content['rows']} rows, {content['classes']} classes")
    display.put(console, f"{_divergences(content)}\n")
    display.put(
        console, display.table(BIAS_VARIANCE_HEADERS, (_bias_variance_cells(row) for row in content["bias_variance"]))
    )
    display.put(console, "\n".join([BIAS_VARIANCE_NOTE, *content["notes"], ""]))
    if content["deviations"]:
        display.put(console, display.table(DEVIATION_HEADERS, (_deviation_cells(row) for row in content["deviations"])))
        display.put(console, f"{DEVIATION_NOTE}\n")
    display.put(console, display.table(GRADIENT_HEADERS, (_gradient_cells(row) for row in content["signals"])))
    display.put(console, GRADIENT_NOTE)
    for path in paths:
        display.put(console, f"wrote {path}")


def read_subject(source: str, proposal: str, rows: int, classes: int, seed: int) -> Subject:
    """The scores that the caller asked for, with a label per row and a proposal."""
    path, seeded = Path(source), generator(seed, "diagnose")
    if not Path(proposal).suffix:  # a name, not a file
        check_choice("--proposal", proposal, RUN_PROPOSALS)
    if proposal == "popularity" and not path.is_dir():
        raise ArgumentError(
            "`--proposal popularity` needs the folder of a run as SCORES: only a run knows how often each item occurs."
        )
    if source in BUILT_IN:
        subject = diagnosis.built_in(source, rows, classes, seeded)
    elif path.is_dir():
        subject = diagnosis.of_run(path, rows, proposal, seeded)
    elif path.suffix or path.exists():
        subject = diagnosis.from_scores(source, read_tensor("SCORES", path), rows, seeded)
    else:
        raise unknown_name("scores", source, BUILT_IN)
    return replace(subject, log_q=read_tensor("--proposal", Path(proposal))) if Path(proposal).suffix else subject


def _divergences(content: dict[str, Any]) -> str:
    """How far the proposal q is from the model's distribution P, in one line."""
    found = content["divergences"]
    jensen_shannon = ", ".join(f"{row['jensen_shannon']:.2g} (k = {row['num_negatives']})" for row in found)
    return f"chi2(P || q) {found[0]['chi_square']:.4g}, KL {found[0]['kl']:.4g}, JS {jensen_shannon}"


def _bias_variance_cells(row: dict[str, Any]) -> list[str]:
    def number(name: str) -> str:
        return f"{row[name]:.3g}"

    def sampled(name: str) -> str:
        return f"{row[f'drawn_{name}']:.3g} ± {row[f'drawn_{name}_error']:.1g}" if f"drawn_{name}" in row else "-"

    bias = [number("asymptotic"), number("curvature"), number("exact_bias"), sampled("bias")]
    variance = [number("variance"), number("exact_variance"), sampled("variance")]
    return [
        diagnosis.variant_title(row),
        _negatives(row),
        *bias,
        *variance,
        number("deviation"),
        f"{row['in_range']:.0%}",
    ]


def _deviation_cells(row: dict[str, Any]) -> list[str]:
    names = ("bias", "predicted_bias", "noise", "predicted_noise")
    return [row["estimate"], _negatives(row), *("-" if row[name] is None else f"{row[name]:.2g}" for name in names)]


def _gradient_cells(row: dict[str, Any]) -> list[str]:
    norm, tie_loss = ("-" if row[name] is None else f"{row[name]:.3g}" for name in ("norm", "tie_loss"))
    return [diagnosis.variant_title(row), _negatives(row), f"{row['silent']:.1%}", norm, tie_loss]


def _negatives(row: dict[str, Any]) -> str:
    return "-" if row["num_negatives"] is None else str(row["num_negatives"])

"""`manymax diagnose`: what the theory says of given scores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from manymax.cli import console as look
from manymax.cli.tensors import read_tensor
from manymax.errors import ArgumentError, check_choice, unknown_name
from manymax.members import BASELINE
from manymax.study import diagnosis
from manymax.study.diagnosis import BUILT_IN, PROPOSALS, Subject
from manymax.study.seeds import generator

MOMENTS = (
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
SIGNALS = ("member", "k", "negatives without signal", "Jacobian norm", "DCG lost by ties")
NOTE = (
    f"Means over the rows. Bias: loss minus {BASELINE.name} loss, less what is free of the scores. The Delta method"
    " predicts asymptotic + curvature and variance, `in range` where it can be trusted; drawn: Monte Carlo ± a standard"
    " error."
)


def diagnose(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SCORES",
            help=f"Scores (rows, classes) in a .npy, .pt or .safetensors file, the folder of a trained run, or one of"
            f" {', '.join(BUILT_IN)}.",
        ),
    ] = "gaussian",
    num_negatives: Annotated[
        list[int] | None, typer.Option(help="k; may be given several times. [default: 5, 20, 100]", show_default=False)
    ] = None,
    proposal: Annotated[
        str, typer.Option(help="uniform; popularity, of a run; or a file with log q (classes,).")
    ] = "uniform",
    rows: Annotated[int, typer.Option(min=1, help="Rows of scores to look at.")] = 64,
    classes: Annotated[int, typer.Option(min=2, help="Classes of built-in scores.")] = 1000,
    dim: Annotated[
        int | None,
        typer.Option(
            min=1, help="Vector size of approximations by a tree. [default: 16, or the run's]", show_default=False
        ),
    ] = None,
    draws: Annotated[int, typer.Option(min=0, help="Draws of the Monte Carlo columns; 0 for none.")] = 2000,
    shown: Annotated[int, typer.Option(min=2, help="Classes in a heat map, from the highest score down.")] = 64,
    seed: Annotated[int, typer.Option(help="Of built-in scores, labels and draws.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for heat maps (PNG, SVG) and the numbers (JSON).")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Bias and variance of every approximation on given scores, and heat maps of gradients and Jacobians.

    \b
    Examples:
      manymax diagnose                                   built-in scores
      manymax diagnose zipf --num-negatives 10 --out looks
      manymax diagnose scores.npy --proposal log_q.npy --json
      manymax diagnose runs/first --proposal popularity --out looks
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
        look.put_json(content | {"files": [str(path) for path in paths]})
        return
    console = look.open_console()
    look.put(console, f"{content['scores']}: {content['rows']} rows, {content['classes']} classes")
    look.put(console, f"{_divergences(content)}\n")
    look.put(console, look.table(MOMENTS, (_moments(row) for row in content["bias_variance"])))
    look.put(console, f"{NOTE}\n")
    look.put(console, look.table(SIGNALS, (_signals(row) for row in content["signals"])))
    for path in paths:
        look.put(console, f"wrote {path}")


def read_subject(source: str, proposal: str, rows: int, classes: int, seed: int) -> Subject:
    """The scores that are asked for, with labels and a proposal."""
    path, drawing = Path(source), generator(seed, "diagnose")
    if not Path(proposal).suffix:
        check_choice("--proposal", proposal, PROPOSALS)
    if proposal == "popularity" and not path.is_dir():
        raise ArgumentError("`--proposal popularity` needs the folder of a run, which knows how often items occur.")
    if source in BUILT_IN:
        subject = diagnosis.built_in(source, rows, classes, drawing)
    elif path.is_dir():
        subject = diagnosis.of_run(path, rows, proposal, drawing)
    elif path.suffix or path.exists():
        subject = diagnosis.from_scores(source, read_tensor("SCORES", path), rows, drawing)
    else:
        raise unknown_name("scores", source, BUILT_IN)
    return replace(subject, log_q=read_tensor("--proposal", Path(proposal))) if Path(proposal).suffix else subject


def _divergences(content: dict[str, Any]) -> str:
    found = content["divergences"]
    jensen_shannon = ", ".join(f"{row['jensen_shannon']:.2g} (k = {row['num_negatives']})" for row in found)
    return f"chi2(P || q) {found[0]['chi_square']:.4g}, KL {found[0]['kl']:.4g}, JS {jensen_shannon}"


def _moments(row: dict[str, Any]) -> list[str]:
    def number(name: str) -> str:
        return f"{row[name]:.3g}"

    def sampled(name: str) -> str:
        return f"{row[f'drawn_{name}']:.3g} ± {row[f'drawn_{name}_error']:.1g}" if f"drawn_{name}" in row else "-"

    bias = [number("asymptotic"), number("curvature"), number("exact_bias"), sampled("bias")]
    variance = [number("variance"), number("exact_variance"), sampled("variance")]
    return [diagnosis.variant_title(row), _size(row), *bias, *variance, number("deviation"), f"{row['in_range']:.0%}"]


def _signals(row: dict[str, Any]) -> list[str]:
    rest = ["-" if row[name] is None else f"{row[name]:.3g}" for name in ("norm", "tie_loss")]
    return [diagnosis.variant_title(row), _size(row), f"{row['silent']:.1%}", *rest]


def _size(row: dict[str, Any]) -> str:
    return "-" if row["num_negatives"] is None else str(row["num_negatives"])

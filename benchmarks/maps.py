"""Maps and losses on plain scores: manymax against the entmax package, forward and backward.

    python benchmarks/maps.py              2048 x 40,981 float32, trained and fresh scores
    python benchmarks/maps.py --quick      256 x 10,000

Scores are (N, C) tables; "trained" ones are like those of a trained model, "fresh" ones small and random. The package
runs with its defaults and at the best of several values of its setting `k`. Bars: sparsemax and entmax-1.5 are at least
4 times faster than the package's default and not slower than its best `k`; a general alpha is at least 4 times faster
than the package's bisection.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import entmax as package
import torch
from measure import environment, interleave, limits, median, parser, peak_mb, scores_like, write
from torch import Tensor

import manymax

PACKAGE_KS = (10, 32, 100, 512, 2048)  # values of the package's `k` to try, besides None
GENERAL_ALPHA = 1.3


def step(function: Callable[[Tensor], Tensor], scores: Tensor) -> Callable[[], object]:
    """A function that runs a loss or a map of the scores forward and backward."""

    def run() -> object:
        leaf = scores.detach().requires_grad_()
        value = function(leaf)
        value.backward(torch.ones_like(value) if value.ndim == 0 else upstream.expand(value.shape))
        return leaf.grad

    upstream = torch.linspace(-1, 1, scores.shape[1])
    return run


def contestants(scores: Tensor, target: Tensor) -> dict[str, dict[str, Callable[[], object]]]:
    """{group: {name: run}}; the names are "manymax", "default" for the package, and "k=..." for its other settings."""

    def package_losses(function: Callable[..., Tensor], default: int | None) -> dict[str, Callable[[], object]]:
        runs = {"default": step(lambda s: function(s, target, k=default).mean(), scores)}
        others = [k for k in (None, *PACKAGE_KS) if k != default and (k is None or k < scores.shape[1])]
        return runs | {f"k={k}": step(lambda s, k=k: function(s, target, k=k).mean(), scores) for k in others}

    def package_maps(function: Callable[..., Tensor]) -> dict[str, Callable[[], object]]:
        runs = {"default": step(lambda s: function(s, -1), scores)}
        return runs | {f"k={k}": step(lambda s, k=k: function(s, -1, k=k), scores) for k in PACKAGE_KS}

    general = {"manymax": step(lambda s: manymax.entmax_loss(s, target, alpha=GENERAL_ALPHA), scores)}
    bisect = step(lambda s: package.entmax_bisect_loss(s, target, alpha=GENERAL_ALPHA).mean(), scores)
    return {
        "sparsemax loss": {"manymax": step(lambda s: manymax.sparsemax_loss(s, target), scores)}
        | package_losses(package.sparsemax_loss, None),
        "entmax-1.5 loss": {"manymax": step(lambda s: manymax.entmax_loss(s, target, alpha=1.5), scores)}
        | package_losses(package.entmax15_loss, 100),
        "sparsemax map": {"manymax": step(manymax.sparsemax, scores)} | package_maps(package.sparsemax),
        "entmax-1.5 map": {"manymax": step(lambda s: manymax.entmax(s, 1.5), scores)} | package_maps(package.entmax15),
        f"entmax-{GENERAL_ALPHA} loss": general | {"default": bisect},
        "softmax loss": {
            "manymax": step(lambda s: manymax.softmax_loss(s, target), scores),
            "default": step(lambda s: torch.nn.functional.cross_entropy(s, target), scores),
        },
    }


def report(regime: str, group: str, times: dict[str, list[float]], peaks: dict[str, float | None]) -> dict[str, Any]:
    """Print one line, how many times our time the package takes by default and at its best k; return the figures."""
    ours, default = median(times["manymax"]), median(times["default"])
    best = min((name for name in times if name != "manymax"), key=lambda name: median(times[name]))
    row = {
        "regime": regime,
        "group": group,
        "ratio_to_default": ours / default,
        "best_setting": best,
        "ratio_to_best": ours / median(times[best]),
        "times": times,
        "peak_mb": peaks,
        "rounds": len(times["manymax"]),
    }
    memory = "" if None in peaks.values() else f"   peak {peaks['manymax']:6.0f} MB, default {peaks['default']:6.0f} MB"
    print(
        f"{regime:8s} {group:16s} default / ours {default / ours:6.1f}   best ({best}) / ours"
        f" {median(times[best]) / ours:5.1f}{memory}",
        flush=True,
    )
    return row


def earlier(path: str, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results of an existing file that were not measured anew; `--only` keeps those of the other groups."""
    if not Path(path).exists():
        return []
    again = {(row["regime"], row["group"]) for row in results}
    return [row for row in json.loads(Path(path).read_text())["results"] if (row["regime"], row["group"]) not in again]


def main(arguments: argparse.Namespace) -> int:
    """Run every group in both regimes; the exit code is 1 if a bar was missed."""
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    rows, classes = (256, 10_000) if arguments.quick else (arguments.rows, 40_981)
    results = []
    for regime in ("trained", "fresh"):
        queries, vectors, target = scores_like(regime, rows, classes)
        scores = queries @ vectors.T
        support = (
            (manymax.sparsemax(scores) > 0).sum(1).float().mean(),
            (manymax.entmax(scores) > 0).sum(1).float().mean(),
        )
        print(f"{regime}: {rows} x {classes}, support {support[0]:.0f} (sparsemax), {support[1]:.0f} (entmax-1.5)")
        for group, runs in contestants(scores, target).items():
            if arguments.only and arguments.only not in f"{regime} {group}":
                continue
            times = interleave(runs, arguments.rounds)
            peaks = {name: peak_mb(runs[name]) for name in ("manymax", "default")}
            results.append(report(regime, group, times, peaks))
    failed = [
        r for r in results if r["group"] != "softmax loss" and (r["ratio_to_default"] > 0.25 or r["ratio_to_best"] > 1)
    ]
    for row in failed:
        print(f"bar missed: {row['regime']} {row['group']}")
    if arguments.json:
        kept = earlier(arguments.json, results) if arguments.only else []
        figures = {"environment": environment(arguments), "limits": limits(), "results": kept + results}
        write(arguments.json, figures)
    return bool(failed)


if __name__ == "__main__":
    made = parser(__doc__ or "")
    made.add_argument("--rows", type=int, default=2048)
    made.add_argument(
        "--only",
        default="",
        help="only regimes and groups with this in their name, like 'fresh entmax-1.5 map'",
    )
    sys.exit(main(made.parse_args()))

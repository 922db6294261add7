"""The groups of heads.py that measure curves: time and support along a training, and time against classes."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from head_losses import COMPILED, OURS
from head_problems import DIM, Figures, Loss, Problem, race, seconds
from measure import median
from torch import Tensor

import manymax

PAPER = {  # the cost of an epoch in Table 4 of the paper
    "softmax": "N C",
    "sparsemax": "N C log C",
    "entmax-1.5": "N C log C + N |P|",
    "entmax-1.3": "N C log C + N |P|",
    "rankmax": "N C",
    "sampled_softmax": "N k",
    "nce": "N k",
    "hierarchical_softmax": "N log C",
}


def supports(name: str, scores: Tensor, target: Tensor) -> Tensor:
    """How many classes of each row of scores (N, C) have a part in the gradient, (N,)."""
    name = name.removesuffix(", compiled")
    if name == "rankmax":
        return (scores > scores.gather(1, target) - 1).sum(1)
    alpha = {"sparsemax": 2.0, "entmax-1.5": 1.5, "entmax-1.3": 1.3}.get(name)
    return torch.full((len(scores),), scores.shape[1]) if alpha is None else (manymax.entmax(scores, alpha) > 0).sum(1)


def trajectory(a: argparse.Namespace, figures: Figures) -> None:
    """A real optimisation: seconds of a step and support against steps, next to the softmax head."""
    users, classes, steps = a.path
    losses = OURS | COMPILED
    generator = torch.Generator().manual_seed(0)
    # Labels are drawn from a softmax of low rank, which the models of all losses learn from the same start.
    truth = torch.randn(users, 8, generator=generator), torch.randn(classes, 8, generator=generator)
    target = torch.multinomial((truth[0] @ truth[1].T).softmax(1), 20, replacement=True, generator=generator)
    start = [0.1 * torch.randn(size, DIM, generator=generator) for size in (users, classes)]
    models = {name: [part.clone().requires_grad_() for part in start] for name in losses}
    adams = {name: torch.optim.Adam(model, lr=5e-3) for name, model in models.items()}
    times: dict[str, list[float]] = {name: [] for name in losses}
    rows: list[dict[str, Any]] = []
    window = max(1, steps // 16)

    def step(name: str, batch: Tensor, label: Tensor) -> None:
        adams[name].zero_grad()
        losses[name](models[name][0][batch], models[name][1], label).backward()
        adams[name].step()

    for number in range(1, steps + 1):
        batch = torch.randint(users, (512,), generator=generator)
        label = target[batch, torch.randint(20, (512,), generator=generator)]
        for name in losses:
            times[name].append(seconds(partial(step, name, batch, label)))
        if number % window == 0:
            row: dict[str, Any] = {"step": number}
            for name, (x, w) in models.items():
                with torch.no_grad():
                    support = supports(name, x[:256] @ w.T, target[:256, :1]).float().median()
                row[name] = {"seconds": median(times[name][-window:]), "support": float(support)}
            rows.append(row)
            cells = [f"{n} {time_ratio(row, n):.2f} ({row[n]['support']:.0f})" for n in losses if n != "softmax"]
            print(f"to step {number:4d}: time / softmax (support)  {'  '.join(cells)}", flush=True)
    crossing = {name: cheaper_from(rows, name) for name in losses if name != "softmax"}
    figures.current |= {"classes": classes, "rows": rows, "cheaper_from": crossing}
    for name, begun in crossing.items():
        print(f"{name}: " + ("not cheaper than softmax" if begun is None else f"cheaper from step {begun} on"))


def time_ratio(row: dict[str, Any], name: str) -> float:
    """Seconds of a step over those of softmax, in one row of the trajectory."""
    return float(row[name]["seconds"] / row["softmax"]["seconds"])


def cheaper_from(rows: list[dict[str, Any]], name: str) -> int | None:
    """The step from which on a head is cheaper than softmax until the end; None if it is not cheaper at the end."""
    found = None
    for row in reversed(rows):
        if time_ratio(row, name) >= 1:
            break
        found = row["step"]
    return found


def growth(a: argparse.Namespace, figures: Figures) -> None:
    """Seconds of a step against C, the slope of the log-log line from 10^4 classes on, and what the paper states."""
    counts = [c for c in (1_000, 10_000, 100_000, 1_000_000) if c <= a.million]
    found: dict[str, list[float]] = {}
    for classes in counts:
        problem = Problem("trained", 128, classes)
        sampler = manymax.samplers.UniformSampler(classes)
        tree = manymax.HierarchicalSoftmaxLoss(DIM, manymax.HuffmanTree(torch.ones(classes)), sparse_grad=True)
        moments = manymax.class_moments(problem.vectors.detach())
        losses: dict[str, Loss] = (
            OURS
            | COMPILED
            | {
                "sampled_softmax": lambda x, w, y, s=sampler: manymax.linear_sampled_softmax_loss(
                    x, w, y, s, sparse_grad=True
                ),
                "nce": lambda x, w, y, s=sampler: manymax.linear_nce_loss(x, w, y, s, sparse_grad=True),
                "hierarchical_softmax": lambda x, w, y, h=tree: h(x, y),
                "rg, moments given": lambda x, w, y, m=moments: manymax.rg_log_partition_from_moments(x, m).mean(),
            }
        )
        for name, times in race({n: problem.step(loss) for n, loss in losses.items()}, a.rounds).items():
            found.setdefault(name, []).append(median(times))
    figures.current |= {"classes": counts, "seconds": found, "paper": PAPER}
    for name, values in found.items():
        relative = "  ".join(f"{s / values[0]:9.2f}" for s in values)
        shown = f"slope {slope(counts, values):5.2f}   paper {PAPER.get(name.removesuffix(', compiled'), '-')}"
        print(f"{name:22s} time / time at C={counts[0]:,}: {relative}   {shown}")
    if a.json:
        print(f"plotted in {plot(Path(a.json).with_suffix('.svg'), counts, found)}")


def slope(counts: list[int], values: list[float]) -> float:
    """Slope of the least-squares line through (log C, log seconds); the first point, mostly overhead, is left out."""
    x = torch.tensor(counts[1:] if len(counts) > 2 else counts, dtype=torch.float64).log()
    y = torch.tensor(values[-len(x) :], dtype=torch.float64).log()
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


def plot(path: Path, counts: list[int], found: dict[str, list[float]]) -> Path:
    """Draw seconds against C with logarithmic axes, one line per head, and return the path of the file."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "manymax"  # the same figures give the same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for name, values in found.items():
        axes.loglog(counts, values, marker="o", label=f"{name} ({slope(counts, values):.2f})")
    axes.set(xlabel="classes C", ylabel="seconds of a step, N = 128, d = 64", title="Growth (slope)")
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    new = path.with_suffix(".tmp")
    figure.savefig(new, format="svg", bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)
    return new.replace(path)

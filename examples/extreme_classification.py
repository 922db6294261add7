"""Extreme classification: 100,000 planted labels, six losses, the same time for each.

    python examples/extreme_classification.py [--plot FILE.svg]

A document is a noisy mixture of the vectors of its labels. A few labels are frequent and most are rare. Every loss has
the same seconds; how many steps it gets done in them is its own affair.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import manymax

LABELS, WIDTH, DIM, POSITIVES, BATCH = 100_000, 64, 48, 3, 256
LOSSES = ("softmax", "sparsemax", "entmax", "rankmax", "sampled_softmax", "hierarchical_softmax")


class World:
    """Documents with three labels each."""

    def __init__(self, documents: int) -> None:
        random = torch.Generator().manual_seed(0)
        vectors = torch.randn(LABELS, WIDTH, generator=random)
        frequency = 1 / (10.0 + torch.arange(LABELS))
        drawn = torch.multinomial(frequency, documents * POSITIVES, replacement=True, generator=random)
        self.labels = drawn.reshape(documents, POSITIVES)
        self.documents = vectors[self.labels].sum(1) + 0.5 * torch.randn(documents, WIDTH, generator=random)
        self.counts = self.labels.reshape(-1).bincount(minlength=LABELS)


def make_head(loss: str, world: World) -> nn.Module:
    """The head of a loss; sampled and sparse ones with row-sparse gradients."""
    if loss == "sampled_softmax":
        return manymax.LinearSampledSoftmaxLoss(DIM, LABELS, num_negatives=200, sparse_grad=True)
    if loss == "hierarchical_softmax":
        tree = manymax.HuffmanTree(world.counts + 1)
        return manymax.LinearHierarchicalSoftmaxLoss(DIM, LABELS, tree=tree)
    return manymax.heads.head_class(manymax.FAMILY[loss])(DIM, LABELS)


def train(loss: str, world: World, seconds: float) -> tuple[nn.Module, nn.Module, int]:
    """The model and the head after some seconds, and the number of steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, DIM))
    head, steps = make_head(loss, world), 0
    optimizers: list[torch.optim.Optimizer] = [torch.optim.Adam(model.parameters(), lr=2e-3)]
    sparse = getattr(head, "sparse_parameters", list)()
    dense = [each for each in head.parameters() if all(each is not other for other in sparse)]
    optimizers += [torch.optim.Adam(dense, lr=1e-2, fused=True)] if dense else []
    optimizers += [manymax.optim.SparseAdam(sparse, lr=1e-2)] if sparse else []
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        rows = torch.randint(len(world.documents), (BATCH,))
        for optimizer in optimizers:
            optimizer.zero_grad()
        head(model(world.documents[rows]), world.labels[rows]).backward()
        for optimizer in optimizers:
            optimizer.step()
        steps += 1
    return model, head, steps


@torch.no_grad()
def precision(model: nn.Module, head: nn.Module, documents: Tensor, labels: Tensor) -> tuple[float, float]:
    """P@1 and P@5."""
    _, ranking = head.topk(model(documents), 5)
    one, five = (float(manymax.metrics.precision_at_k(ranking, labels, k)) for k in (1, 5))
    return one, five


def plot(found: dict[str, tuple[float, float]], file: Path) -> None:
    """P@1 and P@5 of each loss as bars."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    for shift, (k, color) in enumerate(((1, "#1f4e9c"), (5, "#9cc0e7"))):
        axes.bar(
            [i + 0.4 * shift for i in range(len(found))],
            [each[shift] for each in found.values()],
            0.4,
            color=color,
            label=f"P@{k}",
        )
    axes.set_xticks([i + 0.2 for i in range(len(found))], list(found), rotation=20)
    axes.legend()
    figure.savefig(file)


def main() -> None:
    """Train every loss for the same time and print its precision."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=12.0, help="of training for each loss")
    parser.add_argument("--plot", type=Path, help="write a figure to this file")
    a = parser.parse_args()
    world = World(42_000)
    held_out, labels = world.documents[-2_000:], world.labels[-2_000:]
    world.documents, world.labels = world.documents[:-2_000], world.labels[:-2_000]
    print(f"{LABELS:,} labels, {len(world.documents):,} documents, {a.seconds:g} seconds of training for each loss\n")
    print(f"{'loss':22} {'steps':>6} {'P@1':>7} {'P@5':>7}")
    found = {}
    for loss in LOSSES:
        model, head, steps = train(loss, world, a.seconds)
        found[loss] = precision(model, head, held_out, labels)
        print(f"{loss:22} {steps:6} {found[loss][0]:7.1%} {found[loss][1]:7.1%}")
    if a.plot is not None:
        plot(found, a.plot)


if __name__ == "__main__":
    main()

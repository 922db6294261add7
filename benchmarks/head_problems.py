"""What a step of heads.py runs on: queries, class vectors and labels of three regimes, and the model of one of them.

    fresh    small random scores, like those of a new model: a sparse map keeps nearly all classes
    peaked   scores made to be like those of a confident model: a sparse map keeps one or two classes
    real     users and items of a trained matrix factorisation: the largest score is about .5, nearly all classes lie
             within 1 of it, sparsemax keeps about ten of 41,000 classes and entmax-1.5 about two thousand

The model of `real` is trained with entmax-1.5 on planted interactions when it is first needed, in some minutes, and
kept as the folder of a run in the user's cache. The folder of any other run can take its place.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from measure import scores_like
from torch import Tensor

import manymax
from manymax.study.config import RunConfig
from manymax.study.data.load import cache
from manymax.study.run import run
from manymax.study.serve import Served

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # queries (N, d), class vectors (C, d) and labels (N,) to a scalar
REGIMES = ("fresh", "peaked", "real")
DIM = 64
# One evaluation, after the last epoch. Of the planted items, about 8 % are drawn by nobody and are not in the model.
MODEL = {"size": "30000x45000x34", "epochs": 9}
QUICK_MODEL = {"size": "300x600x20", "epochs": 3}
NOISE = 0.05  # of the vectors of repeated items, as a share of their length


def default_folder(quick: bool) -> Path:
    """The folder in the user's cache that keeps the model of the real regime."""
    settings = QUICK_MODEL if quick else MODEL
    return cache() / "benchmarks" / f"planted-{settings['size']}-{settings['epochs']}"


def train_model(folder: Path, quick: bool) -> None:
    """Train the model of the real regime, unless the folder holds it already; an interrupted training is resumed."""
    settings = QUICK_MODEL if quick else MODEL
    if not (folder / "record.json").exists():
        print(f"training the model of the real regime, once: planted data {settings['size']}, kept in {folder}")
        more = {"eval_every": settings["epochs"], "batches": "users", "loss": "entmax", "seed": 0}
        run(RunConfig(**settings, **more), folder)


@lru_cache
def trained_vectors(folder: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """User vectors (U, d), item vectors (C, d), and the users and items of all training pairs."""
    served = Served.load(folder)
    return *served.vectors(), served.split.train.users(), served.split.train.items


class Problem:
    """Queries, class vectors and labels.

    Args:
        regime: one of `REGIMES`.
        rows, classes: N and C. Where the model of the real regime has more than C items, C of them are chosen at
            random, and the labels are of pairs whose item is chosen. Where it has fewer, items are repeated with noise
            of 5 % of their length.
        folder: of the run whose model the real regime takes.
    """

    def __init__(self, regime: str, rows: int, classes: int, folder: Path) -> None:
        self.regime, self.rows, self.classes, self.folder = regime, rows, classes, folder
        self.name = f"{regime} C={classes:,}"
        self.source = "random vectors"
        made = self._real(folder) if regime == "real" else scores_like(regime, rows, classes, DIM)
        self.queries, self.vectors, self.target = made[0].requires_grad_(), made[1].requires_grad_(), made[2]

    def _real(self, folder: Path) -> tuple[Tensor, Tensor, Tensor]:
        users, items, pair_users, pair_items = trained_vectors(folder)
        rng = torch.Generator().manual_seed(0)
        copies = -(-self.classes // len(items))
        self.source = f"{'a choice' if copies == 1 else 'noisy copies'} of {len(items):,} items"
        chosen = torch.randperm(copies * len(items), generator=rng)[: self.classes]  # copy and item in one number
        vectors = items[chosen % len(items)].clone()
        noise = torch.randn(vectors.shape, generator=rng) * (NOISE / vectors.shape[1] ** 0.5)
        vectors += noise * vectors.norm(dim=1, keepdim=True) * (chosen >= len(items)).unsqueeze(1)
        place = torch.full((len(items),), -1)  # of each item among the classes: that of its last copy
        place[chosen % len(items)] = torch.arange(self.classes)
        pairs = (place[pair_items] >= 0).nonzero()[:, 0]
        drawn = pairs[torch.randint(len(pairs), (self.rows,), generator=rng)]
        return users[pair_users[drawn]].clone(), vectors, place[pair_items[drawn]]

    def step(self, loss: Loss) -> Callable[[], object]:
        """A function that computes the loss and both gradients."""

        def run_step() -> object:
            self.queries.grad = self.vectors.grad = None
            return loss(self.queries, self.vectors, self.target).backward()

        return run_step

    def few_rows(self) -> Problem:
        """The same with a sixteenth of the rows, to try settings of a slow peer on."""
        return Problem(self.regime, max(16, self.rows // 16), self.classes, self.folder)

    @torch.no_grad()
    def facts(self) -> dict[str, Any]:
        """What the speed of sparse losses depends on, medians of 64 rows.

        Returns:
            What the vectors are made of, the largest score, the share of scores within 1 of it, and how many classes
            have a part in each gradient.
        """
        scores, target = self.queries[:64] @ self.vectors.T, self.target[:64]
        largest = scores.amax(1, keepdim=True)
        kept = {
            "sparsemax": manymax.sparsemax(scores) > 0,
            "entmax-1.5": manymax.entmax(scores, 1.5) > 0,
            "entmax-1.3": manymax.entmax(scores, 1.3) > 0,
            "rankmax": scores > scores.gather(1, target.unsqueeze(1)) - 1,
        }
        return {
            "source": self.source,
            "largest_score": float(largest.median()),
            "within_1_of_it": float((scores > largest - 1).float().mean()),
            "support": {name: statistics.median(mask.sum(1).tolist()) for name, mask in kept.items()},
        }

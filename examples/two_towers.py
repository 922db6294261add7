"""Two towers: in-batch negatives, hard negatives, and the correction for frequent documents.

    python examples/two_towers.py

Queries and documents are made up: a query is a noisy view of its document, some documents are asked for far more often
than others, and documents come in families of look-alikes, which are the hard negatives.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

import manymax

DOCUMENTS, WIDTH, DIM, BATCH, STEPS = 4_000, 64, 32, 256, 150


def tower(width: int) -> nn.Module:
    """From what is known about a query or a document to its vector."""
    return nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, DIM))


class World:
    """Documents in families of four, and how often each is asked for."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        families = torch.randn(DOCUMENTS // 4, WIDTH, generator=random).repeat_interleave(4, 0)
        self.documents = families + 0.7 * torch.randn(DOCUMENTS, WIDTH, generator=random)
        self.q = 1 / torch.arange(1.0, DOCUMENTS + 1)[torch.randperm(DOCUMENTS, generator=random)]
        self.q /= self.q.sum()
        # What the tower of documents sees of each: itself, and how popular it is.
        self.seen = torch.cat([self.documents, 3 + self.q.log().unsqueeze(1) / 3], 1)

    def queries(self, documents: Tensor, random: torch.Generator) -> Tensor:
        """A query for each of these documents."""
        return self.documents[documents] + 1.5 * torch.randn(len(documents), WIDTH, generator=random)


def train(world: World, *, hard: bool, log_q: bool) -> tuple[float, float, float]:
    """The share of queries that find their document first, as they are asked and one for each document; and seconds."""
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(1)
    ask, answer = tower(WIDTH), tower(WIDTH + 1)
    optimizer = torch.optim.Adam([*ask.parameters(), *answer.parameters()], lr=2e-3)
    start = time.perf_counter()
    for _ in range(STEPS):
        ids = torch.multinomial(world.q, BATCH, replacement=True, generator=random)
        queries, documents = ask(world.queries(ids, random)), answer(world.seen[ids])
        keywords: dict[str, Tensor] = {}
        if log_q:
            keywords["log_q"] = (BATCH * world.q[ids]).log()
        if hard:  # a look-alike of each document: the next one of its family
            others = (ids // 4) * 4 + (ids + 1) % 4
            keywords["hard"], candidates = answer(world.seen[others]), torch.cat([ids, others])
        else:
            candidates = ids
        optimizer.zero_grad()
        # With `ids`, another copy of the own document in the batch is no negative.
        loss = manymax.in_batch_loss(queries, documents, ids=candidates, temperature=0.1, normalize=True, **keywords)
        loss.backward()
        optimizer.step()
    seconds = time.perf_counter() - start
    with torch.no_grad():
        table = nn.functional.normalize(answer(world.seen))
        asked = torch.multinomial(world.q, DOCUMENTS, replacement=True, generator=random)
        shares = []
        for ids in (asked, torch.arange(DOCUMENTS)):
            _, best = manymax.linear_topk(nn.functional.normalize(ask(world.queries(ids, random))), table, 1)
            shares.append(float((best[:, 0] == ids).double().mean()))
    return shares[0], shares[1], seconds


def main() -> None:
    """Train with each choice of negatives and print what it found."""
    world = World()
    print(f"{DOCUMENTS:,} documents, {STEPS} steps of {BATCH} pairs\n")
    print(f"{'negatives':34} {'as asked':>9} {'each once':>10} {'seconds':>8}")
    for name, choice in {
        "in the batch": {"hard": False, "log_q": False},
        "in the batch, log q": {"hard": False, "log_q": True},
        "in the batch and hard ones": {"hard": True, "log_q": False},
    }.items():
        asked, each, seconds = train(world, **choice)
        print(f"{name:34} {asked:9.1%} {each:10.1%} {seconds:8.1f}")


if __name__ == "__main__":
    main()

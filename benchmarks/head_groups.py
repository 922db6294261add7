"""The groups of heads.py that compare times and memory with a bar. Each function is a group; its name selects it."""

from __future__ import annotations

import argparse
from functools import partial

import torch
import torch.nn.functional as F
from head_losses import (
    BISECTION,
    COMPILED,
    OURS,
    PACKAGE,
    SPARSE,
    eager,
    packaged,
    plain_and_compiled,
    torch_chunked,
)
from head_problems import DIM, Figures, Problem, compare, fastest, race
from measure import median
from torch import Tensor

import manymax

SCORES_OF_A_PEER = 1 << 27  # scores that a peer may hold at a time; for more, the rows go in parts


def softmax(a: argparse.Namespace, figures: Figures) -> None:
    """Our softmax head against torch's usual way."""
    problem = Problem("trained", a.rows, a.sizes[1])
    compare(figures, problem, plain_and_compiled("softmax"), ("eager", eager), 0.40, a.rounds, 1 / 15)


def chunked(a: argparse.Namespace, figures: Figures) -> None:
    """Our softmax head against torch's chunked head at its best chunk size."""
    for classes in a.sizes[1:]:
        problem = Problem("trained", a.rows, classes)
        chunks = {f"torch, chunk {c}": partial(torch_chunked, c) for c in (64, 128, 256, 512, 1024)}
        peer = fastest(problem, chunks)
        compare(figures, problem, plain_and_compiled("softmax"), peer, 0.75, a.rounds, 1.0)


def bf16(a: argparse.Namespace, figures: Figures) -> None:
    """Our softmax head with matrix products in bfloat16 against float32."""
    problem = Problem("trained", a.rows, a.sizes[1])
    half = partial(manymax.linear_softmax_loss, options={"matmul": "bf16"})
    compare(figures, problem, {"softmax, bf16": half}, ("float32", OURS["softmax"]), 0.7, a.rounds, 1.0)
    exact, rounded = (float(problem.step(loss)()) for loss in (OURS["softmax"], half))  # type: ignore[arg-type]
    figures.line(problem.name, "softmax, bf16: relative error of the loss", abs(rounded / exact - 1), 1e-4)


def peers(a: argparse.Namespace, figures: Figures) -> None:
    """Our sparse heads against the entmax package at its best k."""
    for regime in ("trained", "fresh"):
        for classes in a.sizes:
            # The best k of the package is looked for on a sixteenth of the rows.
            problem, trial = Problem(regime, a.rows, classes), Problem(regime, max(16, a.rows // 16), classes)
            middle, large = classes == a.sizes[1], classes == a.sizes[2]
            bar = (0.12 if middle else 0.20) if regime == "trained" else (0.35 if large else 0.20)
            for name, function in PACKAGE.items():
                ks = {f"package, k = {k}": partial(packaged, function, {"k": k}) for k in (None, 10, 100, 512)}
                best = fastest(trial, ks)
                memory_bar, parts = 1 / 50 if middle else None, -(-a.rows * classes // SCORES_OF_A_PEER)
                compare(figures, problem, plain_and_compiled(name), best, bar, a.rounds, memory_bar, parts)


def own(a: argparse.Namespace, figures: Figures) -> None:
    """Our sparse heads against our own softmax head."""
    losses = {name: loss for name, loss in (OURS | COMPILED).items() if name in COMPILED or name in SPARSE}
    for regime, plain_bar, compiled_bar in (("trained", 0.65, 0.65), ("fresh", 1.7, 1.2)):
        for classes in a.sizes[1:]:
            problem = Problem(regime, a.rows, classes)
            runs = {"softmax": OURS["softmax"]} | losses
            times = race({name: problem.step(loss) for name, loss in runs.items()}, a.rounds)
            softmax_peak = problem.memory(OURS["softmax"])
            for name, loss in losses.items():
                ratio = median(times[name]) / median(times["softmax"])
                bar, taken = compiled_bar if name in COMPILED else plain_bar, {n: times[n] for n in (name, "softmax")}
                figures.line(problem.name, f"{name} / our softmax", ratio, bar, times=taken)
                peak = problem.memory(loss)
                if peak is not None and softmax_peak is not None:
                    what, mb = f"{name} / our softmax: memory", {"peak_mb": peak, "peer_peak_mb": softmax_peak}
                    figures.line(problem.name, what, peak / softmax_peak, 1.0, **mb)


def alpha(a: argparse.Namespace, figures: Figures) -> None:
    """Our entmax head at a general alpha against the package's bisection."""
    problem = Problem("trained", a.rows, a.sizes[1])
    peer = partial(packaged, BISECTION, {"alpha": 1.3})
    compare(figures, problem, plain_and_compiled("entmax-1.3"), ("package, bisection", peer), 0.08, a.rounds, 1 / 30)


def million(a: argparse.Namespace, figures: Figures) -> None:
    """Every exact head at a million classes: it completes, in less than 1 GB above inputs and gradients."""
    problem = Problem("trained", min(512, a.rows), a.million)
    for name, loss in (OURS | COMPILED).items():
        peak = problem.memory(loss)
        if peak is not None:
            figures.line(problem.name, f"{name}, N = {len(problem.target)}: peak, GB", peak / 1024, 1.0)


def rank(a: argparse.Namespace, figures: Figures) -> None:
    """The 20 highest of all items for every user, with the items that the user has seen masked."""
    users, items, seen = a.rank
    x, w = torch.randn(users, DIM), torch.randn(items, DIM)
    exclude = torch.randint(items, (users, seen))

    def plain() -> object:
        found = []
        for start in range(0, users, 1024):
            scores = x[start : start + 1024] @ w.T
            scores.scatter_(1, exclude[start : start + 1024], -torch.inf)
            found.append(scores.topk(20).indices)
        return torch.cat(found)

    def ours() -> object:
        return manymax.linear_topk(x, w, 20, exclude=exclude)[1]

    if not torch.equal(plain(), ours()):  # type: ignore[arg-type]
        print("the two rankings differ")
    times = race({"ours": ours, "plain": plain}, a.rounds)
    ratio = median(times["ours"]) / median(times["plain"])
    figures.line(f"{users:,} x {items:,}", "linear_topk / matmul + topk", ratio, 0.45, times=times)


def grouped(a: argparse.Namespace, figures: Figures) -> None:
    """Softmax per (user, item) pair: pairs grouped by user with our head, against batches of pairs in the usual way."""
    users, per_user, classes = a.group
    pairs_per_batch = 2048
    x = torch.randn(users, DIM, requires_grad=True)
    w = (0.5 * torch.randn(classes, DIM)).requires_grad_()
    user = torch.arange(users).repeat_interleave(per_user)
    item = torch.randint(classes, (len(user),))
    # One batch of each kind is timed, and the time per pair compared: it is the same for all batches of an epoch.
    shuffled = torch.randperm(len(user))[:pairs_per_batch]

    def pairs() -> object:
        x.grad = w.grad = None
        F.cross_entropy(F.linear(x[user[shuffled]], w), item[shuffled]).backward()
        return None

    batch_users = torch.randperm(users)[:512]
    batch_pairs = (batch_users.unsqueeze(1) * per_user + torch.arange(per_user)).flatten()

    def groups() -> object:
        x.grad = w.grad = None
        rows, target = manymax.group_pairs(user[batch_pairs], item[batch_pairs])
        manymax.linear_softmax_loss(x[rows], w, target).backward()
        return None

    times = race({"pairs": pairs, "groups": groups}, a.rounds)
    per_pair = median(times["pairs"]) / pairs_per_batch, median(times["groups"]) / len(batch_pairs)
    what = "softmax epoch by user / by pairs, eager"
    figures.line(f"{users:,} x {per_user} C={classes:,}", what, per_pair[1] / per_pair[0], 1 / 40, times=times)


def sampled(a: argparse.Namespace, figures: Figures) -> None:
    """Sampled softmax with negatives per row and row-sparse gradients, against autograd with sparse embeddings."""
    problem = Problem("trained", a.rows, a.million)
    sampler = manymax.samplers.UniformSampler(a.million)
    k = 100

    def ours(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return manymax.linear_sampled_softmax_loss(x, w, y, sampler, k, sparse_grad=True)

    def peer(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        ids = torch.cat([y.unsqueeze(1), torch.randint(a.million, (len(y), k))], 1)
        scores = (F.embedding(ids, w, sparse=True) @ x.unsqueeze(2)).squeeze(2)
        return F.cross_entropy(scores, torch.zeros(len(y), dtype=torch.long))

    compare(figures, problem, {"sampled softmax": ours}, ("autograd, sparse embedding", peer), 0.5, a.rounds)

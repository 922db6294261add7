"""Training steps from queries and class vectors: manymax's heads against their peers and against each other.

    python benchmarks/heads.py                      everything: about 20 minutes on 2 cores
    python benchmarks/heads.py --only softmax,rank  some sections
    python benchmarks/heads.py --quick              small sizes, under a minute

A step is the loss with its gradients to queries and class vectors; N = 2048, d = 64. "trained" scores are as a trained
model gives them, "fresh" ones small and random. Each line is a ratio of medians of interleaved runs with its bar, and
the peak of memory above inputs and gradients.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import entmax as package
import torch
import torch.nn.functional as F
from measure import environment, interleave, limits, median, parser, peak_mb, scores_like, write
from torch import Tensor

import manymax

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
DIM = 64
RECORD: dict[str, Any] = {"lines": []}


class Problem:
    """Queries, class vectors and labels of one regime."""

    def __init__(self, regime: str, rows: int, classes: int) -> None:
        self.name = f"{regime} C={classes:,}"
        queries, vectors, self.target = scores_like(regime, rows, classes, DIM)
        self.queries, self.vectors = queries.requires_grad_(), vectors.requires_grad_()

    def step(self, loss: Loss) -> Callable[[], object]:
        """Loss and both gradients."""

        def run() -> object:
            self.queries.grad = self.vectors.grad = None
            value = loss(self.queries, self.vectors, self.target)
            value.backward()
            return value.detach()

        return run

    def memory(self, loss: Loss) -> float | None:
        """Peak MB above inputs and gradients."""
        self.queries.grad = self.vectors.grad = None
        peak = peak_mb(self.step(loss))
        return None if peak is None else peak - 4 * (self.queries.numel() + self.vectors.numel()) / 2**20


def line(section: str, problem: str, what: str, ratio: float, bar: float | None, **more: Any) -> None:
    """Print and record one comparison."""
    verdict = "" if bar is None else ("ok" if ratio <= bar else "MISSED")
    bound = "" if bar is None else f"(bar {bar:.3g})"
    notes = "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in more.items())
    print(f"{section:9s} {problem:22s} {what:46s} {ratio:7.3f} {bound:12s} {verdict:7s} {notes}", flush=True)
    RECORD["lines"].append(
        {"section": section, "problem": problem, "what": what, "ratio": ratio, "bar": bar, "verdict": verdict} | more
    )


def compare(
    section: str,
    problem: Problem,
    ours: tuple[str, Loss],
    peer: tuple[str, Loss],
    bar: float,
    rounds: int,
    memory_bar: float | None = None,
) -> None:
    """Our time as a share of a peer's, and our peak as a share of its peak."""
    times = interleave({"ours": problem.step(ours[1]), "peer": problem.step(peer[1])}, rounds)
    more: dict[str, Any] = {"ours_s": times["ours"], "peer_s": times["peer"]}
    peaks = problem.memory(ours[1]), problem.memory(peer[1])
    shown: dict[str, Any] = {}
    if None not in peaks:
        share = peaks[0] / peaks[1]  # type: ignore[operator]
        shown = {"peak_mb": peaks[0], "peer_peak_mb": peaks[1], "share": share}
        if memory_bar is not None:
            shown["memory"] = "ok" if share <= memory_bar else f"MISSED (bar {memory_bar:.3g})"
    line(section, problem.name, f"{ours[0]} / {peer[0]}", median(times["ours"]) / median(times["peer"]), bar, **shown)
    RECORD["lines"][-1] |= more


def eager(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """torch's usual way."""
    return F.cross_entropy(F.linear(x, w), y)


def chunked(chunk: int, x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """torch's own chunked head."""
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk)
    return F.linear_cross_entropy(x, w, y, options=options)


def packaged(function: Callable[..., Tensor], settings: dict[str, Any], x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """The entmax package on the table of scores."""
    return function(F.linear(x, w), y, **settings).mean()


OURS: dict[str, Loss] = {
    "softmax": manymax.linear_softmax_loss,
    "sparsemax": manymax.linear_sparsemax_loss,
    "entmax-1.5": partial(manymax.linear_entmax_loss, alpha=1.5),
    "rankmax": manymax.linear_rankmax_loss,
    "taylor_softmax": manymax.linear_taylor_softmax_loss,
    "rg": manymax.linear_rg_loss,
}
PACKAGE = {"sparsemax": package.sparsemax_loss, "entmax-1.5": package.entmax15_loss}


def best_of(problem: Problem, options: dict[str, Loss]) -> tuple[str, Loss]:
    """The fastest of some settings of a peer, by two runs each."""
    times = {name: min(interleave({name: problem.step(loss)}, 2)[name]) for name, loss in options.items()}
    name = min(times, key=lambda n: times[n])
    return name, options[name]


def softmax(a: argparse.Namespace) -> None:
    """Our softmax head against eager, torch's chunked head, and bfloat16 matmuls."""
    for classes in a.sizes[1:]:
        problem = Problem("trained", a.rows, classes)
        if classes == a.sizes[1]:
            compare("softmax", problem, ("ours", OURS["softmax"]), ("eager", eager), 0.40, a.rounds, 1 / 15)
        chunks = {f"chunk {c}": partial(chunked, c) for c in (64, 128, 256, 512, 1024)}
        name, loss = best_of(problem, chunks)
        compare("softmax", problem, ("ours", OURS["softmax"]), (f"torch {name}", loss), 0.75, a.rounds, 1.0)
        if classes == a.sizes[1]:
            half = partial(manymax.linear_softmax_loss, options={"matmul": "bf16"})
            compare("softmax", problem, ("ours bf16", half), ("ours float32", OURS["softmax"]), 0.7, a.rounds, 1.0)
            exact, rounded = (
                float(f(problem.queries, problem.vectors, problem.target).detach()) for f in (OURS["softmax"], half)
            )
            line("softmax", problem.name, "bf16 relative loss error", abs(rounded / exact - 1), 1e-4)


def sparse(a: argparse.Namespace) -> None:
    """Sparse members against the entmax package at its best k, and against our own softmax head."""
    for regime in ("trained", "fresh"):
        for classes in a.sizes:
            problem = Problem(regime, a.rows, classes)
            middle, large = classes == a.sizes[1], classes == a.sizes[2]
            for name, function in PACKAGE.items():
                ks = [None, 10, 100, 512] if not large or regime == "fresh" else [10, 100, 512]
                trial = Problem(regime, max(16, a.rows // 16), classes)
                options = {f"k={k}": partial(packaged, function, {"k": k}) for k in ks}
                best, loss = best_of(trial, options)
                bar = (0.12 if middle else 0.20) if regime == "trained" else (0.35 if large else 0.20)
                memory = 1 / 50 if middle else None
                compare(
                    "sparse", problem, (f"{name}", OURS[name]), (f"package {best}", loss), bar, a.peer_rounds, memory
                )
            if classes == a.sizes[0]:
                continue
            names = ("softmax", "sparsemax", "entmax-1.5", "rankmax")
            times = interleave({n: problem.step(OURS[n]) for n in names}, a.rounds)
            for name in names[1:]:
                ratio = median(times[name]) / median(times["softmax"])
                line("sparse", problem.name, f"{name} / our softmax", ratio, 0.65 if regime == "trained" else 1.7)


def general(a: argparse.Namespace) -> None:
    """A general alpha against bisection."""
    problem = Problem("trained", a.rows, a.sizes[1])
    ours = partial(manymax.linear_entmax_loss, alpha=1.3)
    peer = partial(packaged, package.entmax_bisect_loss, {"alpha": 1.3})
    compare("alpha", problem, ("entmax-1.3", ours), ("package bisection", peer), 0.08, a.peer_rounds, 1 / 30)


def million(a: argparse.Namespace) -> None:
    """Every exact member at a million classes: completes, in less than 1 GB above inputs and gradients."""
    problem = Problem("trained", min(512, a.rows), a.million)
    for name, loss in OURS.items():
        peak = problem.memory(loss)
        line("million", problem.name, f"{name}: peak, GB", math.nan if peak is None else peak / 1024, 1.0)


def rank(a: argparse.Namespace) -> None:
    """Full ranking with the seen items masked: top-20 of all classes for all users."""
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
    times = interleave({"ours": ours, "plain": plain}, a.peer_rounds)
    line("rank", f"{users:,} x {items:,}", "topk / matmul + topk", median(times["ours"]) / median(times["plain"]), 0.45)


def grouped(a: argparse.Namespace) -> None:
    """An epoch of pairs grouped by user against the same pairs in eager batches; a sample of the batches is timed."""
    users, per_user, classes = a.group
    pairs_per_batch = 2048
    x = torch.randn(users, DIM, requires_grad=True)
    w = (0.5 * torch.randn(classes, DIM)).requires_grad_()
    user = torch.arange(users).repeat_interleave(per_user)
    item = torch.randint(classes, (len(user),))
    shuffled = torch.randperm(len(user))[:pairs_per_batch]

    def pairs() -> object:
        x.grad = w.grad = None
        F.cross_entropy(F.linear(x[user[shuffled]], w), item[shuffled]).backward()
        return None

    some = torch.randperm(users)[:512]
    chosen = (some.unsqueeze(1) * per_user + torch.arange(per_user)).flatten()

    def groups() -> object:
        x.grad = w.grad = None
        rows, target = manymax.group_pairs(user[chosen], item[chosen])
        manymax.linear_softmax_loss(x[rows], w, target).backward()
        return None

    times = interleave({"pairs": pairs, "groups": groups}, a.rounds)
    per_pair = median(times["pairs"]) / pairs_per_batch, median(times["groups"]) / len(chosen)
    line("grouped", f"{users:,} x {per_user}", "epoch by user / by pairs, eager", per_pair[1] / per_pair[0], 1 / 40)


def sampled(a: argparse.Namespace) -> None:
    """Sampled softmax with per-row negatives and row-sparse gradients, against autograd with sparse embeddings."""
    problem = Problem("trained", a.rows, a.million)
    sampler = manymax.samplers.UniformSampler(a.million)
    k = 100

    def ours(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return manymax.linear_sampled_softmax_loss(x, w, y, sampler, k, sparse=True)

    def peer(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        ids = torch.cat([y.unsqueeze(1), torch.randint(a.million, (len(y), k))], 1)
        scores = (F.embedding(ids, w, sparse=True) @ x.unsqueeze(2)).squeeze(2)
        return F.cross_entropy(scores, torch.zeros(len(y), dtype=torch.long))

    compare("sampled", problem, ("sampled softmax", ours), ("autograd, sparse embedding", peer), 0.5, a.rounds)


def trajectory(a: argparse.Namespace) -> None:
    """A real optimisation: time per step and support against steps, next to the softmax head."""
    users, classes, steps = a.path
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(users, 8, generator=generator), torch.randn(classes, 8, generator=generator)
    target = torch.multinomial((truth[0] @ truth[1].T).softmax(1), 20, replacement=True, generator=generator)
    names = ("softmax", "sparsemax", "entmax-1.5", "rankmax")
    state = {}
    for name in names:
        x = (0.1 * torch.randn(users, DIM, generator=generator)).requires_grad_()
        w = (0.1 * torch.randn(classes, DIM, generator=generator)).requires_grad_()
        state[name] = (x, w, torch.optim.Adam([x, w], lr=5e-3))
    window, rows = max(1, steps // 8), []
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(steps):
        batch = torch.randint(users, (512,), generator=generator)
        label = target[batch, torch.randint(20, (512,), generator=generator)]

        def step(name: str, batch: Tensor = batch, label: Tensor = label) -> None:
            x, w, adam = state[name]
            adam.zero_grad()
            OURS[name](x[batch], w, label).backward()
            adam.step()

        found = interleave({name: partial(step, name) for name in names}, 0) if number == 0 else None
        if found is None:
            import time

            for name in names:
                start = time.perf_counter()
                step(name)
                times[name].append(time.perf_counter() - start)
        if (number + 1) % window == 0:
            maps = {"sparsemax": manymax.sparsemax, "entmax-1.5": partial(manymax.entmax, alpha=1.5)}
            base = median(times["softmax"][-window:])
            row: dict[str, Any] = {"step": number + 1}
            for name in names[1:]:
                x, w, _ = state[name]
                with torch.no_grad():
                    scores = x[:256] @ w.T
                    if name in maps:
                        support = (maps[name](scores) > 0).sum(1)
                    else:
                        support = (scores > scores.gather(1, target[:256, :1]) - 1).sum(1)
                row[name] = {"ratio": median(times[name][-window:]) / base, "support": float(support.float().median())}
            rows.append(row)
            cells = "  ".join(f"{n} {row[n]['ratio']:.2f} (support {row[n]['support']:.0f})" for n in names[1:])
            print(f"trajectory C={classes:,} steps to {number + 1:5d}: time / our softmax   {cells}", flush=True)
    RECORD["trajectory"] = rows


def growth(a: argparse.Namespace) -> None:
    """Seconds of a step against C, and the slope on a log-log line over the last decade."""
    counts = [c for c in (1_000, 10_000, 100_000, 1_000_000) if c <= a.million]
    found: dict[str, list[float]] = {}
    for classes in counts:
        problem = Problem("trained", 128, classes)
        sampler = manymax.samplers.UniformSampler(classes)
        tree = manymax.HierarchicalSoftmaxLoss(DIM, manymax.HuffmanTree(torch.ones(classes)), sparse=True)
        moments = manymax.class_moments(problem.vectors.detach())
        losses: dict[str, Loss] = OURS | {
            "sampled_softmax": lambda x, w, y, s=sampler: manymax.linear_sampled_softmax_loss(x, w, y, s, sparse=True),
            "nce": lambda x, w, y, s=sampler: manymax.linear_nce_loss(x, w, y, s, sparse=True),
            "hierarchical_softmax": lambda x, w, y, h=tree: h(x, y),
            "rg, moments given": lambda x, w, y, m=moments: manymax.rg_log_partition_from_moments(x, m).mean(),
        }
        for name, times in interleave({n: problem.step(loss) for n, loss in losses.items()}, 3).items():
            found.setdefault(name, []).append(median(times))
    printed = {
        "softmax": "N C",
        "sparsemax": "N C log C",
        "entmax-1.5": "N C log C + N |P|",
        "rankmax": "N C",
        "sampled_softmax": "N k",
        "nce": "N k",
        "hierarchical_softmax": "N log C",
    }
    for name, seconds in found.items():
        slope = math.log(seconds[-1] / seconds[-2]) / math.log(counts[-1] / counts[-2])
        relative = "  ".join(f"{s / seconds[0]:9.2f}" for s in seconds)
        paper = printed.get(name, "-")
        print(f"growth    {name:22s} time / time at C={counts[0]:,}: {relative}   slope {slope:5.2f}   paper {paper}")
    RECORD["growth"] = {"classes": counts, "seconds": found, "paper": printed}


SECTIONS = {f.__name__: f for f in (softmax, sparse, general, million, rank, grouped, sampled, trajectory, growth)}


def main(arguments: argparse.Namespace) -> int:
    """Run the chosen sections."""
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    quick = arguments.quick
    arguments.rows = 256 if quick else 2048
    arguments.sizes = (1_000, 5_001, 20_000) if quick else (3_307, 40_981, 200_000)
    arguments.million = 50_000 if quick else 1_000_000
    arguments.rank = (2_000, 5_001, 20) if quick else (30_000, 41_000, 27)
    arguments.group = (2_000, 27, 5_001) if quick else (30_000, 27, 40_981)
    arguments.path = (1_000, 3_000, 40) if quick else (5_000, 10_000, 400)
    arguments.rounds = 2 if quick else arguments.rounds
    arguments.peer_rounds = 1 if quick else 3
    RECORD["limits"] = limits()
    print("limits   ", "  ".join(f"{k} {v:.3g}" for k, v in RECORD["limits"].items()))
    for name in arguments.only.split(",") if arguments.only else SECTIONS:
        SECTIONS[name](arguments)
    if arguments.json:
        write(arguments.json, {"environment": environment(arguments)} | RECORD)
    missed = [entry for entry in RECORD["lines"] if entry["verdict"] == "MISSED"]
    return 0 if quick else bool(missed)


if __name__ == "__main__":
    made = parser(__doc__ or "")
    made.add_argument("--only", help=f"sections, comma-separated: {', '.join(SECTIONS)}")
    sys.exit(main(made.parse_args()))

"""Training steps from queries and class vectors: manymax's heads against their peers and against each other.

    python benchmarks/heads.py --json FILE          everything: about 20 minutes on 2 cores
    python benchmarks/heads.py --only chunked,rank  some groups
    python benchmarks/heads.py --quick              small sizes, under a minute
    python benchmarks/heads.py --json FILE --page docs/speed.md    write FILE's figures into the page, measure nothing

A step is the loss with its gradients to queries and class vectors; N = 2048, d = 64. "trained" scores are as a trained
model gives them, "fresh" ones small and random. Each line is a ratio of medians of interleaved runs with its bar, or a
share of the peaks of memory above inputs and gradients. FILE is written after every line; groups that it already holds
in whole are not measured again unless they are named by --only. The curves of growth go into an SVG next to it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import entmax as package
import torch
import torch.nn.functional as F
from measure import environment, limits, median, parser, peak_mb, scores_like, write
from torch import Tensor

import manymax
from manymax.engine import native as compiled

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
DIM = 64
PATIENCE = 20.0  # seconds for the rounds of one contestant: slow peers get fewer
TABLE = 1 << 27  # scores that a peer may hold at a time; more rows than that go one part after the other
BEGIN, END = "<!-- speed: begin", "<!-- speed: end"


class Record:
    """The figures of all groups, in the file after every line."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.path = arguments.json
        self.groups: dict[str, Any] = {}
        self.current: dict[str, Any] = {}
        self.about = {"environment": environment(arguments), "quick": arguments.quick}
        if self.path and Path(self.path).exists():
            found = json.loads(Path(self.path).read_text(encoding="utf-8"))
            if found.get("quick") != arguments.quick:
                sys.exit(f"{self.path} holds a record of other sizes (--quick): name another file or remove it.")
            self.groups = found["groups"]

    def begin(self, group: str, peaks: dict[str, float]) -> None:
        """Start a group anew."""
        self.current = self.groups[group] = {"complete": False, "limits": peaks, "lines": []}

    def save(self) -> None:
        """Write what there is, if there is a file to write to."""
        if self.path:
            write(self.path, self.about | {"groups": self.groups})

    def line(self, problem: str, what: str, ratio: float, bar: float | None, **more: Any) -> None:
        """Print and keep one comparison; the bars are for the full sizes."""
        bar = None if self.about["quick"] else bar
        verdict = "" if bar is None else ("reached" if ratio <= bar else "not reached")
        bound = "" if bar is None else f"(bar {bar:.3g})"
        notes = "  ".join(f"{k} {v:.4g}" for k, v in more.items() if isinstance(v, float))
        print(f"{problem:22s} {what:54s} {ratio:8.3f} {bound:12s} {verdict:11s} {notes}", flush=True)
        kept = {"problem": problem, "what": what, "ratio": ratio, "bar": bar, "verdict": verdict}
        self.current["lines"].append(kept | more)
        self.save()


class Problem:
    """Queries, class vectors and labels of one regime."""

    def __init__(self, regime: str, rows: int, classes: int) -> None:
        self.name = f"{regime} C={classes:,}"
        queries, vectors, self.target = scores_like(regime, rows, classes, DIM)
        self.queries, self.vectors = queries.requires_grad_(), vectors.requires_grad_()

    def step(self, loss: Loss, parts: int = 1) -> Callable[[], object]:
        """Loss and both gradients; in parts of the rows for a peer whose tables would not fit."""

        def run() -> object:
            self.queries.grad = self.vectors.grad = None
            total = torch.zeros(())
            for x, y in zip(self.queries.chunk(parts), self.target.chunk(parts), strict=True):
                value = loss(x, self.vectors, y) / parts
                value.backward()
                total += value.detach()
            return total

        return run

    def memory(self, loss: Loss) -> float | None:
        """Peak MB above inputs and gradients."""
        self.queries.grad = self.vectors.grad = None
        peak = peak_mb(self.step(loss))
        return None if peak is None else peak - 4 * (self.queries.numel() + self.vectors.numel()) / 2**20


def seconds(run: Callable[[], object]) -> float:
    """Of one run."""
    gc.collect()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def race(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of interleaved runs after one that is not counted; fewer rounds where one takes long."""
    slowest = max([seconds(run) for run in runs.values()])
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(max(1, min(rounds, int(PATIENCE / slowest)))):
        for name, run in runs.items():
            times[name].append(seconds(run))
    return times


def compare(
    record: Record,
    problem: Problem,
    ours: Mapping[str, Loss],
    peer: tuple[str, Loss],
    bar: float,
    rounds: int,
    memory_bar: float | None = None,
    parts: int = 1,
) -> None:
    """Our times as shares of a peer's, and our peaks as shares of its peak where there is a bar for them."""
    runs = {name: problem.step(loss) for name, loss in ours.items()}
    times = race(runs | {"peer": problem.step(peer[1], parts)}, rounds)
    for name in ours:
        taken = {who: times[who] for who in (name, "peer")}
        ratio = median(times[name]) / median(times["peer"])
        record.line(problem.name, f"{name} / {peer[0]}", ratio, bar, times=taken)
    peer_peak = None if memory_bar is None else problem.memory(peer[1])
    for name, loss in ours.items():
        if peer_peak is not None and (peak := problem.memory(loss)) is not None:
            what, mb = f"{name} / {peer[0]}: memory", {"peak_mb": peak, "peer_peak_mb": peer_peak}
            record.line(problem.name, what, peak / peer_peak, memory_bar, **mb)


def eager(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """torch's usual way."""
    return F.cross_entropy(F.linear(x, w), y)


def in_chunks(chunk: int, x: Tensor, w: Tensor, y: Tensor) -> Tensor:
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
    "entmax-1.3": partial(manymax.linear_entmax_loss, alpha=1.3),
    "rankmax": manymax.linear_rankmax_loss,
    "taylor_softmax": manymax.linear_taylor_softmax_loss,
    "rg": manymax.linear_rg_loss,
}
SPARSE = ("sparsemax", "entmax-1.5", "rankmax")
COMPILED: dict[str, Loss] = {}
if compiled.available():
    COMPILED = {f"{name}, compiled": partial(OURS[name], options={"compiled": True}) for name in SPARSE}


def both(name: str) -> dict[str, Loss]:
    """A sparse member in plain torch, and compiled where there is a compiler."""
    return {key: loss for key, loss in (OURS | COMPILED).items() if key in (name, f"{name}, compiled")}


PACKAGE = {"sparsemax": package.sparsemax_loss, "entmax-1.5": package.entmax15_loss}


def best_of(problem: Problem, options: Mapping[str, Loss]) -> tuple[str, Loss]:
    """The fastest of some settings of a peer."""
    times = race({name: problem.step(loss) for name, loss in options.items()}, 1)
    name = min(times, key=lambda n: min(times[n]))
    return name, options[name]


def softmax(a: argparse.Namespace, record: Record) -> None:
    """Our softmax head against torch's usual way."""
    problem = Problem("trained", a.rows, a.sizes[1])
    compare(record, problem, both("softmax"), ("eager", eager), 0.40, a.rounds, 1 / 15)


def chunked(a: argparse.Namespace, record: Record) -> None:
    """Our softmax head against torch's chunked head at its best chunk size."""
    for classes in a.sizes[1:]:
        problem = Problem("trained", a.rows, classes)
        chunks = {f"torch, chunk {c}": partial(in_chunks, c) for c in (64, 128, 256, 512, 1024)}
        compare(record, problem, both("softmax"), best_of(problem, chunks), 0.75, a.rounds, 1.0)


def bf16(a: argparse.Namespace, record: Record) -> None:
    """Matmuls in bfloat16 against those in float32."""
    problem = Problem("trained", a.rows, a.sizes[1])
    half = partial(manymax.linear_softmax_loss, options={"matmul": "bf16"})
    compare(record, problem, {"softmax, bf16": half}, ("float32", OURS["softmax"]), 0.7, a.rounds, 1.0)
    exact, rounded = (float(problem.step(loss)()) for loss in (OURS["softmax"], half))  # type: ignore[arg-type]
    record.line(problem.name, "softmax, bf16: relative error of the loss", abs(rounded / exact - 1), 1e-4)


def peers(a: argparse.Namespace, record: Record) -> None:
    """Sparse members against the entmax package at its best k."""
    for regime in ("trained", "fresh"):
        for classes in a.sizes:
            problem, trial = Problem(regime, a.rows, classes), Problem(regime, max(16, a.rows // 16), classes)
            middle, large = classes == a.sizes[1], classes == a.sizes[2]
            bar = (0.12 if middle else 0.20) if regime == "trained" else (0.35 if large else 0.20)
            for name, function in PACKAGE.items():
                ks = {f"package, k = {k}": partial(packaged, function, {"k": k}) for k in (None, 10, 100, 512)}
                best = best_of(trial, ks)
                memory, parts = 1 / 50 if middle else None, -(-a.rows * classes // TABLE)
                compare(record, problem, both(name), best, bar, a.rounds, memory, parts)


def own(a: argparse.Namespace, record: Record) -> None:
    """Sparse members against our own softmax head."""
    losses = {name: loss for name, loss in (OURS | COMPILED).items() if name in COMPILED or name in SPARSE}
    for regime, plain_bar, compiled_bar in (("trained", 0.65, 0.65), ("fresh", 1.7, 1.2)):
        for classes in a.sizes[1:]:
            problem = Problem(regime, a.rows, classes)
            runs = {"softmax": OURS["softmax"]} | losses
            times = race({name: problem.step(loss) for name, loss in runs.items()}, a.rounds)
            base = problem.memory(OURS["softmax"])
            for name, loss in losses.items():
                ratio = median(times[name]) / median(times["softmax"])
                bar, taken = compiled_bar if name in COMPILED else plain_bar, {n: times[n] for n in (name, "softmax")}
                record.line(problem.name, f"{name} / our softmax", ratio, bar, times=taken)
                peak = problem.memory(loss)
                if peak is not None and base is not None:
                    what, mb = f"{name} / our softmax: memory", {"peak_mb": peak, "peer_peak_mb": base}
                    record.line(problem.name, what, peak / base, 1.0, **mb)


def alpha(a: argparse.Namespace, record: Record) -> None:
    """A general alpha against bisection."""
    problem = Problem("trained", a.rows, a.sizes[1])
    peer = partial(packaged, package.entmax_bisect_loss, {"alpha": 1.3})
    compare(record, problem, both("entmax-1.3"), ("package, bisection", peer), 0.08, a.rounds, 1 / 30)


def million(a: argparse.Namespace, record: Record) -> None:
    """Every exact member at a million classes: completes, in less than 1 GB above inputs and gradients."""
    problem = Problem("trained", min(512, a.rows), a.million)
    for name, loss in (OURS | COMPILED).items():
        peak = problem.memory(loss)
        if peak is not None:
            record.line(problem.name, f"{name}, N = {len(problem.target)}: peak, GB", peak / 1024, 1.0)


def rank(a: argparse.Namespace, record: Record) -> None:
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
    times = race({"ours": ours, "plain": plain}, a.rounds)
    ratio = median(times["ours"]) / median(times["plain"])
    record.line(f"{users:,} x {items:,}", "linear_topk / matmul + topk", ratio, 0.45, times=times)


def grouped(a: argparse.Namespace, record: Record) -> None:
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

    times = race({"pairs": pairs, "groups": groups}, a.rounds)
    per_pair = median(times["pairs"]) / pairs_per_batch, median(times["groups"]) / len(chosen)
    what = "softmax epoch by user / by pairs, eager"
    record.line(f"{users:,} x {per_user} C={classes:,}", what, per_pair[1] / per_pair[0], 1 / 40, times=times)


def sampled(a: argparse.Namespace, record: Record) -> None:
    """Sampled softmax with per-row negatives and row-sparse gradients, against autograd with sparse embeddings."""
    problem = Problem("trained", a.rows, a.million)
    sampler = manymax.samplers.UniformSampler(a.million)
    k = 100

    def ours(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return manymax.linear_sampled_softmax_loss(x, w, y, sampler, k, sparse_grad=True)

    def peer(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        ids = torch.cat([y.unsqueeze(1), torch.randint(a.million, (len(y), k))], 1)
        scores = (F.embedding(ids, w, sparse=True) @ x.unsqueeze(2)).squeeze(2)
        return F.cross_entropy(scores, torch.zeros(len(y), dtype=torch.long))

    compare(record, problem, {"sampled softmax": ours}, ("autograd, sparse embedding", peer), 0.5, a.rounds)


def supports(name: str, scores: Tensor, target: Tensor) -> Tensor:
    """How many classes of each row have a part in the gradient."""
    name = name.removesuffix(", compiled")
    if name == "rankmax":
        return (scores > scores.gather(1, target) - 1).sum(1)
    order = {"sparsemax": 2.0, "entmax-1.5": 1.5, "entmax-1.3": 1.3}.get(name)
    return torch.full((len(scores),), scores.shape[1]) if order is None else (manymax.entmax(scores, order) > 0).sum(1)


def trajectory(a: argparse.Namespace, record: Record) -> None:
    """A real optimisation: seconds of a step and support against steps, next to the softmax head."""
    users, classes, steps = a.path
    losses = OURS | COMPILED
    generator = torch.Generator().manual_seed(0)
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
            cells = [f"{n} {cost(row, n):.2f} ({row[n]['support']:.0f})" for n in losses if n != "softmax"]
            print(f"to step {number:4d}: time / softmax (support)  {'  '.join(cells)}", flush=True)
    crossing = {name: cheaper_from(rows, name) for name in losses if name != "softmax"}
    record.current |= {"classes": classes, "rows": rows, "cheaper_from": crossing}
    for name, begun in crossing.items():
        print(f"{name}: " + ("not cheaper than softmax" if begun is None else f"cheaper from step {begun} on"))


def cost(row: dict[str, Any], name: str) -> float:
    """Seconds of a step over those of softmax."""
    return float(row[name]["seconds"] / row["softmax"]["seconds"])


def cheaper_from(rows: list[dict[str, Any]], name: str) -> int | None:
    """The end of the first stretch of steps from which on a member is cheaper than softmax, to the end."""
    found = None
    for row in reversed(rows):
        if cost(row, name) >= 1:
            break
        found = row["step"]
    return found


PAPER = {  # its Table 4, cost of an epoch
    "softmax": "N C",
    "sparsemax": "N C log C",
    "entmax-1.5": "N C log C + N |P|",
    "entmax-1.3": "N C log C + N |P|",
    "rankmax": "N C",
    "sampled_softmax": "N k",
    "nce": "N k",
    "hierarchical_softmax": "N log C",
}


def growth(a: argparse.Namespace, record: Record) -> None:
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
    record.current |= {"classes": counts, "seconds": found, "paper": PAPER}
    for name, values in found.items():
        relative = "  ".join(f"{s / values[0]:9.2f}" for s in values)
        shown = f"slope {slope(counts, values):5.2f}   paper {PAPER.get(name.removesuffix(', compiled'), '-')}"
        print(f"{name:22s} time / time at C={counts[0]:,}: {relative}   {shown}")
    if a.json:
        print(f"plotted in {plot(Path(a.json).with_suffix('.svg'), counts, found)}")


def slope(counts: list[int], values: list[float]) -> float:
    """Of the line through the points (log C, log seconds), by least squares, without the first: that is overhead."""
    x = torch.tensor(counts[1:] if len(counts) > 2 else counts, dtype=torch.float64).log()
    y = torch.tensor(values[-len(x) :], dtype=torch.float64).log()
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


def plot(path: Path, counts: list[int], found: dict[str, list[float]]) -> Path:
    """Seconds against C on a log-log plane, a line for each member."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "manymax"  # the same file from the same figures
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


GROUPS = {
    f.__name__: f
    for f in (softmax, chunked, bf16, peers, own, alpha, million, rank, grouped, sampled, trajectory, growth)
}


def table(record: dict[str, Any], plot_at: str) -> list[str]:
    """The record as Markdown: bars, trajectory, growth, limits."""
    groups = record["groups"]
    lines = ["| scores | ours / other | ratio | bar | |", "| --- | --- | --- | --- | --- |"]
    for group in groups.values():
        for entry in group["lines"]:
            bar = "-" if entry["bar"] is None else f"{entry['bar']:.3g}"
            cells = [entry["problem"], entry["what"], f"{entry['ratio']:.3g}", bar, entry["verdict"]]
            lines.append(f"| {' | '.join(cells)} |")
    if "rows" in groups.get("trajectory", {}):
        lines += ["", *trajectory_table(groups["trajectory"])]
    if "seconds" in groups.get("growth", {}):
        lines += ["", *growth_table(groups["growth"], plot_at)]
    peaks = "; ".join(f"{name} {value:.3g}" for name, value in next(iter(groups.values()))["limits"].items())
    about = record["environment"]
    lines += ["", f"{about['machine']}, threads: {about['threads']}, torch {about['torch']}. Limits measured: {peaks}."]
    return lines


def trajectory_table(group: dict[str, Any]) -> list[str]:
    """Time over that of softmax and support, for every other stretch of steps."""
    names = list(group["cheaper_from"])
    lines = [
        f"Time of a step over that of softmax, and support (median), C = {group['classes']:,}, to step:",
        "",
        f"| step | {' | '.join(names)} |",
        "| --- |" + " --- |" * len(names),
    ]
    for row in group["rows"][::2]:
        cells = [f"{cost(row, name):.2f} ({row[name]['support']:.0f})" for name in names]
        lines.append(f"| {row['step']} | {' | '.join(cells)} |")
    steps = [f"{number}" if number is not None else "never" for number in group["cheaper_from"].values()]
    return [*lines, f"| cheaper from | {' | '.join(steps)} |"]


def growth_table(group: dict[str, Any], plot_at: str) -> list[str]:
    """Milliseconds against C, the slope, and the paper's cost of an epoch."""
    counts = group["classes"]
    lines = [
        f"Milliseconds of a step, N = 128, and the slope on [log-log lines]({plot_at}):",
        "",
        f"| member | {' | '.join(f'C = {c:,}' for c in counts)} | slope | an epoch, as the paper has it |",
        "| --- |" + " --- |" * (len(counts) + 2),
    ]
    for name, values in group["seconds"].items():
        cells = [f"{1e3 * value:.3g}" for value in values] + [f"{slope(counts, values):.2f}"]
        paper = group["paper"].get(name.removesuffix(", compiled"), "-").replace("|", r"\|")
        lines.append(f"| {name} | {' | '.join(cells)} | {paper} |")
    return lines


def write_page(page: Path, source: Path) -> None:
    """Put the tables between the marks of a page, whole or not at all."""
    plot_at = os.path.relpath(source.with_suffix(".svg"), page.parent)
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    mark, after = rest.split("-->", 1)
    lines = table(json.loads(source.read_text(encoding="utf-8")), plot_at)
    text = "\n".join([f"{before}{BEGIN}{mark}-->", *lines, f"{END}{after.split(END)[1]}"])
    new = page.with_suffix(".tmp")
    new.write_text(text, encoding="utf-8")
    new.replace(page)


def set_sizes(a: argparse.Namespace) -> None:
    """The sizes of all groups."""
    quick = a.quick
    a.rows = 128 if quick else 2048
    a.sizes = (500, 2_001, 8_000) if quick else (3_307, 40_981, 200_000)
    a.million = 20_000 if quick else 1_000_000
    a.rank = (1_000, 5_001, 20) if quick else (30_000, 41_000, 27)
    a.group = (1_000, 27, 2_001) if quick else (30_000, 27, 40_981)
    a.path = (500, 1_000, 16) if quick else (5_000, 10_000, 288)
    a.rounds = 1 if quick else a.rounds


def main(arguments: argparse.Namespace) -> int:
    """Run the chosen groups, or write the page."""
    if arguments.page:
        write_page(Path(arguments.page), Path(arguments.json))
        return 0
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    set_sizes(arguments)
    gc.freeze()  # what the imports made need not be looked through before every run
    record, peaks = Record(arguments), limits()
    print("limits of this machine: ", "  ".join(f"{k} {v:.3g}" for k, v in peaks.items()))
    for name in arguments.only or GROUPS:
        if not arguments.only and record.groups.get(name, {}).get("complete"):
            print(f"{name}: kept from {record.path}")
            continue
        print(f"-- {name}: {GROUPS[name].__doc__}", flush=True)
        record.begin(name, peaks)
        GROUPS[name](arguments, record)
        record.current["complete"] = True
        record.save()
    lines = [entry for group in record.groups.values() for entry in group["lines"] if entry["verdict"]]
    missed = [entry for entry in lines if entry["verdict"] == "not reached"]
    print(f"{len(lines) - len(missed)} of {len(lines)} bars reached")
    return 0 if arguments.quick else bool(missed)


def read_groups(text: str) -> list[str]:
    """Names of groups, comma-separated."""
    names = text.split(",")
    for name in names:
        if name not in GROUPS:
            raise argparse.ArgumentTypeError(f"no group {name!r}; there are {', '.join(GROUPS)}")
    return names


if __name__ == "__main__":
    made = parser(__doc__ or "")
    made.add_argument("--only", type=read_groups, help=f"groups, comma-separated: {', '.join(GROUPS)}")
    made.add_argument("--page", metavar="PAGE", help="write the figures of --json FILE into PAGE, measure nothing")
    read = made.parse_args()
    if read.page and not (read.json and Path(read.json).exists()):
        made.error("--page needs --json FILE, a record that is there")
    sys.exit(main(read))

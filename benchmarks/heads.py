"""Training steps of manymax's heads with their defaults: against the limit of the machine, and against other packages.

    python benchmarks/heads.py --json FILE            all questions: about 40 minutes on 2 cores
    python benchmarks/heads.py --only limit,peers     some questions
    python benchmarks/heads.py --quick                small sizes, under a minute
    python benchmarks/heads.py --train-model          train the model of the real regime and stop: some minutes
    python benchmarks/heads.py --json FILE --page docs/speed.md    write FILE's figures into the page, measure nothing

Each function below is a question and makes one table. A step is the loss with its gradients for queries and class
vectors; N = 2048, d = 64. A figure is a ratio of medians of at least nine interleaved runs in one process. The regimes
fresh, peaked and real of the scores are described in head_problems.py, the contestants in head_losses.py. `BARS` are
the goals that were set beforehand. FILE is written after every line; questions that it holds completely are not asked
again unless --only names them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from head_losses import OURS, PACKAGE, PLAIN, TORCH_CHUNKS, best_setting, products, sampled_step
from head_page import write_page
from head_problems import REGIMES, Loss, Problem, default_folder, train_model
from head_record import Bar, Record, peaks, print_peaks
from measure import busy_neighbour, interleave, median, parser
from torch import Tensor

from manymax.study.config import RunConfig
from manymax.study.parallel import Team
from manymax.study.run import build_model, prepare_data
from manymax.study.train import build_optimizer, compute_gradients, epoch_batches, take_step

SPARSE = [name for name in OURS if name != "softmax"]
BARS = {
    "limit": [
        Bar("softmax / three products", 1.2, classes=(41_000, 200_000)),
        Bar("softmax / three products", 1.4, classes=(3_307,)),
        Bar("sparsemax / one product", 1.35, classes=(41_000,), regimes=("peaked", "real")),
        Bar("entmax-1.5 / softmax", 1.1, classes=(10_000, 41_000)),
        Bar("rankmax / softmax", 1.1, classes=(10_000, 41_000)),
        Bar("entmax-1.3 / softmax", 1.5, classes=(10_000, 41_000)),
    ],
    "memory": [Bar(f"{name} / softmax", 1.05) for name in SPARSE],
    "sampled": [
        Bar("ours, C = 1,000,000 / nn.Embedding, C = 1,000,000", 0.5),
        Bar("ours, C = 1,000,000 / ours, C = 100,000", 1.5),
    ],
    "neighbour": [Bar(f"{name} / softmax: busy / quiet", 1.5) for name in SPARSE],
    "epoch": [Bar("sparsemax / softmax", 1.0)],
    "filter": [Bar("sparsemax / one product", 0.7), Bar("entmax-1.5 / entmax-1.5, all scored", 0.8)],
}


def limit(a: argparse.Namespace, record: Record) -> None:
    """How far is each loss from the limit, and from our softmax? One product gives all scores; two more, gradients."""
    for classes in a.sizes:
        for regime in REGIMES:
            problem = Problem(regime, a.rows, classes, a.folder)
            record.facts(problem)
            runs = {"one product": products(problem, 1), "three products": products(problem, 3)}
            runs |= {name: problem.step(loss) for name, loss in OURS.items()}
            pairs = [("softmax", "three products"), *((name, "one product") for name in SPARSE)]
            record.race(problem, runs, [*pairs, *((name, "softmax") for name in SPARSE)], a.rounds)


def peers(a: argparse.Namespace, record: Record) -> None:
    """How fast are our heads against torch and against the entmax package at its best k?"""
    for classes in (a.sizes[0], *a.sizes[2:]):
        problem = Problem("real", a.rows, classes, a.folder)
        chunk = best_setting(problem, TORCH_CHUNKS)
        losses = {"softmax": OURS["softmax"]} | PLAIN | {chunk: TORCH_CHUNKS[chunk]}
        others = [name for name in losses if name != "softmax"]
        runs = {name: problem.step(loss) for name, loss in losses.items()}
        record.race(problem, runs, [("softmax", other) for other in others], a.rounds, others)
    for regime in REGIMES:
        for classes in (a.sizes[0], a.sizes[2]):
            problem = Problem(regime, a.rows, classes, a.folder)
            for name, settings in PACKAGE.items():
                if len(settings) > 1 or regime == "real":  # the bisection takes half a minute in any regime
                    package = best_setting(problem.few_rows(), settings)
                    runs = {name: problem.step(OURS[name]), package: problem.step(settings[package])}
                    record.race(problem, runs, [(name, package)], a.rounds, [package])


def memory(a: argparse.Namespace, record: Record) -> None:
    """How much memory does a step need above inputs and gradients?"""
    for classes in a.memory_sizes:
        for regime in REGIMES:
            problem = Problem(regime, a.rows, classes, a.folder)
            pairs = [(name, "softmax") for name in SPARSE]
            if regime == "real" and classes == a.sizes[2]:
                pairs += [("softmax", other) for other in ("eager", "torch, default chunk", "torch, chunk 256")]
                pairs += [(name, f"package {name}, k = 100") for name in ("sparsemax", "entmax-1.5")]
            found = peaks(problem, sorted({name for pair in pairs for name in pair}), torch.get_num_threads())
            for ours, other in pairs:
                mb, other_mb = found[ours], found[other]
                if mb is not None and other_mb is not None:
                    record.line(problem, f"{ours} / {other}", mb / other_mb, peak_mb={ours: mb, other: other_mb})


def sampled(a: argparse.Namespace, record: Record) -> None:
    """How fast is sampled softmax, its optimiser step included, and how much does its time depend on C?"""
    few, many = a.sampled
    names = {classes: f"C = {classes:,}" for classes in a.sampled}
    runs = {f"ours, {names[c]}": sampled_step(c, a.rows, ours=True) for c in a.sampled}
    runs |= {f"nn.Embedding, {names[c]}": sampled_step(c, a.rows, ours=False) for c in a.sampled}
    pairs = [(f"ours, {names[c]}", f"nn.Embedding, {names[c]}") for c in a.sampled]
    pairs.append((f"ours, {names[many]}", f"ours, {names[few]}"))
    record.race("Zipf(1), k = 100", runs, pairs, a.rounds)


def neighbour(a: argparse.Namespace, record: Record) -> None:
    """Beside a process that keeps one core busy, how does the ratio to softmax change?"""
    for regime in REGIMES:
        problem = Problem(regime, a.rows, a.sizes[2], a.folder)
        quiet = {f"{name}, quiet": problem.step(loss) for name, loss in OURS.items()}
        busy = {f"{name}, busy": problem.step(loss) for name, loss in OURS.items()}
        with busy_neighbour() as set_busy:
            pauses, resumes = {"pause": partial(set_busy, False)}, {"resume": partial(set_busy, True)}
            times = interleave(pauses | quiet | resumes | busy, a.rounds)
        slower = median(times["softmax, busy"]) / median(times["softmax, quiet"])
        record.line(problem, "softmax: busy / quiet", slower, repeats=a.rounds)
        for name in SPARSE:
            ratios = [median(times[f"{name}, {how}"]) / median(times[f"softmax, {how}"]) for how in ("quiet", "busy")]
            more = {"quiet": ratios[0], "busy": ratios[1], "repeats": a.rounds}
            record.line(problem, f"{name} / softmax: busy / quiet", ratios[1] / ratios[0], **more)


def backends(a: argparse.Namespace, record: Record) -> None:
    """What does the default back end save against plain torch, `options={"backend": "torch"}`?"""
    for regime in REGIMES:
        problem = Problem(regime, a.rows, a.sizes[2], a.folder)
        runs = {name: problem.step(loss) for name, loss in OURS.items()}
        plain: dict[str, Loss] = {
            name: partial(loss, options={"backend": "torch"})  # type: ignore[call-arg]
            for name, loss in OURS.items()
        }
        runs |= {f"{name}, plain torch": problem.step(loss) for name, loss in plain.items()}
        record.race(problem, runs, [(name, f"{name}, plain torch") for name in OURS], a.rounds)


def filter(a: argparse.Namespace, record: Record) -> None:
    """What is saved by ruling out classes by small integers before they are scored?"""
    for classes in a.sizes[2:]:
        problem = Problem("real", a.rows, classes, a.folder)
        record.facts(problem)
        runs: dict[str, Callable[[], object]] = {"one product": products(problem, 1)}
        pairs = []
        for name in ("sparsemax", "entmax-1.5"):
            all_scored: Loss = partial(OURS[name], options={"filter": False})  # type: ignore[call-arg]
            runs |= {name: problem.step(OURS[name]), f"{name}, all scored": problem.step(all_scored)}
            pairs += [(name, "one product"), (name, f"{name}, all scored")]
        record.race(problem, runs, pairs, a.rounds)


def unwanted(a: argparse.Namespace, record: Record) -> None:
    """Is work saved that nobody wants: ignored rows, gradients of frozen tensors, all gradients?"""
    problem = Problem("real", a.rows, a.sizes[2], a.folder)
    few = problem.target.clone()
    few[torch.arange(a.rows) % 4 > 0] = -100
    q, w, y = problem.queries, problem.vectors, problem.target

    def gradients(loss: Loss, x: Tensor, v: Tensor, target: Tensor) -> object:
        q.grad = w.grad = None
        return loss(x, v, target).backward()

    for name in ("softmax", "sparsemax", "entmax-1.5"):
        loss = OURS[name]
        runs: dict[str, Callable[[], object]] = {
            "a whole step": partial(gradients, loss, q, w, y),
            f"{name}, 75 % of rows ignored": partial(gradients, loss, q, w, few),
            "the other rows gathered by hand": lambda loss=loss: gradients(loss, q[few >= 0], w, few[few >= 0]),
            f"{name}, frozen class vectors": partial(gradients, loss, q, w.detach(), y),
            f"{name}, frozen queries": partial(gradients, loss, q.detach(), w, y),
            f"{name}, no gradient": lambda loss=loss: loss(q.detach(), w.detach(), y),
            "one product": products(problem, 1),
        }
        whole, ignored, by_hand, frozen_vectors, frozen_queries, no_gradient, product = runs
        pairs = [(ignored, by_hand), (frozen_vectors, whole), (frozen_queries, whole), (no_gradient, product)]
        record.race(problem, runs, pairs, a.rounds)


def epoch(a: argparse.Namespace, record: Record) -> None:
    """What does an epoch of matrix factorisation on MovieLens-1M take, in pairs, with sparsemax against softmax?"""
    named = {"data": str(Path(a.data) / "ml-1m.parquet"), "preset": "paper-table"} if a.data else {"size": a.epoch_size}
    configs = {name: RunConfig(loss=name, **named) for name in ("softmax", "sparsemax")}
    split = prepare_data(configs["softmax"]).split
    models = {name: build_model(config, split) for name, config in configs.items()}
    optimizers = {name: build_optimizer(config, models[name]) for name, config in configs.items()}
    times: dict[str, list[float]] = {name: [] for name in configs}
    for number in range(a.rounds):  # the epochs of one training; the two losses take turns
        for name, model in models.items():
            batches, start = epoch_batches(configs[name], split, model, number), time.perf_counter()
            for i in range(len(batches)):
                optimizers[name].zero_grad(set_to_none=True)
                compute_gradients(model, [batches[i]], configs[name], number * len(batches) + i, Team())
                take_step(model, optimizers[name], configs[name])
            times[name].append(time.perf_counter() - start)
    medians = {name: median(taken) for name, taken in times.items()}
    data = f"{'ML-1M' if a.data else 'planted'} {split.num_users:,} x {split.num_items:,}"
    record.line(data, "sparsemax / softmax", medians["sparsemax"] / medians["softmax"], seconds=times)


def growth(a: argparse.Namespace, record: Record) -> None:
    """How do time and memory of a step grow with C? N = 256; the figure of the page shows it."""
    names = ["softmax", "sparsemax", "entmax-1.5"]
    curves: dict[str, dict[str, list[float | None]]] = {}
    for classes in a.growth:
        problem = Problem("real", a.growth_rows, classes, a.folder)
        chosen = {name: (name, OURS[name]) for name in names} | {"torch: eager": ("eager", PLAIN["eager"])}
        groups = {"torch: linear_cross_entropy": TORCH_CHUNKS}
        groups |= {f"entmax package: {name}": PACKAGE[name] for name in names[1:]}
        for label, settings in groups.items():
            best = best_setting(problem.few_rows() if "package" in label else problem, settings)
            chosen[label] = best, settings[best]
        runs = {label: problem.step(loss) for label, (_, loss) in chosen.items()}
        pairs = [("softmax", "torch: eager"), ("softmax", "torch: linear_cross_entropy")]
        pairs += [(name, f"entmax package: {name}") for name in names[1:]]
        times = record.race(problem, runs, pairs, a.rounds, list(runs)[len(names) :])
        found = peaks(problem, [name for name, _ in chosen.values()], torch.get_num_threads())
        for label, (name, _) in chosen.items():
            curve = curves.setdefault(label, {"seconds": [], "peak_mb": []})
            curve["seconds"].append(median(times[label]))
            curve["peak_mb"].append(found[name])
    record.current.update({"classes": a.growth, "rows": a.growth_rows, "curves": curves})


QUESTIONS = {
    f.__name__: f for f in (limit, peers, memory, sampled, neighbour, backends, filter, unwanted, epoch, growth)
}


def set_sizes(a: argparse.Namespace) -> None:
    """Add the sizes of all questions to the arguments, small ones for --quick."""
    quick = a.quick
    a.rounds = 1 if quick else a.rounds
    a.rows = 64 if quick else 2048
    a.sizes = (200, 500, 1_000, 2_000) if quick else (3_307, 10_000, 41_000, 200_000)
    a.memory_sizes = a.sizes[2:3] if quick else a.sizes[1:]
    a.sampled = (500, 2_000) if quick else (100_000, 1_000_000)
    a.epoch_size = "tiny" if quick else "ml-1m"
    a.growth = [200, 1_000] if quick else [1_000, 10_000, 100_000, 1_000_000]
    a.growth_rows = 32 if quick else 256
    a.folder = Path(a.run) if a.run else default_folder(quick)


def main(a: argparse.Namespace) -> int:
    """Ask the chosen questions; the exit code is 1 if a bar was missed at full sizes."""
    set_sizes(a)
    if a.threads:
        torch.set_num_threads(a.threads)
    if not a.run:
        train_model(a.folder, a.quick)
    if a.train_model:
        return 0
    record = Record(a, BARS)
    print("  ".join(f"{k}: {v}" for k, v in record.about["environment"].items() if k != "arguments"))
    for name in a.only or QUESTIONS:
        if not a.only and record.questions.get(name, {}).get("complete"):
            print(f"{name}: kept from {record.path}")
            continue
        print(f"\n{name}: {QUESTIONS[name].__doc__}", flush=True)
        record.begin(name)
        QUESTIONS[name](a, record)
        record.end()
    lines: list[dict[str, Any]] = [
        line for found in record.questions.values() for line in found["lines"] if line["bar"]
    ]
    missed = [line for line in lines if line["verdict"] == "not reached"]
    print(f"{len(lines) - len(missed)} of {len(lines)} bars reached")
    return bool(missed)


def read_questions(text: str) -> list[str]:
    """Names of questions from a comma-separated text; an error that lists them for any other name."""
    names = text.split(",")
    for name in names:
        if name not in QUESTIONS:
            raise argparse.ArgumentTypeError(f"no question {name!r}; there are {', '.join(QUESTIONS)}")
    return names


if __name__ == "__main__":
    made = parser(__doc__ or "", rounds=9)
    made.add_argument("--only", type=read_questions, help=f"questions, comma-separated: {', '.join(QUESTIONS)}")
    made.add_argument("--run", metavar="FOLDER", help="run whose model the real regime takes (default: a planted one)")
    made.add_argument("--train-model", action="store_true", help="train the model of the real regime, measure nothing")
    made.add_argument("--data", metavar="FOLDER", help="folder with ml-1m.parquet (default: planted data of its shape)")
    made.add_argument("--page", metavar="PAGE", help="write the figures of --json FILE into PAGE, measure nothing")
    made.add_argument("--peaks", help=argparse.SUPPRESS)
    read = made.parse_args()
    if read.page and not (read.json and Path(read.json).exists()):
        made.error("--page needs --json FILE, a file of figures that exists")
    if read.rounds < 9 and not read.quick:
        made.error("--rounds: a median of fewer than 9 runs is not worth keeping")
    if read.peaks:
        print_peaks(read.peaks)
    elif read.page:
        write_page(Path(read.page), Path(read.json))
    else:
        sys.exit(main(read))

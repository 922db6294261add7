"""Large output layers outside of recommendation: a language model, contrastive learning, and what keywords cost.

    python benchmarks/output_layers.py              vocabulary 50,257, d = 128, N = 1024; 8,192 pairs
    python benchmarks/output_layers.py --quick      small sizes

Each function below is a question and makes one table. A step is the loss with its gradients for queries and class
vectors. A figure is a ratio of medians of interleaved runs in one process, or of peaks of memory above the inputs. A
process of its own measures these, whose allocator gives memory back at once: other peaks are the allocator's.
`BARS` are the goals that were set beforehand.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from head_losses import TORCH_CHUNKS, fastest
from head_record import RETURNS_MEMORY
from measure import environment, interleave, median, parser, peak_mb, write
from torch import Tensor

import manymax

Step = Callable[[], object]
# Figures that must not be larger, by question.
BARS = {
    "language_model": {"softmax / cross_entropy": 0.49, "memory: softmax / cross_entropy": 0.11},
    "contrastive": {"in_batch_loss / by hand": 0.5, "memory: in_batch_loss / by hand": 1 / 30},
    "keywords": {"stats": 1.05, "temperature": 1.15, "normalize": 1.15, "softcap": 1.15},
}


class Vocabulary:
    """Queries of N tokens, word vectors and labels that follow Zipf's law."""

    def __init__(self, a: argparse.Namespace) -> None:
        random = torch.Generator().manual_seed(0)
        self.input = torch.randn(a.tokens, a.dim, generator=random).requires_grad_()
        self.vectors = (0.1 * torch.randn(a.words, a.dim, generator=random)).requires_grad_()
        self.labels = torch.multinomial(1 / torch.arange(1.0, a.words + 1), a.tokens, True, generator=random)

    def step(self, loss: Callable[..., Any], **keywords: Any) -> Step:
        """A step with a loss of queries, word vectors and labels."""

        def run() -> None:
            self.input.grad = self.vectors.grad = None
            found = loss(self.input, self.vectors, self.labels, **keywords)
            (found.loss if isinstance(found, manymax.LossResult) else found).backward()

        return run


def cross_entropy(input: Tensor, vectors: Tensor, labels: Tensor) -> Tensor:
    """What most people write."""
    return F.cross_entropy(input @ vectors.T, labels)


def language_model(a: argparse.Namespace) -> dict[str, float]:
    """What does the output layer of a language model cost, against torch's cross entropy and linear_cross_entropy?"""
    problem = Vocabulary(a)
    chunk = fastest({name: problem.step(loss) for name, loss in TORCH_CHUNKS.items()})
    heads = {"softmax": manymax.linear_softmax_loss, "entmax-1.5": manymax.linear_entmax_loss}
    peers = {"cross_entropy": cross_entropy, "linear_cross_entropy": TORCH_CHUNKS[chunk]}
    return compared({name: problem.step(loss) for name, loss in {**heads, **peers}.items()}, list(peers), a)


def contrastive(a: argparse.Namespace) -> dict[str, float]:
    """What does CLIP's loss cost, with the other documents of a batch as negatives, against code by hand?"""
    random = torch.Generator().manual_seed(0)
    towers = [torch.randn(a.pairs, a.dim, generator=random).requires_grad_() for _ in range(2)]
    labels = torch.arange(a.pairs)

    def by_hand(queries: Tensor, documents: Tensor) -> Tensor:
        scores = F.normalize(queries, dim=1) @ F.normalize(documents, dim=1).T / 0.07
        return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2

    def run(loss: Callable[..., Any]) -> None:
        for tower in towers:
            tower.grad = None
        loss(*towers).backward()

    ours = partial(manymax.in_batch_loss, temperature=0.07, normalize=True, symmetric=True)
    return compared({"in_batch_loss": partial(run, ours), "by hand": partial(run, by_hand)}, ["by hand"], a)


def keywords(a: argparse.Namespace) -> dict[str, float]:
    """What does a keyword add to a step of the softmax and of the entmax head over a vocabulary?"""
    problem, figures = Vocabulary(a), {}
    # Of equal norms, so that `normalize` with this temperature gives the scores of the step without it: how sparse the
    # probabilities are decides how long entmax takes, and would be compared otherwise.
    norms = [tensor.detach().norm(dim=1).mean() for tensor in (problem.input, problem.vectors)]
    with torch.no_grad():
        for tensor, norm in zip((problem.input, problem.vectors), norms, strict=True):
            tensor.copy_(norm * F.normalize(tensor, dim=1))
    given: dict[str, dict[str, Any]] = {
        "": {},
        "stats": {"stats": ("nll", "log_z", "entropy", "argmax", "correct", "target_prob")},
        "temperature": {"temperature": torch.tensor(1.3, requires_grad=True)},
        "normalize": {"normalize": True, "temperature": 1 / float(norms[0] * norms[1])},
        "softcap": {"softcap": 30.0},
    }
    for head in (manymax.linear_softmax_loss, manymax.linear_entmax_loss):
        if head is manymax.linear_entmax_loss:
            given["stats"] = {"stats": ("nll", "entropy", "argmax", "correct", "target_prob", "support")}
        times = interleave({name: problem.step(head, **more) for name, more in given.items()}, a.rounds)
        suffix = "" if head is manymax.linear_softmax_loss else ", entmax-1.5"
        figures |= {f"{name}{suffix}": median(times[name]) / median(times[""]) for name in given if name}
    return figures


def compared(steps: dict[str, Step], peers: list[str], a: argparse.Namespace) -> dict[str, float]:
    """Ratios of times and of peaks of memory, ours to those of the peers."""
    if a.peaks:
        for run in steps.values():
            run()  # what libraries load and threads keep is no part of a step
        return {name: peak_mb(run) or 0.0 for name, run in steps.items()}
    times, peaks = interleave(steps, a.rounds), measured_peaks(a)
    figures: dict[str, float] = {}
    for name in steps:
        for peer in peers:
            if name in peers:
                continue
            figures[f"{name} / {peer}"] = median(times[name]) / median(times[peer])
            if peaks.get(name) and peaks.get(peer):  # 0 where the system does not tell
                figures[f"memory: {name} / {peer}"] = peaks[name] / peaks[peer]
    return figures


def measured_peaks(a: argparse.Namespace) -> dict[str, float]:
    """The peaks of the steps of a question in MB, measured by another process."""
    command = [sys.executable, __file__, "--only", a.question, "--peaks", *(["--quick"] if a.quick else [])]
    done = subprocess.run(command, env={**os.environ, **RETURNS_MEMORY}, stdout=subprocess.PIPE, text=True, check=True)
    return {str(name): float(peak) for name, peak in json.loads(done.stdout).items()}


QUESTIONS = {question.__name__: question for question in (language_model, contrastive, keywords)}


def main() -> int:
    """Ask the questions, print their figures and write them down."""
    made = parser(__doc__ or "", rounds=9)
    made.add_argument("--only", help=f"questions, comma-separated: {', '.join(QUESTIONS)}")
    made.add_argument("--peaks", action="store_true", help="print the peaks of memory of a question alone, as JSON")
    a = made.parse_args()
    a.words, a.dim, a.tokens, a.pairs = (2_000, 16, 64, 256) if a.quick else (50_257, 128, 1024, 8_192)
    if a.threads:
        torch.set_num_threads(a.threads)
    if a.peaks:
        print(json.dumps(QUESTIONS[a.only](a)))
        return 0
    record: dict[str, Any] = {"environment": environment(a), "questions": {}}
    missed = 0
    for name, question in QUESTIONS.items():
        if a.only and name not in a.only.split(","):
            continue
        a.question = name
        print(f"\n{name}: {question.__doc__}", flush=True)
        lines = []
        for figure, ratio in question(a).items():
            bar = None if a.quick else BARS[name].get(figure)
            missed += bar is not None and ratio > bar
            lines.append({"figure": figure, "ratio": ratio, "bar": bar})
            goal = "" if bar is None else f"  bar {bar:.3g}  {'reached' if ratio <= bar else 'not reached'}"
            print(f"  {figure:44} {ratio:8.3f}{goal}", flush=True)
        record["questions"][name] = lines
        if a.json:
            write(a.json, record)
    if not a.quick:
        print(f"\n{missed} bars missed")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Checks of the claims on cost: the array elements that a step reads or writes are counted, not timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from manymax.errors import ManymaxError
from manymax.members import FAMILY
from manymax.members.hierarchical_softmax.facts import mean_code_length
from manymax.members.nce.loss import nce_loss
from manymax.members.rg.loss import class_moments, rg_log_partition, rg_log_partition_from_moments
from manymax.members.sampled_softmax.loss import sampled_softmax_loss
from manymax.ops import simplex
from manymax.ops.alias import alias_table, draw_from_alias_table
from manymax.ops.tree import HuffmanTree
from manymax.paper.evidence.check_result import CheckResult, normal

# torch has no public way to see every operation of a computation. A version without this private one still imports.
try:
    from torch.utils._python_dispatch import TorchDispatchMode
except ImportError:
    TorchDispatchMode = object  # type: ignore[assignment, misc]


class _TouchedElements(TorchDispatchMode):
    """Counts the array elements that operations touch: those of the largest argument or result.

    A sort of n elements counts n log2 n. A gather counts its result alone, not the table that it reads from. Views
    count nothing.
    """

    SORTS, GATHERS = ("sort", "argsort", "msort"), ("index", "index_select", "gather", "embedding")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        counted = result if name in self.GATHERS else (args, kwargs, result)
        sizes = [tensor.numel() for tensor in _tensors(counted)]
        if sizes and not func.is_view:
            self.count += max(sizes) * (math.log2(max(sizes)) if name in self.SORTS else 1)
        return result


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)


def _count(run: Callable[[], object]) -> float:
    """The number of elements that `run` touches."""
    if not hasattr(_TouchedElements, "__enter__"):
        raise ManymaxError(
            "this version of torch does not let operations be counted: claims on costs cannot be checked"
        )
    with _TouchedElements() as mode:
        run()
    return mode.count


def _scores(batch: int, num_classes: int) -> Tensor:
    """(batch, num_classes) scores: even rows are peaked, odd rows are flat, so that supports are small and large."""
    spread = torch.tensor([30.0, 1e-3]).repeat(batch // 2)[:, None]
    return (spread * normal(batch, num_classes)).float()


def _exact_step(name: str, batch: int, num_classes: int) -> float:
    """The number of elements that loss and gradient of an exact member touch.

    The operators of sparsemax and entmax hide what they do, so that their threshold search and map are called directly.
    """
    member, scores = FAMILY[name], _scores(batch, num_classes)
    if name in ("sparsemax", "entmax"):
        alpha = torch.tensor(2.0 if name == "sparsemax" else 1.5, dtype=torch.float64)

        def search() -> Tensor:
            maximum, log_top, _ = simplex.solve(scores, alpha)
            return simplex.apply(scores, alpha, maximum, log_top, torch.ones_like(maximum))

        return _count(search)
    leaf = scores.requires_grad_()
    return _count(lambda: torch.autograd.grad(member.loss(leaf, torch.arange(batch) % 7), leaf))


@cache
def linear_cost(name: str) -> CheckResult:
    """The touched elements grow like N C, and not like N C log C."""
    base = _exact_step(name, 8, 2**11)
    grown = [_exact_step(name, n, c) / base for n, c in ((8, 2**15), (32, 2**11))]
    return CheckResult(
        abs(grown[0] / 16 - 1) < 0.15 and abs(grown[1] / 4 - 1) < 0.15,
        f"16 times the classes touch {grown[0]:.3g} times the numbers (N C log C: {16 * 15 / 11:.3g}),"
        f" 4 times the batch {grown[1]:.3g}",
    )


@cache
def sampled_cost(name: str) -> CheckResult:
    """The touched elements grow like N k and do not depend on the number of classes, drawing included."""
    loss = sampled_softmax_loss if name == "sampled_softmax" else nce_loss

    def step(batch: int, num_classes: int, k: int) -> float:
        keep, alias = alias_table(torch.ones(num_classes, dtype=torch.float64))
        generator = torch.Generator().manual_seed(0)
        table = torch.zeros(num_classes)

        def run() -> None:
            ids = draw_from_alias_table(keep, alias, (batch, k), generator=generator)
            leaf = table[ids].requires_grad_()
            torch.autograd.grad(loss(torch.zeros(batch), leaf, log_q_positive=-9.0, log_q_negative=-9.0), leaf)

        return _count(run)

    base = step(8, 1000, 100)
    more, classes = step(8, 1000, 1600) / base, step(8, 64_000, 100) / base
    return CheckResult(
        abs(more / 16 - 1) < 0.15 and classes == 1,
        f"16 times the negatives touch {more:.3g} times the numbers, 64 times the classes {classes:.3g}",
    )


@cache
def tree_cost() -> CheckResult:
    """A label touches the nodes of its path only; the mean path is within 1 bit of the entropy of the counts."""
    counts = 1 / torch.arange(1, 1025, dtype=torch.float64)
    tree, probs = HuffmanTree(counts), counts / counts.sum()
    entropy = float(-(probs * probs.log2()).sum())
    nodes = torch.zeros(tree.num_nodes, 2, dtype=torch.float64, requires_grad=True)
    labels = [0, 5, 100, 1023]
    x = torch.ones(2, dtype=torch.float64)
    loss = FAMILY["hierarchical_softmax"].loss
    gradients = [torch.autograd.grad(loss(x, nodes, torch.tensor(label), tree), nodes)[0] for label in labels]
    touched = [int(gradient.any(-1).sum()) for gradient in gradients]
    mean = mean_code_length(1024, counts)
    return CheckResult(
        touched == tree.lengths[labels].tolist() and entropy <= mean < entropy + 1 and mean_code_length(1024) == 10,
        f"C = 1024: paths of 10 for equal counts; {mean:.2f} for Zipf's law, entropy {entropy:.2f} bits",
    )


@cache
def tree_depth() -> CheckResult:
    """A Huffman tree can be C - 1 deep."""
    tree = HuffmanTree([2**i for i in range(20)])
    return CheckResult(tree.depth == 19, f"counts 1, 2, 4, ... of 20 classes: depth {tree.depth}, ceil(log2 C) = 5")


@cache
def rg_needs_no_table() -> CheckResult:
    """RG's log partition can be computed from the mean and covariance of the class vectors, without all scores."""
    queries, items = normal(5, 3), normal(50, 3, seed=1)
    value = rg_log_partition_from_moments(queries, class_moments(items))
    error = float((value - rg_log_partition(queries @ items.T)).abs().max())
    return CheckResult(error < 1e-12, f"largest difference to all scores {error:.0e}")

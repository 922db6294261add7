"""Negatives that all rows share, block by block: the same losses and gradients as from the whole table of scores."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import manymax
from manymax.engine import drawn_blocks, native_library
from manymax.engine.ranks import ALONE
from manymax.engine.sampled_scores import SampledScores
from manymax.members import FAMILY
from manymax.ops.matches import Matches
from manymax.samplers import Sampler
from tests.heads.plain import needs_library

CLASSES, ROWS, DIM = 50, 150, 6
BACKENDS = ["torch", *(pytest.param(f"native-{level}", marks=needs_library) for level in native_library.levels_here())]
CASES: list[tuple[str, dict[str, Any]]] = [
    ("sampled_softmax", {}),
    ("sampled_softmax", {"hit_policy": "mask"}),
    ("sampled_softmax", {"correction": "none"}),
    ("sampled_softmax", {"correction": "partition"}),
    ("sampled_softmax", {"correction": "partition", "debias": "jackknife"}),
    ("sampled_softmax", {"correction": "corrected_logq"}),
    ("nce", {"log_z": 0.5, "hit_policy": "mask"}),
]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 64 rows, so that there are three of them."""
    monkeypatch.setattr(drawn_blocks, "CLOSED_FORM_SCORES", 1)
    monkeypatch.setattr(drawn_blocks, "GRAPH_SCORES", 1)


def problem(dtype: torch.dtype, positives: int) -> tuple[list[Tensor], Tensor]:
    """Queries, class vectors and bias, one class of them masked, and padded ids."""
    random = torch.Generator().manual_seed(2)
    tensors = [torch.randn(*shape, generator=random) for shape in ((ROWS, DIM), (CLASSES, DIM), (CLASSES,))]
    tensors[2][7] = -torch.inf
    target = torch.randint(8, CLASSES, (ROWS, positives), generator=random)
    target[5] = -100
    return [tensor.to(dtype).requires_grad_() for tensor in tensors], target


def sampler(name: str) -> tuple[Sampler, int | None]:
    """A sampler that is not affected by earlier calls, and a number of negatives."""
    if name == "in_batch":
        return manymax.samplers.InBatchSampler(CLASSES, counts=1.0 + torch.arange(CLASSES) % 7), None
    return manymax.samplers.LogUniformSampler(CLASSES), 40


def whole_table(loss: str, setting: dict[str, Any], tensors: list[Tensor], target: Tensor, draws: str) -> Tensor:
    """Reference: the losses of the rows by autograd, from tables with a row per positive and a column per draw."""
    queries, vectors, bias = tensors
    pairs = sorted({(row, int(c)) for row, ids in enumerate(target) for c in ids if c >= 0})
    rows, classes = (torch.tensor(column) for column in zip(*pairs, strict=True))
    proposal, k = sampler(draws)
    draw = proposal(k, target=classes, owner=rows, input=queries.detach()[rows], shared=True, generator=_generator())
    scores = queries @ vectors.T + bias
    positive, negative = scores[rows, classes], scores[rows][:, draw.ids]
    log_q_positive, log_q = draw.log_q_target, draw.log_q.expand(negative.shape)
    kernel, hits = FAMILY[loss].needed("kernel")(**setting), draw.ids == classes.unsqueeze(1)
    own = torch.zeros_like(hits) if draw.source_row is None else draw.source_row == rows.unsqueeze(1)
    shift = (1 - (own | hits if kernel.misses else own).double().mean(1)).log()
    if kernel.misses:
        shift = shift - (1 - log_q_positive.exp()).log()
    log_q_positive, log_q = log_q_positive + shift, log_q + shift.unsqueeze(1)
    negative = torch.where(own | hits if kernel.masks_hits else own, -torch.inf, negative)
    losses = kernel.rows(SampledScores(positive, negative, log_q_positive, log_q, len(draw.ids), CLASSES, ALONE))
    return torch.zeros(ROWS, dtype=scores.dtype).index_add(0, rows, losses)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(4)


def head(loss: str, setting: dict[str, Any], tensors: list[Tensor], target: Tensor, draws: str, **given: Any) -> Tensor:
    function, (proposal, k) = getattr(manymax, f"linear_{loss}_loss"), sampler(draws)
    shared = {"shared": True, "generator": _generator(), **given}
    return function(*tensors[:2], target, proposal, k, linear_bias=tensors[2], **shared, **setting)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("loss", "setting"), CASES, ids=str)
def test_blocks_give_what_the_whole_table_gives(loss: str, setting: dict[str, Any], backend: str) -> None:
    upstream = torch.rand(ROWS, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    for draws, positives, reduction in itertools.product(("in_batch", "log_uniform"), (1, 3), ("none", "sum", "mean")):
        tensors, target = problem(torch.float64, positives)
        rows = whole_table(loss, setting, tensors, target, draws)
        if reduction == "none":
            expected = rows @ upstream
        else:
            count = sum(len(ids[ids >= 0].unique()) for ids in target)
            expected = rows.sum() / (count if reduction == "mean" else 1)
        want = expected.detach(), *torch.autograd.grad(expected, tensors)
        for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 2e-5)):
            ours = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]
            options = {"options": {"backend": backend}, "sparse_grad": positives == 3}
            value = head(loss, setting, ours, target, draws, reduction=reduction, **options)
            value = value @ upstream.to(dtype) if reduction == "none" else value
            got = value.detach(), *torch.autograd.grad(value, ours)
            for a, b in zip(got, want, strict=True):
                error = (a.to_dense().double() - b).abs().max() / b.abs().max()
                assert error <= tolerance, (draws, positives, reduction, dtype)


def test_a_learned_setting_gets_its_gradient_from_all_blocks() -> None:
    tensors, target = problem(torch.float64, 2)
    log_z = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    want = torch.autograd.grad(whole_table("nce", {"log_z": log_z}, tensors, target, "in_batch").sum(), log_z)
    for reduction in ("sum", "none"):
        value = head("nce", {"log_z": log_z}, tensors, target, "in_batch", reduction=reduction).sum()
        torch.testing.assert_close(torch.autograd.grad(value, log_z), want)


def test_a_second_backward_has_the_same_gradients() -> None:
    tensors, target = problem(torch.float64, 1)
    value = head("sampled_softmax", {}, tensors, target, "in_batch")
    first = torch.autograd.grad(value, tensors, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(3 * value, tensors), tuple(3 * grad for grad in first))


@pytest.mark.parametrize("backend", ["torch", pytest.param("native", marks=needs_library)])
@pytest.mark.parametrize("loss", ["sampled_softmax", "nce"])
def test_scores_that_are_no_numbers_are_refused(loss: str, backend: str) -> None:
    for place, value, message in (
        (0, math.nan, "`positive` must hold finite scores"),
        (1, math.inf, "`negative` must"),
    ):
        tensors, target = problem(torch.float32, 1)
        with torch.no_grad():
            if place == 0:
                tensors[0][100, 0] = value
            else:
                tensors[2][:7] = value  # classes that are drawn, and no positives
        with pytest.raises(manymax.ArgumentError, match=message):
            head(loss, {}, tensors, target, "log_uniform", options={"backend": backend})


class NothingLarge(TorchDispatchMode):
    """Refuses tensors of so many numbers."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for value in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(value, Tensor) and not value.is_sparse and value.numel() >= self.size:
                raise AssertionError(f"{func} made a tensor of shape {tuple(value.shape)}")
        return found


@pytest.mark.parametrize(("loss", "setting"), CASES, ids=str)
def test_no_table_of_all_rows_is_made(loss: str, setting: dict[str, Any]) -> None:
    """Neither of scores nor of masks: a block has 64 rows of the 150, with 150 columns."""
    for reduction in ("mean", "none"):
        tensors, target = problem(torch.float32, 1)
        with NothingLarge(ROWS * ROWS // 2):
            head(loss, setting, tensors, target, "in_batch", reduction=reduction).sum().backward()


def test_matches_are_those_of_a_table() -> None:
    random = torch.Generator().manual_seed(0)
    for size in (0, 30):
        values, wanted = torch.randint(9, (size,), generator=random), torch.randint(12, (20,), generator=random)
        table = values == wanted.unsqueeze(1)
        found = torch.zeros_like(table)
        found[Matches(values).of(wanted)] = True
        assert found.equal(table)
        assert Matches(values).count(wanted).equal(table.sum(1))

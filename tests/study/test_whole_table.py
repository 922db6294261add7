"""The computations with whole tables of scores and sorting give the losses and gradients of the heads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.autograd import gradcheck

import manymax
from manymax.errors import ArgumentError
from manymax.members import FAMILY
from manymax.paper.whole_table import TABLE_LOSSES, WholeTable
from manymax.study.config import RunConfig
from manymax.study.data.interactions import Lists, Split
from manymax.study.run_head import build_head

N, C, D = 6, 11, 4


def lists() -> Lists:
    return Lists.from_pairs(torch.arange(N), torch.arange(N), N)


@pytest.mark.parametrize("scale", [0.05, 1.0, 6.0])
@pytest.mark.parametrize("loss", TABLE_LOSSES)
def test_the_same_loss_and_gradients_as_the_heads(loss: str, scale: float) -> None:
    random = torch.Generator().manual_seed(0)
    input = torch.randn(N, D, dtype=torch.float64, generator=random, requires_grad=True)
    vectors = (scale * torch.randn(C, D, dtype=torch.float64, generator=random)).requires_grad_()
    rows, classes = torch.arange(N).repeat(3), torch.randint(C, (3 * N,), generator=random)
    users, target = manymax.group_pairs(rows, classes)
    split = Split(lists(), lists(), lists(), num_items=C)
    values, gradients = [], []
    for computation in ("blocks", "table"):
        head = build_head(RunConfig(loss=loss, computation=computation), split)
        values.append(head(input[users], target, vectors))
        gradients.append(torch.autograd.grad(values[-1], (input, vectors)))
    assert isinstance(head, WholeTable)
    torch.testing.assert_close(values[1], values[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("loss", TABLE_LOSSES)
def test_detached_vectors_learn_as_positives_alone(loss: str) -> None:
    random = torch.Generator().manual_seed(1)
    input = torch.randn(N, D, dtype=torch.float64, generator=random, requires_grad=True)
    vectors = torch.randn(C, D, dtype=torch.float64, generator=random, requires_grad=True)
    target = torch.arange(N)  # the classes from N on are negatives of all rows
    split = Split(lists(), lists(), lists(), num_items=C)
    heads = [build_head(RunConfig(loss=loss, computation=way), split) for way in ("blocks", "detached")]
    values = [head(input, target, vectors) for head in heads]
    whole, cut = (torch.autograd.grad(value, (input, vectors)) for value in values)
    torch.testing.assert_close(values[1], values[0])
    torch.testing.assert_close(cut[0], whole[0])  # queries have the usual gradient
    scores = (input @ vectors.T).detach().requires_grad_()
    (of_scores,) = torch.autograd.grad(FAMILY[loss].loss(scores, target), scores)
    expected = torch.zeros_like(vectors)
    expected[:N] = of_scores.diagonal().unsqueeze(1) * input.detach()
    torch.testing.assert_close(cut[1], expected)
    assert not torch.allclose(whole[1], expected)


@pytest.mark.parametrize("loss", TABLE_LOSSES)
def test_detached_of_several_positives(loss: str) -> None:
    random = torch.Generator().manual_seed(0)
    input = torch.randn(N, D, dtype=torch.float64, generator=random, requires_grad=True)
    vectors = torch.randn(C, D, dtype=torch.float64, generator=random)
    rows, classes = torch.arange(N).repeat(3), torch.randint(C, (3 * N,), generator=random)
    users, target = manymax.group_pairs(rows, classes)
    split = Split(lists(), lists(), lists(), num_items=C)
    heads = [build_head(RunConfig(loss=loss, computation=way), split) for way in ("blocks", "detached")]
    values = [head(input[users], target, vectors) for head in heads]
    torch.testing.assert_close(values[1], values[0])
    torch.testing.assert_close(*(torch.autograd.grad(value, input) for value in values))


@pytest.mark.parametrize("loss", TABLE_LOSSES)
def test_gradients(loss: str) -> None:
    scores = torch.randn(3, C, dtype=torch.float64, generator=torch.Generator().manual_seed(3), requires_grad=True)
    assert gradcheck(lambda s: TABLE_LOSSES[loss](s, torch.tensor([0, 4, 10])), scores)


def test_only_the_default_computation_leaves_the_hash_alone() -> None:
    usual, table = RunConfig(loss="sparsemax"), RunConfig(loss="sparsemax", computation="table")
    assert usual.content_hash() != table.content_hash()
    assert usual.content_hash() == "98f7f10767471fc0"


def test_losses_and_settings_that_a_computation_cannot_do_are_refused() -> None:
    with pytest.raises(ArgumentError, match="`computation` has no effect with loss 'nce'"):
        RunConfig(loss="nce", computation="table")
    with pytest.raises(ArgumentError, match="works with alpha 1"):
        RunConfig(loss="entmax", alpha=1.3, computation="table")
    with pytest.raises(ArgumentError, match=r"is for softmax, sparsemax, .*; got 'taylor_softmax'"):
        RunConfig(loss="taylor_softmax", computation="compiled")


@pytest.mark.slow
def test_a_new_process_finds_them_by_name() -> None:
    """A worker reads the settings of its run, and nothing of the paper is imported before a run asks for it."""
    script = (
        "import sys; from manymax.study.config import RunConfig; RunConfig(loss='sparsemax', computation='compiled'); "
        "assert 'manymax.paper' not in sys.modules; "
        "print(RunConfig(loss='sparsemax', computation='detached').content_hash())"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(manymax.__file__).parents[1])}
    told = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == RunConfig(loss="sparsemax", computation="detached").content_hash()

"""Samplers of one's own in a head: those that keep something about each row of the batch, and old ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from manymax.errors import ArgumentError
from manymax.heads import linear_bpr_loss
from manymax.samplers import Draw, Sampler, UniformSampler
from manymax.samplers.base import Request

C, D = 20, 3
TARGETS = {
    "ids": torch.tensor([4, -100, 7, -100, 0, 9]),
    "padded ids": torch.tensor([[4, 2], [-100, -100], [7, -100], [-100, 3], [-100, -100], [1, 0]]),
    "two dimensions": torch.tensor([[-100, 5, 6], [-100, -100, 8]]),
}


class RowNegatives(Sampler):
    """The negatives of each row of the batch are listed beforehand, (rows of the batch, k)."""

    note = "log q is unknown"

    def __init__(self, listed: Tensor) -> None:
        super().__init__(C)
        self.listed = listed

    def draw(self, request: Request) -> Draw:
        assert request.batch_rows is not None
        return Draw(self.listed[request.batch_rows], None, None, self.note)

    def log_prob_of(self, ids: Tensor, input: Tensor | None, shared: bool) -> Tensor:
        raise NotImplementedError


class OldSampler(UniformSampler):
    """A sampler whose `forward` does not know `batch_rows`."""

    def forward(self, num_negatives: int | None, *, target: Tensor, input: Tensor, **more: Any) -> Draw:  # type: ignore[override]
        assert "batch_rows" not in more
        return super().forward(num_negatives, target=target, input=input, **more)


@pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
def test_what_is_kept_about_each_row_meets_its_row(target: Tensor, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    batch = target.shape if target.shape == (2, 3) else target.shape[:1]
    queries = torch.randn(*batch, D, dtype=torch.float64, generator=random)
    vectors = torch.randn(C, D, dtype=torch.float64, generator=random)
    listed = torch.randint(10, C, (batch.numel(), 4), generator=random)
    loss = linear_bpr_loss(queries, vectors, target, RowNegatives(listed), 4, reduction="none")
    scores, rows = (queries @ vectors.T).reshape(-1, C), target.reshape(batch.numel(), -1).tolist()
    expected = [
        sum(float(softplus(scores[row, listed[row]] - scores[row, y]).mean()) for y in ids if y >= 0)
        for row, ids in enumerate(rows)
    ]
    torch.testing.assert_close(loss.reshape(-1), torch.tensor(expected, dtype=torch.float64))


def test_a_sampler_that_does_not_know_the_rows_still_draws() -> None:
    assert not OldSampler.takes_batch_rows
    torch.manual_seed(0)
    given = torch.randn(6, D), torch.randn(C, D), TARGETS["ids"]
    losses = [
        linear_bpr_loss(*given, sampler(C), 4, generator=torch.Generator().manual_seed(1))
        for sampler in (UniformSampler, OldSampler)
    ]
    assert torch.equal(*losses)


def test_rows_that_do_not_fit() -> None:
    with pytest.raises(ArgumentError, match="`batch_rows` must be an int64 id for each row"):
        UniformSampler(C)(2, target=torch.tensor([1, 2]), batch_rows=torch.tensor([0]))

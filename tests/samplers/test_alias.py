"""The alias table and the other operations that samplers draw with."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from manymax.errors import ArgumentError
from manymax.ops.alias import alias_table, draw_from_alias_table
from manymax.ops.categorical import draw_categorical
from manymax.ops.lookup import lookup
from manymax.ops.row_blocks import row_blocks

# Few distinct values make ties, zeros and heights of exactly 1; the floats make everything else.
WEIGHTS = st.one_of(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.lists(st.floats(0, 1e12, allow_subnormal=False), min_size=1, max_size=40),
).filter(lambda weights: sum(weights) > 0)


def distribution_of_table(keep: Tensor, alias: Tensor) -> Tensor:
    """The distribution that a table draws from, by going through its columns."""
    probs = torch.zeros_like(keep)
    for column, (share, other) in enumerate(zip(keep.tolist(), alias.tolist(), strict=True)):
        probs[column] += share / len(keep)
        probs[other] += (1 - share) / len(keep)
    return probs


@given(weights=WEIGHTS)
@settings(max_examples=300, deadline=None)
def test_the_table_draws_from_the_distribution(weights: list[float]) -> None:
    probs = torch.tensor(weights, dtype=torch.float64)
    probs /= probs.sum()
    keep, alias = alias_table(probs)
    assert ((keep >= 0) & (keep <= 1)).all()
    assert torch.allclose(distribution_of_table(keep, alias), probs, rtol=0, atol=1e-14)
    # What cannot be drawn has no column and fills none.
    impossible = probs == 0
    assert (keep[impossible] == 0).all()
    assert not impossible[alias[keep < 1]].any()


@pytest.mark.parametrize("num_classes", [1, 2, 3, 49, 1000])
def test_equal_weights_keep_their_columns(num_classes: int) -> None:
    probs = torch.full((num_classes,), 1 / num_classes, dtype=torch.float64)  # 49 / 49 rounds to just under 1
    keep, alias = alias_table(probs)
    assert torch.allclose(distribution_of_table(keep, alias), probs, rtol=1e-12)


def test_relative_error_with_many_classes() -> None:
    random = torch.Generator().manual_seed(0)
    weights = 1 / torch.arange(1, 300_001, dtype=torch.float64)
    probs = weights[torch.randperm(len(weights), generator=random)] / weights.sum()
    keep, alias = alias_table(probs)
    drawn = keep.index_add(0, alias, 1 - keep) / len(keep)
    # Running sums up to C, with C roundings that add up like a random walk; only heavy classes feel them.
    rounding = torch.finfo(torch.float64).eps * len(probs) * len(probs) ** 0.5
    assert ((drawn - probs) / probs).abs().max() < rounding < 1e-7
    light = probs * len(probs) < 1
    assert torch.equal(drawn[light], (probs * len(probs) / len(probs))[light])


def test_a_class_far_below_the_average_is_not_drawn_too_often() -> None:
    # A float32 uniform is 0 once in 2^24: with that, such a class would come 60,000 times too often.
    keep = torch.tensor([1e-12] * 7 + [1.0], dtype=torch.float64)
    alias, generator = torch.full((8,), 7), torch.Generator().manual_seed(0)
    assert all((draw_from_alias_table(keep, alias, (3_000_000,), generator) == 7).all() for _ in range(12))


def test_categorical_draws() -> None:
    log_weights = torch.tensor([[0.0, 1.0, -torch.inf, 2.0], [5.0, -200.0, 5.0, 4.0]])
    positions = draw_categorical(log_weights, 100_000, torch.Generator().manual_seed(3))
    for row, probs in zip(positions, log_weights.double().softmax(-1), strict=True):
        drawn, likely = row.bincount(minlength=4), probs > 1e-12
        assert (drawn[~likely] == 0).all()
        assert stats.chisquare(drawn[likely].numpy(), probs[likely].numpy() * 100_000).pvalue > 6.3e-5


def test_a_height_of_zero_steps_over_positions_without_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.zeros(shape, dtype=torch.float64))
    assert draw_categorical(torch.tensor([[-torch.inf, -torch.inf, 0.0, 1.0]]), 2).tolist() == [[2, 2]]


@pytest.mark.parametrize("bad", [[float("nan"), 0.0], [float("inf"), 0.0], [-float("inf"), -float("inf")]])
def test_categorical_refuses_rows_without_a_distribution(bad: list[float]) -> None:
    with pytest.raises(ArgumentError, match="log_weights"):
        draw_categorical(torch.tensor([[0.0, 1.0], bad]), 2)


def test_lookup_equals_indexing() -> None:
    table, ids = torch.randn(7, 3), torch.randint(7, (2, 5))
    assert torch.equal(lookup(table, ids), table[ids])
    assert torch.equal(lookup(table[:, 0].contiguous(), ids), table[:, 0][ids])


@given(num_rows=st.integers(0, 50), row_size=st.integers(0, 40), budget=st.integers(0, 200))
def test_row_blocks_cover_all_rows_within_the_budget(num_rows: int, row_size: int, budget: int) -> None:
    blocks = list(row_blocks(num_rows, row_size, budget))
    assert [row for block in blocks for row in range(num_rows)[block]] == list(range(num_rows))
    assert all(block.stop - block.start == 1 or (block.stop - block.start) * row_size <= budget for block in blocks)

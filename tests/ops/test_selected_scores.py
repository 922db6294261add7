"""Scores of selected classes and their gradients: the same from a table, in place and from gathered vectors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from manymax.engine.selected_scores import SelectedScores
from manymax.errors import ArgumentError
from manymax.ops import selected_scores as module
from manymax.ops.selected_scores import GATHERED_FLOATS, TABLE_FLOATS, entry_scores, selected_scores, table_is_cheaper


@pytest.fixture(params=["table", "in place", "gathered", "gathered in blocks"])
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "table":
        monkeypatch.setattr(module, "TABLE_FLOATS", 0)
    if request.param.startswith("gathered"):  # as on a GPU
        monkeypatch.setattr(module, "_can_read_in_place", lambda *_: False)
    if request.param == "gathered in blocks":
        monkeypatch.setattr(module, "GATHERED_FLOATS", 3 * 4 * 5)  # two rows of ids at a time
    return request.param


def problem(num_queries: int = 4, num_rows: int = 7) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    input = torch.randn(num_queries, 5, dtype=torch.float64, generator=random)
    weight = torch.randn(9, 5, dtype=torch.float64, generator=random)
    rows = torch.randint(num_queries, (num_rows,), generator=random)
    ids = torch.randint(9, (num_rows, 6), generator=random)
    ids[:, 1] = ids[:, 0]  # a class may be selected twice
    return input, weight, rows, ids


def test_the_scores_are_those_of_the_whole_table(route: str) -> None:
    input, weight, rows, ids = problem()
    expected = (input @ weight.T)[rows].gather(1, ids)
    torch.testing.assert_close(selected_scores(input, weight, ids, rows), expected)
    torch.testing.assert_close(
        selected_scores(input, weight, ids[:4]), (input @ weight.T).gather(1, ids[:4]), msg="each its own row"
    )


def test_scores_of_a_list_of_entries(route: str) -> None:
    input, weight, *_ = problem()
    rows, ids = torch.tensor([0, 0, 0, 2, 3, 3]), torch.tensor([8, 0, 8, 4, 5, 1])  # query 1 has none
    torch.testing.assert_close(entry_scores(input, weight, rows, ids), (input @ weight.T)[rows, ids])
    assert entry_scores(input, weight, rows[:0], ids[:0]).shape == (0,)
    rows, ids = torch.arange(4).repeat_interleave(10), torch.arange(40) % 9  # more entries than classes
    torch.testing.assert_close(entry_scores(input, weight, rows, ids), (input @ weight.T)[rows, ids])


@pytest.mark.parametrize("sparse", [False, True])
def test_the_gradients_are_those_of_the_whole_table(route: str, sparse: bool) -> None:
    input, weight, rows, ids = problem()
    upstream = torch.randn(ids.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    input.requires_grad_(), weight.requires_grad_()
    expected = torch.autograd.grad((input @ weight.T)[rows].gather(1, ids), (input, weight), upstream)
    found = torch.autograd.grad(SelectedScores.apply(input, weight, rows, ids, sparse, None), (input, weight), upstream)
    assert found[1].is_sparse == sparse
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1].to_dense(), expected[1])


def test_ids_of_no_class_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TABLE_FLOATS", 0)
    input, weight, rows, ids = problem()
    for wrong in (9, -1):
        ids[2, 3] = wrong
        with pytest.raises(ArgumentError, match=f"got {wrong}"):
            selected_scores(input, weight, ids, rows)


@pytest.mark.filterwarnings("error")
def test_no_ids_give_no_scores_and_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TABLE_FLOATS", 0)
    input, weight, rows, ids = problem()
    assert selected_scores(input, weight, ids[:0], rows[:0]).shape == (0, 6)
    assert selected_scores(input, weight, ids[:, :0], rows).shape == (7, 0)
    assert selected_scores(input.T.contiguous().T, weight.T.contiguous().T, ids, rows).equal(
        selected_scores(input, weight, ids, rows)
    ), "any strides"


def test_the_route_follows_from_the_sizes() -> None:
    assert table_is_cheaper(256, 3_307, 2048 * 100)
    assert not table_is_cheaper(2048, 1_000_000, 2048 * 100)
    assert not table_is_cheaper(TABLE_FLOATS, 2, 10 * TABLE_FLOATS)
    assert GATHERED_FLOATS < TABLE_FLOATS

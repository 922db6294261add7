"""`manymax.optim.SparseAdam` against torch's: values, state dicts, refusals."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import manymax
from manymax.engine import native_library

# torch's own steps make sparse tensors without saying whether they should be checked, and torch warns of that.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

ROWS = 40
BACKENDS = ["torch", *(f"native-{level}" for level in native_library.levels_here())]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What "auto" stands for in the test."""
    monkeypatch.setenv("MANYMAX_BACKEND", request.param)
    return request.param


def gradient(step: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """Row-sparse gradients as they come: of no row, coalesced, sorted but not marked so, and with rows twice."""
    random = torch.Generator().manual_seed(step)
    ids = torch.randint(ROWS, (0 if step == 3 else 25,), generator=random)
    if step % 4 in (1, 2):
        ids = ids.unique()
    values = torch.randn(len(ids), *shape, generator=random, dtype=dtype)
    marked = step % 4 == 1 or None
    return torch.sparse_coo_tensor(ids.unsqueeze(0), values, (ROWS, *shape), is_coalesced=marked, check_invariants=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_steps_are_those_of_torch_and_states_are_exchanged(backend: str, dtype: torch.dtype) -> None:
    for shape, maximize in (((21,), False), ((3, 2), True)):
        start = torch.randn(ROWS, *shape, dtype=dtype, generator=torch.Generator().manual_seed(9))
        ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
        settings = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-6, "maximize": maximize}
        mine, reference = manymax.optim.SparseAdam([ours], **settings), torch.optim.SparseAdam([theirs], **settings)
        for step in range(9):
            ours.grad = gradient(step, dtype, *shape)
            theirs.grad = gradient(step, dtype, *shape)
            assert mine.step() is None
            reference.step()
            if step == 5:  # each goes on with what the other has collected
                states = copy.deepcopy(mine.state_dict()), copy.deepcopy(reference.state_dict())
                mine.load_state_dict(states[1]), reference.load_state_dict(states[0])
        tolerance = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-13, "atol": 1e-13}
        torch.testing.assert_close(ours, theirs, **tolerance)
        for a, b in zip(mine.state_dict()["state"][0].items(), reference.state_dict()["state"][0].items(), strict=True):
            assert a[0] == b[0]
            torch.testing.assert_close(a[1], b[1], **tolerance)


def test_what_torch_refuses_is_refused(backend: str) -> None:
    param = torch.nn.Parameter(torch.ones(ROWS, 2))
    optimizer = manymax.optim.SparseAdam([param])
    param.grad = torch.ones(ROWS, 2)
    with pytest.raises(RuntimeError, match="SparseAdam does not support dense gradients, please consider Adam instead"):
        optimizer.step()
    for wrong in (ROWS, -1):
        param.grad = torch.sparse_coo_tensor(
            torch.tensor([[wrong]]), torch.ones(1, 2), (ROWS, 2), is_coalesced=True, check_invariants=False
        )
        if backend != "torch":  # torch's own indexing counts negative ids from the end
            with pytest.raises(IndexError, match=f"outside of a table of {ROWS} rows"):
                optimizer.step()


def test_autograd_hears_of_the_change(backend: str) -> None:
    param = torch.nn.Parameter(torch.ones(ROWS, 2))
    optimizer, square = manymax.optim.SparseAdam([param]), (param**2).sum()
    param.grad = gradient(1, torch.float32, 2)
    assert optimizer.step(lambda: 1.5) == 1.5
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.backward()

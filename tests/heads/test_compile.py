"""A model with a head under torch.compile: the head is one break in the graph, and nothing is compiled twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manymax
from manymax import FAMILY
from manymax.engine.member import Member
from manymax.heads import head_class

HEADS = [member for member in FAMILY.values() if member.kind != "tree"]


class Model(nn.Module):
    """A layer before the head, and arithmetic after it."""

    def __init__(self, member: Member) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.Linear(6, 6), head_class(member)(6, 50)

    def forward(self, input: Tensor, target: Tensor) -> Any:
        return 2 * self.head(torch.relu(self.layer(input)), target)


class Functional(Model):
    """The same with the head as a function."""

    def forward(self, input: Tensor, target: Tensor) -> Any:
        queries, weight = torch.relu(self.layer(input)), self.head.linear.weight
        return 2 * manymax.linear_softmax_loss(queries, weight, target)


@pytest.mark.filterwarnings("ignore")  # torch's own, about what it traces
@pytest.mark.parametrize("model", [*(Model(member) for member in HEADS), Functional(FAMILY["softmax"])])
def test_one_break_and_no_second_compilation(model: Model) -> None:
    dynamo = pytest.importorskip("torch._dynamo")
    dynamo.reset()
    dynamo.utils.counters.clear()
    compiled = torch.compile(model, backend="eager")
    for seed in range(4):
        torch.manual_seed(seed)
        input, target = torch.randn(9, 6), torch.randint(50, (9,))
        torch.manual_seed(seed)
        loss = compiled(input, target)
        loss.backward()
        torch.manual_seed(seed)
        torch.testing.assert_close(loss, model(input, target))
    # One graph before the head and one after it, for all four steps.
    assert dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert sum(dynamo.utils.counters["graph_break"].values()) == 1
    dynamo.reset()

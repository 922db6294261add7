"""Every tree, and both ways of computing the loss."""

from __future__ import annotations

import math

import pytest

from manymax.members.hierarchical_softmax import loss as module
from manymax.ops.tree import ClassTree
from tests.losses.hierarchical_softmax.trees import TREES


@pytest.fixture(params=TREES)
def tree(request: pytest.FixtureRequest) -> ClassTree:
    return TREES[request.param]


@pytest.fixture(params=["paths", "all"])
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Force the loss to follow the paths of the positives, or to compute all classes: its value must be the same."""
    monkeypatch.setattr(module, "PATH_COST", {"paths": 0.0, "all": math.inf}[request.param])
    return request.param

"""The names of the package entmax, given by this package: a plugin for pytest, under which entmax's own tests run.

Prints JSON at the end, as torch_cases.py does.
"""

from __future__ import annotations

import collections
import json
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import manymax

OUTSIDE = "maps that this package has not: normmax and budget"
PRIVATE = "private functions of entmax: the threshold and the size of the support"
MOVED = "orders alpha outside of [1, 2] were moved into it by whole numbers"
REDUCTIONS = {"elementwise_mean": "mean"}
changed, unfit = collections.Counter[str](), collections.Counter[str]()
counts: dict[str, Any] = {"agreed": 0, "changed": changed, "left_out": unfit, "failed": []}
moved = False


def inside(alpha: Any) -> Any:
    """An order alpha, moved into [1, 2]; the same number whether it comes alone or in a tensor."""
    global moved
    if not isinstance(alpha, Tensor):
        return float(inside(torch.tensor(alpha, dtype=torch.float64)))
    within = (alpha >= 1) & (alpha <= 2)
    moved = moved or not bool(within.all())
    return torch.where(within, alpha, alpha - alpha.detach().floor() + 1)


def entmax_bisect(X: Tensor, alpha: Any = 1.5, dim: int = -1, **_: Any) -> Tensor:
    alpha = inside(alpha)
    if isinstance(alpha, Tensor) and alpha.ndim:
        alpha = alpha.movedim(dim, -1)
    return manymax.entmax(X.movedim(dim, -1), alpha).movedim(-1, dim)


def sparsemax(X: Tensor, dim: int = -1, k: Any = None, **_: Any) -> Tensor:
    return manymax.sparsemax(X, dim=dim)


def entmax15(X: Tensor, dim: int = -1, k: Any = None) -> Tensor:
    return manymax.entmax(X, 1.5, dim=dim)


def as_module(function: Callable[..., Tensor]) -> Any:
    """The class of a map, whose objects keep `dim` and `k`: how many of the largest scores entmax looks at first."""
    return lambda dim=-1, k=None: lambda X: function(X, dim=dim, k=k)


def as_loss(kind: Any, *settings: Any) -> Any:
    """The class of a loss, with the names that entmax gives to reductions."""

    def build(k: Any = None, ignore_index: Any = -100, reduction: str = "elementwise_mean") -> Any:
        return kind(*settings, ignore_index=int(ignore_index), reduction=REDUCTIONS.get(reduction, reduction))

    return build


def left_out(reason: str) -> Any:
    """In place of a name that has nothing to stand for."""

    def refused(*_: Any, **__: Any) -> Any:
        pytest.skip(reason)

    return refused


NAMES: dict[str, dict[str, Any]] = {
    "losses": {
        "SparsemaxLoss": as_loss(manymax.SparsemaxLoss),
        "SparsemaxBisectLoss": as_loss(manymax.SparsemaxLoss),
        "Entmax15Loss": as_loss(manymax.EntmaxLoss, 1.5),
        "EntmaxBisectLoss": as_loss(manymax.EntmaxLoss, 1.5),
        "NormmaxBisectLoss": left_out(OUTSIDE),
    },
    "activations": {
        "sparsemax": sparsemax,
        "entmax15": entmax15,
        "Sparsemax": as_module(sparsemax),
        "Entmax15": as_module(entmax15),
        "_sparsemax_threshold_and_support": left_out(PRIVATE),
        "_entmax_threshold_and_support": left_out(PRIVATE),
    },
    "root_finding": {
        "sparsemax_bisect": sparsemax,
        "entmax_bisect": entmax_bisect,
        "normmax_bisect": left_out(OUTSIDE),
        "budget_bisect": left_out(OUTSIDE),
    },
}


def pytest_configure() -> None:
    sys.modules["entmax"] = types.ModuleType("entmax")
    for module, names in NAMES.items():
        made = sys.modules[f"entmax.{module}"] = types.ModuleType(f"entmax.{module}")
        vars(made).update(names)
    torch.manual_seed(0)  # their data is made while the tests are collected


def pytest_runtest_setup() -> None:
    global moved
    moved = False
    torch.manual_seed(0)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped:
        _, _, reason = report.longrepr  # type: ignore[misc]
        unfit[str(reason).removeprefix("Skipped: ")] += 1
    elif report.failed:
        counts["failed"].append(f"{report.nodeid}: {report.longreprtext[-500:]}")
    elif report.when == "call":
        counts["agreed"] += 1
        changed[MOVED] += moved


def pytest_sessionfinish() -> None:
    print(f"\n{json.dumps({'entmax': counts})}")

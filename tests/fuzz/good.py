"""Good values of arguments, by the names of parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import manymax
import manymax.distributed
import manymax.theory.gradient_deviation
from manymax.engine.cost import Machine, Shape, Work
from manymax.members import FAMILY
from manymax.members.rg.loss import class_moments
from manymax.theory.label_laws import LabelLaw

ROWS, CLASSES, DIM = 3, 5, 4


def random_tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _probs(*shape: int) -> Tensor:
    return random_tensor(*shape).softmax(-1)


def _simplex(num_classes: int) -> Tensor:
    return torch.full((num_classes,), 1 / num_classes).log()


def no_options() -> dict[str, Any]:
    return {}


def small_tree() -> Any:
    return manymax.HuffmanTree(torch.tensor([3.0, 1.0, 4.0, 1.0, 5.0]))


def _machine() -> Machine:
    return Machine(*[1e-9] * len(Work.__dataclass_fields__))


def fenchel_young() -> Any:
    return manymax.FenchelYoung(manymax.sparsemax, lambda p: (p.square().sum(-1) - 1) / 2)


# Good values by the name of a parameter, of ROWS rows, CLASSES classes and vectors of DIM numbers.
GOOD: dict[str, Callable[[], Any]] = {
    # tensors of rows and classes
    "scores": lambda: random_tensor(ROWS, CLASSES),
    "target": lambda: torch.tensor([0, 2, 4]),
    "input": lambda: random_tensor(ROWS, DIM),
    "linear_weight": lambda: random_tensor(CLASSES, DIM, seed=1),
    "linear_bias": lambda: random_tensor(CLASSES, seed=2),
    "weight": lambda: torch.tensor([0.5, 1.0, 2.0, 1.0, 0.5]),
    "row_weight": lambda: torch.tensor([0.5, 1.0, 2.0]),
    "num_items": lambda: 3,
    "exclude": lambda: torch.tensor([[1], [1], [3]]),
    "negatives": lambda: torch.tensor([[1], [1], [3]]),
    "pair_ids": lambda: torch.tensor([0, 1, 2]),
    "pair_averages": lambda: torch.zeros(4),
    "bound": lambda: torch.zeros(ROWS),
    "rows": lambda: torch.tensor([0, 1, 1]),
    "queries": lambda: random_tensor(ROWS, DIM),
    "documents": lambda: random_tensor(ROWS, DIM, seed=1),
    "hard": lambda: random_tensor(2, DIM, seed=2),
    "groups": lambda: torch.tensor([0, 1, 1]),
    "ids": lambda: torch.tensor([0, 2, 4]),
    "probs": lambda: _probs(ROWS, CLASSES),
    "ranking": lambda: torch.tensor([[0, 1, 2], [2, 1, 0], [1, 3, 4]]),
    "propensity": lambda: torch.full((CLASSES,), 0.5),
    "counts": lambda: torch.tensor([3.0, 1.0, 4.0, 1.0, 5.0]),
    "target_prob": lambda: torch.tensor([0.5, 0.2, 0.9]),
    "square_sum": lambda: torch.tensor([0.5, 0.3, 0.8]),
    "log_q": lambda: _simplex(CLASSES),
    "owner": lambda: torch.tensor([0, 1, 2]),
    "batch_rows": lambda: torch.tensor([0, 1, 2]),
    # of drawn negatives
    "positive": lambda: random_tensor(ROWS),
    "negative": lambda: random_tensor(ROWS, CLASSES),
    "hits": lambda: torch.zeros(ROWS, CLASSES, dtype=torch.bool),
    "log_q_positive": lambda: torch.full((ROWS,), -1.6),
    "log_q_negative": lambda: torch.full((ROWS, CLASSES), -1.6),
    # of trees
    "tree": small_tree,
    "node_vectors": lambda: random_tensor(small_tree().num_nodes, DIM, seed=1),
    "node_bias": lambda: random_tensor(small_tree().num_nodes, seed=2),
    "leads_to": lambda: torch.tensor([-1, -2, 0, -3]),
    "first_edge": lambda: torch.tensor([0, 2, 4]),
    "edge_values": lambda: random_tensor(ROWS, small_tree().num_edges),
    "arity": lambda: 2,
    "paths": lambda: [[0], [1, 0], [1, 1]],
    # of measurements
    "relevant": lambda: torch.tensor([[1, 0, 1, 0, 0], [0, 1, 0, 0, 0], [0, 0, 0, 1, 1]]).bool(),
    "values": lambda: random_tensor(ROWS, CLASSES),
    "fill": lambda: torch.tensor([True, False, True, False, True]).expand(ROWS, CLASSES).clone(),
    "jacobian": lambda: torch.eye(CLASSES),
    "upper": lambda: torch.tensor([1.0, 0.0]),
    "lower": lambda: torch.tensor([0.5, 0.5]),
    "features": lambda: random_tensor(ROWS, DIM).double(),
    "weights": lambda: _probs(CLASSES).double(),
    "start": lambda: random_tensor(ROWS).double(),
    "path": lambda: random_tensor(ROWS, CLASSES),
    "optimum": lambda: random_tensor(CLASSES, seed=3),
    "gradient": lambda: random_tensor(ROWS, CLASSES),
    "matrix": lambda: random_tensor(ROWS, CLASSES, CLASSES),
    "moments": lambda: class_moments(random_tensor(CLASSES, DIM)),
    "law": lambda: LabelLaw.single(_probs(CLASSES)),
    "labels": lambda: torch.eye(CLASSES).bool(),
    "rank": lambda: torch.arange(ROWS),
    # numbers
    "num_classes": lambda: CLASSES,
    "in_features": lambda: DIM,
    "num_negatives": lambda: 2,
    "num_candidates": lambda: 3,
    "num_codewords": lambda: 2,
    "num_users": lambda: 3,
    "num_rows": lambda: 10,
    "dim": lambda: DIM,
    "k": lambda: 2,
    "cutoff": lambda: 2,
    "goal": lambda: 0.1,
    "first": lambda: 0,
    "second": lambda: 1,
    "count": lambda: 2,
    "size": lambda: 4,
    "curvature": lambda: 0.5,
    "feature_norm": lambda: 1.0,
    "ridge": lambda: 0.1,
    "step": lambda: 0.1,
    "steps": lambda: 3,
    "ranks": lambda: 2,
    "latency": lambda: 1e-5,
    "bandwidth": lambda: 1e9,
    "temperature": lambda: 1.0,
    "batch": lambda: ROWS,
    # words, functions and objects
    "metric": lambda: "dcg",
    "name": lambda: "sparsemax",
    "member": lambda: "softmax",
    "sampler": lambda: manymax.samplers.UniformSampler(CLASSES),
    "map": lambda: manymax.sparsemax,
    "omega": lambda: lambda p: (p.square().sum(-1) - 1) / 2,
    "pair": fenchel_young,
    "generator": lambda: torch.Generator().manual_seed(0),
    "shape": lambda: Shape(8, 20, 4),
    "machine": _machine,
    "network": lambda: manymax.distributed.Network(1e-5, 1e9),
    "estimator": lambda: next(iter(manymax.theory.gradient_deviation.gradient_estimators().values())),
    "head": lambda: manymax.LinearSoftmaxLoss(DIM, CLASSES),
    "model": lambda: nn.Linear(2, 3),
    "params": lambda: [nn.Parameter(torch.ones(4, 2))],
    "options": no_options,
}


_distribution = {"target": GOOD["probs"], "probs": lambda: _probs(CLASSES), "other": GOOD["probs"]}
_softmax = {"member": FAMILY["softmax"]}
# Good values of some subjects, where those in `GOOD` do not fit.
SPECIAL: dict[str, dict[str, Any]] = {
    "ClassTree": {"leads_to": lambda: torch.tensor([0, 4, 1, 2]), "first_edge": lambda: torch.tensor([0, 2, 4])},
    "ClassTree.accumulate": {"edge_values": lambda: random_tensor(small_tree().num_edges, 2)},
    **{f"FenchelYoung.{method}": _distribution for method in ("gradient", "slope", "bregman")},
    **{name: {"dim": -1} for name in ("psl", "rg", "softmax", "sparsemax", "entmax", "rankmax", "talos", "sl_at_k")},
    "taylor_softmax": {"dim": -1},
    "sampled_softmax_loss": {name: GOOD[name] for name in ("log_q_positive", "log_q_negative")},
    "RGFactorization": {"num_items": 5},
    **{
        f"RGFactorization.{m}": {
            "users": lambda: torch.tensor([0, 1, 2, 2]),
            "items": lambda: torch.tensor([0, 4, 2, 1]),
        }
        for m in ("fit", "observe", "scores", "fold_in_users", "fold_in_items")
    },
    "RGFactorization.query_scores": {"queries": lambda: random_tensor(2, 2)},
    "samplers.DNSSampler()": {"num_negatives": 2},
    "approximations.approximating": {"name": "rg"},
    "approximations.tree_log_probs": {"dim": 16},
    **{
        f"bias_variance.{m}": {"member": "sampled_softmax"}
        for m in ("estimate", "deviation", "negatives_needed", "drawn")
    },
    **{f"bregman.{m}": _distribution for m in ("bregman_gap", "threshold_gap", "tie_cost")},
    "bregman.asymmetry": {"scores": lambda: random_tensor(CLASSES)},
    "consistency.consistency": {**_softmax, "trials": 2},
    "gradients.sampled_gradient": {"member": FAMILY["sampled_softmax"]},
    "gradients.by_score": {"matrix": lambda: random_tensor(ROWS, CLASSES)},
    "gradients.top_jacobian": {"scores": lambda: random_tensor(CLASSES)},
    "gradients.alignment": {"fill": GOOD["probs"]},
    **{f"label_laws.{m}": {"scores": lambda: random_tensor(CLASSES)} for m in ("expected_metric", "regret")},
    "label_laws.LabelLaw": {"probs": lambda: _probs(CLASSES)},
    **{f"rates.{m}": _softmax for m in ("head_rates", "curvature_of", "head_gradient", "worst_head")},
    "rates.descend": {"gradient": lambda: torch.sin},
    "gradients.gradient": _softmax,
    **{f"jacobian.{m}": _softmax for m in ("jacobian", "norm_bounds", "supremum")},
    "order_preservation.member_map": _softmax,
    "risk.conditional_risk": {**_softmax, "scores": lambda: random_tensor(ROWS, CLASSES).double()},
    **{f"risk.{m}": _softmax for m in ("minimisers", "search_minimisers")},
    "risk.search_minimisers": {**_softmax, "starts": 2},
    "risk.closed_form": {**_softmax, "probs": lambda: _probs(CLASSES).double()},
    "risk.descend_risk": {**_softmax, "start": lambda: random_tensor(CLASSES).double(), "options": no_options},
    "Shape": {"num_classes": 7, "dim": 3},
    "Machine": dict.fromkeys(Work.__dataclass_fields__, 1e-9),
}

"""Wrong arguments of sampled softmax: each error names the argument."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from manymax import ArgumentError, ArgumentTypeError, SampledSoftmaxLoss, sampled_softmax_loss

# --- bad input ---

GOOD: dict[str, Any] = {
    "positive": torch.zeros(2),
    "negative": torch.zeros(2, 3),
    "log_q_positive": -1.0,
    "log_q_negative": -1.0,
    "hits": torch.zeros(2, 3, dtype=torch.bool),
}
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"negative": torch.zeros(2, 0), "hits": None}, ArgumentError, "`negative`"),
    ({"negative": torch.tensor(0.0), "hits": None}, ArgumentError, "`negative`"),
    ({"negative": torch.zeros(3, 3)}, ArgumentError, "`negative`"),
    ({"negative": [0.0, 1.0]}, ArgumentTypeError, "`negative`"),
    ({"negative": [0.0, 1.0], "correction": "partition", "debias": "delta"}, ArgumentTypeError, "`negative`"),
    ({"negative": torch.zeros(2, 3, dtype=torch.long)}, ArgumentTypeError, "`negative`"),
    ({"positive": torch.zeros(2, dtype=torch.long)}, ArgumentTypeError, "`positive`"),
    ({"positive": 0.0}, ArgumentTypeError, "`positive`"),
    ({"positive": torch.tensor([0.0, math.nan])}, ArgumentError, "`positive`.*nan"),
    ({"positive": torch.tensor([0.0, math.inf])}, ArgumentError, "`positive`.*inf"),
    ({"positive": torch.tensor([0.0, -math.inf])}, ArgumentError, "`positive`.*-inf"),
    ({"negative": torch.tensor([0.0, math.nan, 1.0])}, ArgumentError, "`negative`.*nan"),
    ({"negative": torch.tensor([0.0, math.inf, 1.0])}, ArgumentError, "`negative`.*inf"),
    ({"log_q_positive": None}, ArgumentError, "`log_q_positive`"),
    ({"log_q_negative": None}, ArgumentError, "`log_q_negative`"),
    ({"log_q_negative": None, "correction": "partition"}, ArgumentError, "`log_q_negative`"),
    ({"log_q_positive": torch.tensor([0.0, -math.inf])}, ArgumentError, "`log_q_positive`.*q = 0"),
    ({"log_q_negative": torch.tensor([0.0, -math.inf, 0.0])}, ArgumentError, "`log_q_negative`.*q = 0"),
    ({"log_q_negative": math.nan}, ArgumentError, "`log_q_negative`"),
    ({"log_q_positive": torch.zeros(3)}, ArgumentError, "`log_q_positive`"),
    ({"log_q_negative": torch.zeros(2, 4)}, ArgumentError, "`log_q_negative`"),
    ({"log_q_negative": "uniform"}, ArgumentTypeError, "`log_q_negative`"),
    ({"hits": None, "correction": "partition"}, ArgumentError, "`hits`"),
    ({"hits": None, "hit_policy": "mask"}, ArgumentError, "`hits`"),
    ({"hits": torch.zeros(2, 3)}, ArgumentTypeError, "`hits`"),
    ({"hits": [False]}, ArgumentTypeError, "`hits`"),
    ({"hits": torch.zeros(3, 3, dtype=torch.bool)}, ArgumentError, "`hits`"),
    ({"correction": "logQ"}, ArgumentError, "`correction`.*Did you mean 'logq'"),
    ({"correction": None}, ArgumentTypeError, "`correction`"),
    ({"hit_policy": "drop"}, ArgumentError, "`hit_policy`"),
    ({"hit_policy": ""}, ArgumentError, "`hit_policy`"),
    ({"reduction": "average"}, ArgumentError, "`reduction`"),
    ({"correction": "partition", "debias": "jacknife"}, ArgumentError, "`debias`.*Did you mean 'jackknife'"),
    ({"correction": "logq", "debias": "delta"}, ArgumentError, "`debias`.*'logq'"),
    ({"correction": "none", "debias": "jackknife"}, ArgumentError, "`debias`.*'none'"),
    ({"log_q_positive": None, "correction": "corrected_logq"}, ArgumentError, "corrected_logq.*`log_q_positive`"),
    ({"hits": None, "correction": "corrected_logq"}, ArgumentError, "`hits`"),
    ({"hit_policy": "keep", "correction": "corrected_logq"}, ArgumentError, "`hit_policy='keep'`.*contradict"),
    ({"correction": "corrected_logq", "debias": "delta"}, ArgumentError, "`debias`.*'corrected_logq'"),
    (
        {"correction": "partition", "debias": "delta", "negative": torch.zeros(2, 1), "hits": torch.ones(2, 1).bool()},
        ArgumentError,
        "`negative`.*at least 2.*`debias='delta'`",
    ),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD)
def test_bad_input(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sampled_softmax_loss(**(GOOD | changes))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"correction": "log"}, "`correction`"),
        ({"reduction": "average"}, "`reduction`"),
        ({"hit_policy": "drop"}, "`hit_policy`"),
        ({"debias": "delta"}, "`debias`"),
        ({"hit_policy": "keep", "correction": "corrected_logq"}, "`hit_policy='keep'`"),
        ({"correction": "partition", "debias": "twice"}, "`debias`"),
    ],
)
def test_a_module_refuses_at_once(options: dict[str, str], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        SampledSoftmaxLoss(**options)  # type: ignore[arg-type]

"""What a trained model tells about its loss: gradients by rank, and bias and variance of the approximations.

Written to `probe.json` in the folder of a finished run, for the report, which reads no models:

    gradients       |d loss / d score| of some test users, a row a user, in bins of ranks (best score first); a bin
                    is 0 only where every gradient in it is exactly 0
    zero_share      the share of negatives whose gradient is exactly 0
    jacobian        |J| of the map for the first of them, at the best-scored items
    approximations  of models trained with the baseline: what the theory predicts for sampled losses under a uniform
                    proposal, what is exact, and what draws measure, with standard errors
    error           why there is nothing of this
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manymax.engine.member import Member
from manymax.members import BASELINE
from manymax.study.data.batches import Batch
from manymax.study.evaluate import known_lists
from manymax.study.files import write_json
from manymax.study.records import PROBE
from manymax.study.run import load_model
from manymax.study.run_head import own_keywords
from manymax.study.seeds import generator
from manymax.theory.approximations import approximations, variant_names
from manymax.theory.bias_variance import drawn, estimate
from manymax.theory.gradients import by_score, gradient, top_jacobian, without_signal
from manymax.theory.order_preservation import member_map

ROWS = 32  # test users
BINS = 64  # of ranks
TOP = 48  # items of the Jacobian
NEGATIVES = (5, 10, 50, 100)
DRAWS = 2_000


def probe(folder: Path) -> None:
    """Write `probe.json` for a finished run."""
    try:
        content = _measure(folder)
    except Exception as error:  # whatever is wrong here, the run itself is fine
        content = {"error": f"{type(error).__name__}: {error}"}
    write_json(folder / PROBE, content)


def _measure(folder: Path) -> dict[str, Any]:
    config, model, _, _, split = load_model(folder)
    member = config.member
    if member.kind not in ("exact", "quadratic"):
        return {}
    users = (split.test.lengths > 0).nonzero()[:ROWS, 0]
    target = split.test.items[split.test.offsets[users]]
    with torch.no_grad():
        vectors = model.backbone.vectors()
        reads = model.backbone.needs_history
        history = known_lists(split, "test").padded(users, model.backbone.max_length) if reads else None
        scores = (model.backbone.queries(Batch(users, history), vectors) @ vectors.items.T).double()  # (N, C)
    settings = own_keywords(member.settings, config.loss.own)
    settings.pop("learnable", None)  # of the head; the map is measured where training began
    found = {**_gradients(member, scores, target, settings)}
    if member is BASELINE:
        found["approximations"] = list(_approximations(scores, target, config.seed))
    return found


def _gradients(member: Member, scores: Tensor, target: Tensor, settings: dict[str, Any]) -> dict[str, Any]:
    slopes = gradient(member, scores, target, **settings)
    silent = without_signal(slopes, target).sum() / (slopes.numel() - len(target))
    found = {"gradients": _binned(by_score(slopes, scores).abs()).tolist(), "zero_share": silent.item()}
    if member.map is not None:
        mapped = {setting.name for setting in member.settings if setting.of_map}
        own = {name: value for name, value in settings.items() if name in mapped}
        corner = top_jacobian(member_map(member, target[0], **own), scores[0], min(TOP, scores.shape[1]))
        found["jacobian"] = corner.abs().tolist()
    return found


def _binned(values: Tensor) -> Tensor:
    """(N, C) to the means of at most BINS bins of columns."""
    return torch.stack([part.mean(1) for part in values.tensor_split(min(BINS, values.shape[1]), dim=1)], dim=1)


def _approximations(scores: Tensor, target: Tensor, seed: int) -> Iterator[dict[str, Any]]:
    """Means over the users, who share the draws: the standard error of a mean is at most the mean of theirs."""
    for name, settings in _sampled():
        for k in NEGATIVES:
            predicted = estimate(name, scores, target, num_negatives=k, **settings)
            draws = generator(seed, "probe", step=k)
            measured = drawn(name, scores, target, num_negatives=k, draws=DRAWS, generator=draws, **settings)
            yield {
                "member": name,
                **{key: settings.get(key) for key in variant_names()},
                "num_negatives": k,
                "predicted_bias": predicted.bias.mean().item(),
                "exact_bias": predicted.exact_bias.mean().item(),
                "measured_bias": measured.bias.mean().item(),
                "measured_bias_error": measured.bias_error.mean().item(),
                "predicted_variance": predicted.variance.mean().item(),
                "exact_variance": predicted.exact_variance.mean().item(),
                "measured_variance": measured.variance.mean().item(),
                "measured_variance_error": measured.variance_error.mean().item(),
                "in_range": predicted.in_range.double().mean().item(),
            }


def _sampled() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Members that draw, with those of their settings that can be trained on and differ under a uniform proposal."""
    for name, approximation in approximations(drawing=True).items():
        variants = (variant for variant in approximation.variants if variant.trained and variant.uniform)
        yield from ((name, variant.settings) for variant in variants)

"""Measurements of a loss on a trained model: gradients by rank, and bias and variance of sampled approximations.

They are written to `probe.json` in the folder of a finished run, so that a report need not load models:

    gradients       |d loss / d score| of some test users, one row per user, averaged over bins of ranks (best score
                    first); a bin is 0 only if every gradient in it is exactly 0
    zero_share      the share of negatives whose gradient is exactly 0
    jacobian        |J| of the member's map at the best-scored items, for the first of these users
    approximations  for models trained with the baseline loss: bias and variance of the sampled losses under a uniform
                    proposal, as the theory predicts them, exactly, and measured from draws with standard errors
    error           in place of all of these: why nothing could be measured
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
from manymax.study.files import write_sealed
from manymax.study.records import PROBE
from manymax.study.run import load_model
from manymax.study.run_head import own_keywords
from manymax.study.seeds import generator
from manymax.theory.approximations import approximations, variant_names
from manymax.theory.bias_variance import drawn, estimate
from manymax.theory.gradients import by_score, gradient, top_jacobian, without_signal
from manymax.theory.order_preservation import member_map

PROBED_USERS = 32
RANK_BINS = 64  # most bins of ranks in `gradients`
JACOBIAN_ITEMS = 48  # most rows and columns of `jacobian`
SAMPLE_SIZES = (5, 10, 50, 100)  # numbers of negatives of the sampled losses
DRAWS_PER_SIZE = 2_000


def probe(folder: Path) -> None:
    """Write `probe.json` for a finished run."""
    try:
        content = _measure(folder)
    except Exception as error:  # the run is finished and good: an error in these measurements must not fail it
        content = {"error": f"{type(error).__name__}: {error}"}
    write_sealed(folder / PROBE, content)


def _measure(folder: Path) -> dict[str, Any]:
    config, model, _, _, split = load_model(folder)
    member = config.member
    if member.kind not in ("exact", "quadratic"):  # the other losses do not have a gradient for every score
        return {}
    users = (split.test.lengths > 0).nonzero()[:PROBED_USERS, 0]
    target = split.test.items[split.test.offsets[users]]  # the first test item of each user
    with torch.no_grad():
        vectors = model.backbone.vectors()
        needs_history = model.backbone.needs_history
        history = known_lists(split, "test").padded(users, model.backbone.max_length) if needs_history else None
        scores = (model.backbone.queries(Batch(users, history), vectors) @ vectors.items.T).double()  # (N, C)
    settings = own_keywords(member.settings, config.loss.own)
    # A keyword of heads only. The map has no learned value, so it is measured at the value that training began with.
    settings.pop("learnable", None)
    found = {**_gradients(member, scores, target, settings)}
    if member is BASELINE:
        found["approximations"] = list(_approximations(scores, target, config.seed))
    return found


def _gradients(member: Member, scores: Tensor, target: Tensor, settings: dict[str, Any]) -> dict[str, Any]:
    """The entries `gradients`, `zero_share` and, for members with a map, `jacobian`."""
    gradients = gradient(member, scores, target, **settings)
    zero_share = without_signal(gradients, target).sum() / (gradients.numel() - len(target))  # of the negatives
    found = {"gradients": _binned(by_score(gradients, scores).abs()).tolist(), "zero_share": zero_share.item()}
    if member.map is not None:
        names = {setting.name for setting in member.settings if setting.of_map}
        own = {name: value for name, value in settings.items() if name in names}
        items = min(JACOBIAN_ITEMS, scores.shape[1])
        found["jacobian"] = top_jacobian(member_map(member, target[0], **own), scores[0], items).abs().tolist()
    return found


def _binned(values: Tensor) -> Tensor:
    """Means of the columns of (N, C) in at most `RANK_BINS` bins of equal size, (N, bins)."""
    bins = values.tensor_split(min(RANK_BINS, values.shape[1]), dim=1)
    return torch.stack([columns.mean(1) for columns in bins], dim=1)


def _approximations(scores: Tensor, target: Tensor, seed: int) -> Iterator[dict[str, Any]]:
    """The rows of `approximations`: for each sampled loss and number of negatives, means over the users.

    All users share the same draws, so their errors are not independent: the standard error of a mean over users is at
    most the mean of the users' standard errors, which is what is stated.
    """
    for name, settings in _sampled():
        for k in SAMPLE_SIZES:
            predicted = estimate(name, scores, target, num_negatives=k, **settings)
            rng = generator(seed, "probe", step=k)
            measured = drawn(name, scores, target, num_negatives=k, draws=DRAWS_PER_SIZE, generator=rng, **settings)
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
    """(name, settings) of the sampled members: their variants that can be trained and differ for a uniform proposal."""
    for name, approximation in approximations(drawing=True).items():
        variants = (variant for variant in approximation.variants if variant.trained and variant.uniform)
        yield from ((name, variant.settings) for variant in variants)

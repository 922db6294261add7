"""From the settings of a run to its head: any member of the family, or a reference, on any backbone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn

from manymax.engine.member import Setting
from manymax.errors import ArgumentError
from manymax.heads import LinearHead
from manymax.heads.build import head_class
from manymax.ops.tree import HuffmanTree
from manymax.samplers import SAMPLERS, Sampler
from manymax.study.computations import computations
from manymax.study.config import RunConfig
from manymax.study.data.interactions import Split
from manymax.study.seeds import generator


def build_head(config: RunConfig, split: Split) -> LinearHead:
    """The head of a run, for the class vectors of any backbone; a tree brings node vectors of its own.

    Its draws come from `head.generator`, which a training loop seeds anew for each step.
    """
    member, way = config.member, computations()[config.machine.computation]
    if way.build is not None:
        return way.build(member, split.num_items)
    made: Any = head_class(member)
    given = {"multilabel": config.loss.multilabel, **own_keywords(member.settings, config.loss.own)}
    if member.kind == "sampled":
        return cast(LinearHead, made(None, split.num_items, **given, **_drawing(config, split)))
    if member.takes.smoothing:
        given["label_smoothing"] = config.loss.label_smoothing
    if member.kind == "tree":
        head: Any = made(config.backbone.dim, split.num_items, tree=HuffmanTree(split.counts()), **given)
        first = generator(config.seed, "init-head")
        nn.init.normal_(head.node_vectors, std=config.backbone.init_scale, generator=first)
        return cast(LinearHead, head)
    about = {"matmul": "bf16" if config.training.bf16 else "float32", **way.options}
    honoured = {name: value for name, value in about.items() if name in made.honours}
    return cast(LinearHead, made(None, split.num_items, **given, options=honoured))


def own_keywords(settings: Iterable[Setting], own: dict[str, Any]) -> dict[str, Any]:
    """The settings of a row under the names of whoever takes them; one that is left to the row is left out."""
    found: dict[str, Any] = {}
    for setting in settings:
        if own.get(setting.public_name) is not None:
            found[setting.name] = own[setting.public_name]
        if own.get(setting.learnable_name):
            found["learnable"] = True
    return found


def _drawing(config: RunConfig, split: Split) -> dict[str, Any]:
    """What heads that draw negatives have in common."""
    sampler, size = SAMPLERS[config.sampler.name], config.training.batch_size
    last = split.train.items.numel() % size
    if sampler.needs_target and config.training.batches == "pairs" and 0 < last <= config.sampler.num_negatives:
        raise ArgumentError(
            f"`num_negatives` {config.sampler.num_negatives} is more than the last batch of {last} pairs has to offer: "
            "take 0 for the whole batch, or another `batch_size`."
        )
    return {
        "sampler": build_sampler(config, split),
        "num_negatives": config.sampler.num_negatives or None,
        "shared": config.sampler.shared,
        "generator": torch.Generator(),
    }


def build_sampler(config: RunConfig, split: Split) -> Sampler:
    """The sampler of a run; laws of frequency are those of the training part."""
    row = SAMPLERS[config.sampler.name]
    return row.make(split.num_items, split.counts(), **own_keywords(row.settings, config.sampler.own))

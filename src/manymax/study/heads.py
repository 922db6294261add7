"""From the settings of a run to its head: any member of the family, or a reference, on any backbone."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

import manymax.heads
from manymax.errors import ArgumentError
from manymax.heads import LinearHead
from manymax.members import FAMILY, REFERENCES
from manymax.members.hierarchical_softmax.loss import HierarchicalSoftmaxLoss
from manymax.ops.tree import HuffmanTree
from manymax.paper.whole_table import Detached, WholeTable
from manymax.samplers import SAMPLERS, Sampler
from manymax.study.config import RunConfig
from manymax.study.data.interactions import Split
from manymax.study.references import HEADS
from manymax.study.seeds import generator

# What an option is called by the head or sampler that takes it, where that is not its own name.
KEYWORDS = {
    "learnable_alpha": "learnable",
    "learnable_log_z": "learnable",
    "pool": "num_candidates",
    "codewords": "num_codewords",
}
TABLES = {"table": WholeTable, "detached": Detached}
OF_LOSS = ("alpha", "learnable_alpha", "order", "correction", "hit_policy", "debias", "log_z", "learnable_log_z")
OF_SAMPLER = ("power", "smoothing", "pool", "codewords")


def build_head(config: RunConfig, split: Split) -> nn.Module:
    """The head of a run, for the class vectors of any backbone; a tree brings node vectors of its own.

    Its draws come from `head.generator`, which a training loop seeds anew for each step.
    """
    if config.loss in REFERENCES:
        return HEADS[config.loss](None, split.num_items, **_drawing(config, split))
    if config.computation in TABLES:
        return TABLES[config.computation](config.loss, split.num_items)
    member = FAMILY[config.loss]
    if member.kind == "tree":
        return _tree(config, split)
    options = _drawing(config, split) if member.kind == "sampled" else _exact(config)
    if config.loss == "nce" and config.log_z is None:
        options["log_z"] = math.log(split.num_items)  # where training begins; from 0 it first has to find that
    head: type[LinearHead] = getattr(manymax.heads, f"Linear{member.class_name}Loss")
    return head(None, split.num_items, **options, **_given(config, OF_LOSS))


def _tree(config: RunConfig, split: Split) -> HierarchicalSoftmaxLoss:
    """Hierarchical softmax on Huffman's tree of the training counts."""
    head = HierarchicalSoftmaxLoss(
        config.dim,
        HuffmanTree(split.counts()),
        multilabel=config.multilabel,
        label_smoothing=config.label_smoothing,
    )
    nn.init.normal_(head.node_vectors, std=config.init_scale, generator=generator(config.seed, "init-head"))
    return head


def _exact(config: RunConfig) -> dict[str, Any]:
    """What heads that see all scores, or their moments, have in common."""
    return {
        "multilabel": config.multilabel,
        "label_smoothing": config.label_smoothing,
        "options": {
            "matmul": "bf16" if config.bf16 else "float32",
            "compiled": config.computation == "compiled",
        },
    }


def _drawing(config: RunConfig, split: Split) -> dict[str, Any]:
    """What heads that draw negatives have in common."""
    last = split.train.items.numel() % config.batch_size
    if config.sampler == "in_batch" and config.batches == "pairs" and 0 < last <= config.num_negatives:
        raise ArgumentError(
            f"`num_negatives` {config.num_negatives} is more than the last batch of {last} pairs has to offer: "
            "take 0 for the whole batch, or another `batch_size`."
        )
    return {
        "multilabel": config.multilabel,
        "sampler": build_sampler(config, split),
        "num_negatives": config.num_negatives or None,
        "shared": config.shared,
        "generator": torch.Generator(),
    }


def build_sampler(config: RunConfig, split: Split) -> Sampler:
    """The sampler of a run; laws of frequency are those of the training part."""
    return SAMPLERS[config.sampler].make(split.num_items, split.counts(), **_given(config, OF_SAMPLER))


def _given(config: RunConfig, names: tuple[str, ...]) -> dict[str, Any]:
    """The options that have an effect, under the names of those who take them; None means their own default."""
    values = {KEYWORDS.get(name, name): getattr(config, name) for name in names if name not in config.unused()}
    return {name: value for name, value in values.items() if value is not None}

"""From the settings of a run to its head: any member of the family, or a reference loss, on any backbone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from manymax.engine.member import Setting
from manymax.engine.native_library import missing, resolved_name
from manymax.errors import ArgumentError, ManymaxError
from manymax.heads import LinearHead
from manymax.heads.build import head_class
from manymax.ops.tree import HuffmanTree
from manymax.samplers import SAMPLERS, Sampler
from manymax.study.checkpoint import read_training_state
from manymax.study.computations import find_computation, has_native_code
from manymax.study.config import RunConfig
from manymax.study.data.interactions import Split
from manymax.study.seeds import generator


def resolve_backend(config: RunConfig) -> str:
    """What the back end of a run is on this machine: "torch", or "native-" and the level of the native code.

    A run asks once, when it begins: what "auto" stands for depends on the machine, on its installation and on its
    environment, and two back ends round differently.
    """
    computation = find_computation(config.machine.computation)
    if computation.build is not None or not has_native_code(config.member):
        return "torch"
    wanted = config.machine.backend
    return resolved_name(computation.options.get("backend", wanted) if wanted == "auto" else wanted)


def choose_backend(config: RunConfig, checkpoint: Path) -> str:
    """The back end of a run: the one that its checkpoint was made with, or what its settings mean on this machine.

    Raises:
        ManymaxError: this machine does not have it.
    """
    state = read_training_state(checkpoint)
    if state is None:
        return resolve_backend(config)
    if state.backend is None:
        # Version 0.1.0 had plain torch, unless the settings asked for native code.
        asked = find_computation(config.machine.computation).options.get("backend", "torch")
        return "torch" if asked == "torch" else resolve_backend(config)
    level = state.backend.removeprefix("native-")
    if state.backend != "torch" and (why := missing(level)):
        raise ManymaxError(
            f"{checkpoint} was made with the back end {state.backend!r}, which cannot be had here: {why} A run keeps "
            "its back end, because another one rounds differently. Go on with the run on a machine that has it, or "
            'begin anew with `backend` "torch", which every machine has, in another folder.'
        )
    return state.backend


def build_head(config: RunConfig, split: Split, backend: str = "auto") -> LinearHead:
    """The head of a run. It scores by the item vectors of the backbone; a tree has node vectors of its own.

    A head that samples negatives draws them from `head.generator`, which the training loop seeds for each step.

    Args:
        config: the settings.
        split: the data.
        backend: what `resolve_backend` said when the run began.
    """
    member, computation = config.member, find_computation(config.machine.computation)
    if computation.build is not None:
        if config.loss.bound_epochs:
            raise ArgumentError("`bound_epochs` needs a head that takes bounds: leave out it or the `computation`.")
        return computation.build(member, split.num_items)
    make: Any = head_class(member)
    keywords = {"multilabel": config.loss.multilabel, **own_keywords(member.settings, config.loss.own)}
    if config.loss.decoupled:
        keywords["decoupled"] = True
    # The first argument of a head is the size of its own class vectors; None: it gets those of the backbone each step.
    if member.kind == "sampled":
        options = {name: value for name, value in {"backend": backend}.items() if name in make.honours}
        drawn = _sampling_keywords(config, split)
        if config.keeps_pairs:
            drawn["num_pairs"] = split.train.items.numel()
        return cast(LinearHead, make(None, split.num_items, **keywords, **drawn, options=options))
    if member.takes.smoothing:
        keywords["label_smoothing"] = config.loss.label_smoothing
    if member.kind == "tree":
        head: Any = make(config.backbone.dim, split.num_items, tree=HuffmanTree(split.counts()), **keywords)
        rng = generator(config.seed, "init-head")
        nn.init.normal_(head.node_vectors, std=config.backbone.init_scale, generator=rng)
        return cast(LinearHead, head)
    wanted = {"matmul": "bf16" if config.training.bf16 else "float32", **computation.options, "backend": backend}
    options = {name: value for name, value in wanted.items() if name in make.honours}
    return cast(LinearHead, make(None, split.num_items, **keywords, options=options))


def own_keywords(settings: Iterable[Setting], own: dict[str, Any]) -> dict[str, Any]:
    """The values that a run gives to the settings of a member, sampler or solver, as keywords of its constructor.

    Args:
        settings: the settings that it declares.
        own: values by the settings' names in a run. A value of None is left out: the constructor then has a default.
    """
    found: dict[str, Any] = {}
    for setting in settings:
        if own.get(setting.public_name) is not None:
            found[setting.name] = own[setting.public_name]
        if own.get(setting.learnable_name):
            found["learnable"] = True
    return found


def check_negatives(config: RunConfig, split: Split) -> None:
    """Raise an error if a loss that samples negatives cannot draw as many as it is asked for."""
    # In-batch negatives are the positives of other rows, so a batch of n pairs has n - 1 of them. The last batch of an
    # epoch is shorter than the others: better an error now than at the end of the first epoch.
    last = split.train.items.numel() % config.training.batch_size
    limited = config.member.kind == "sampled" and SAMPLERS[config.sampler.name].limited_by_batch
    if limited and config.training.batches == "pairs" and 0 < last <= config.sampler.num_negatives:
        raise ArgumentError(
            f"`num_negatives` is {config.sampler.num_negatives}, but the last batch of an epoch has {last} pairs, too "
            "few to take as many negatives from: use 0 for all of the batch, or another `batch_size`."
        )


def _sampling_keywords(config: RunConfig, split: Split) -> dict[str, Any]:
    """The keywords of heads that sample negatives."""
    check_negatives(config, split)
    return {
        "sampler": build_sampler(config, split),
        "num_negatives": config.sampler.num_negatives or None,
        "shared": config.sampler.shared,
        "generator": torch.Generator(),
    }


def build_sampler(config: RunConfig, split: Split) -> Sampler:
    """The sampler of a run; frequencies of items are those of the training part."""
    entry = SAMPLERS[config.sampler.name]
    return entry.make(split.num_items, split.counts(), **own_keywords(entry.settings, config.sampler.own))

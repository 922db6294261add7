"""Exact heads on a device, as far as a machine without one can show them.

Where values may not be looked at, because the host would wait for the device, kernels take ways of their own. It is
shown that no value is looked at within the loop over blocks: fake tensors on "cuda" have none, and raise where one is
asked for; and that the results of these ways are those of the others, with the tensors of this machine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from manymax.engine import block_loop
from manymax.engine.keywords import read_keywords
from manymax.engine.linear import read_call
from manymax.engine.member import Member
from manymax.engine.ranks import ALONE, Ranks, Shards
from tests.contracts.test_keywords import CASES, CLASSES, EXACT, ROWS, Call, Problem, members

SEVERAL = torch.zeros(ROWS, CLASSES).bool()
SEVERAL[torch.arange(ROWS), torch.arange(ROWS) * 3] = SEVERAL[1::2, 50] = True
TARGETS: dict[str, Tensor] = {
    "ids": torch.arange(ROWS) * 7,
    "bool rows": SEVERAL,
    "float rows": torch.rand(ROWS, CLASSES, generator=torch.Generator().manual_seed(0)).double().softmax(1),
    "many ids": torch.arange(20).expand(ROWS, 20) * 4,
}


@pytest.fixture
def unseen() -> Iterator[pytest.MonkeyPatch]:
    """Every tensor counts as one whose values may not be looked at."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith(("manymax.engine", "manymax.members", "manymax.ops")) and hasattr(module, "visible"):
                patch.setattr(module, "visible", lambda *tensors: False)
        yield patch


# What torch does in ways of its own that ask for the device.
REPLACED: dict[str, Any] = {
    "copy_": lambda place, value: place.mul_(0).add_(value),
    "__invert__": torch.ops.aten.bitwise_not,
    "contiguous": lambda value: value,
}


class Indexing(TorchFunctionMode):
    """Indexing and copies of tensors by other operators, which give the same shapes.

    The shortcuts that torch takes for them ask the device of a tensor, which a build without that device does not know.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name == "__getitem__":
            return indexed(*args)
        if name == "__setitem__":
            indexed(*args[:2]).add(args[2])  # nothing to write, but shapes that have to fit
            return None
        replaced = REPLACED.get(name, function)
        return replaced(*args, **(kwargs or {}))


def indexed(value: Tensor, key: Any) -> Tensor:
    """value[key]."""
    keys = list(key) if isinstance(key, tuple) else [key]
    if any(k is Ellipsis for k in keys):
        place = [k is Ellipsis for k in keys].index(True)
        keys[place : place + 1] = [slice(None)] * (value.ndim - sum(k is not None for k in keys) + 1)
    axis, tensors = 0, {}
    for k in keys:
        if k is None:
            value = value.unsqueeze(axis)
        elif isinstance(k, int):
            value, axis = value.select(axis, k), axis - 1
        elif isinstance(k, Tensor):
            tensors[axis] = k
        elif k != slice(None):
            value = torch.ops.aten.slice(value, axis, k.start, k.stop, 1 if k.step is None else k.step)
        axis += 1
    return torch.ops.aten.index(value, [tensors.get(i) for i in range(value.ndim)]) if tensors else value


def some_slow(quick: tuple[str, ...]) -> Any:
    """The cases of keywords, of which the first tier takes the quick ones."""
    rows = [pytest.param(case, marks=() if case in quick else pytest.mark.slow) for case in CASES]
    return pytest.mark.parametrize("case", rows)


class TwoRanks(Ranks):
    """The first of two ranks, of which the other has no live class: exchanges are the identity."""

    size = 2


class Products(Indexing):
    """`Indexing`, which keeps the operands' dtypes of all matrix products, and that of the result."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[torch.dtype, ...]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(function, types, args, kwargs)
        if getattr(function, "__name__", "") in ("mm", "matmul", "__matmul__", "addmm_"):
            self.found.append((*(arg.dtype for arg in args), result.dtype))
        return result


def run_fake(
    member: Member,
    ranks: Ranks = ALONE,
    target: Any = None,
    dtype: torch.dtype = torch.float64,
    mode: TorchFunctionMode | None = None,
    **given: Any,
) -> None:
    """The loop over blocks of fake tensors on "cuda", with all gradients.

    The loop itself and not a backward: a build of torch without CUDA ends the process where autograd asks for a stream.
    """
    # With several positives per row some members take no list of classes to leave out.
    problem = Problem(single="exclude" in given and not member.log_partition)
    target = problem.target if target is None else target
    with torch.no_grad(), FakeTensorMode(), mode or Indexing():

        def fake(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            kind = dtype if value.is_floating_point() else value.dtype
            return torch.empty(value.shape, dtype=kind, device="cuda")

        settings = member.examples[-1]
        keywords = read_keywords(
            {name: fake(v) for name, v in given.items()} | {"weight": fake(problem.weight)}, CLASSES
        )
        tensors = fake(problem.input), fake(problem.vectors), fake(problem.bias)
        shards = Shards((CLASSES, 5) if ranks.size > 1 else (CLASSES,), ranks)
        keywords = replace(keywords, weight=None if ranks.size > 1 else keywords.weight)
        call = read_call(member, *tensors, fake(target), keywords, shards)
        rows = replace(call.rows(), coefficient=torch.ones_like(call.rows().total))
        kernel = member.needed("kernel")(**settings)
        wants = True, True, True
        found = block_loop.run(call.queries, call.vectors, call.bias, rows, kernel, call.keywords, shards, wants)
        losses, gradients, _, stats = found
        assert losses.shape == (ROWS,)
        assert [part.shape for part in gradients.finish() if part is not None] == [t.shape for t in tensors]
        assert len(stats) == len(keywords.stats)


@some_slow(quick=("all of the scores",))
@members(EXACT)
def test_no_keyword_makes_the_host_wait(member: Member, case: str) -> None:
    given, needed = CASES[case]
    if needed and not getattr(member, needed):
        return
    run_fake(member, **Problem().keywords(given))


@members(EXACT)
def test_halves_go_into_the_products_as_they_are(member: Member) -> None:
    """Scores and both gradients; what comes out is float32. Queries that were scaled are not rounded again."""
    half, wide = torch.bfloat16, torch.float32
    products = Products()
    run_fake(member, dtype=half, mode=products)
    assert products.found.count((half, half, wide)) >= (1 if member.sparse else 3)
    assert not [found for found in products.found if half in found and found != (half, half, wide)]
    for given, dtype in (({"temperature": 0.5}, half), ({"normalize": True}, half), ({}, torch.float16)):
        scaled = Products()
        run_fake(member, dtype=dtype, mode=scaled, **given)
        assert (half, half, wide) not in scaled.found


@pytest.mark.slow
@members(EXACT)
def test_no_target_and_no_statistic_makes_the_host_wait(member: Member) -> None:
    for kind, target in TARGETS.items():
        if kind != "float rows" or member.takes.float_rows:
            run_fake(member, target=target, stats=() if member.joint else ("argmax", "correct", *member.statistics))
    if member.takes.smoothing:
        run_fake(member, label_smoothing=0.1)
    if member.unsharded is None:
        run_fake(member, TwoRanks())


@some_slow(quick=("all of the scores", "exclude"))
@members(EXACT)
def test_keywords_without_a_look(member: Member, case: str, unseen: pytest.MonkeyPatch) -> None:
    given, needed = CASES[case]
    if needed and not getattr(member, needed):
        return
    call = Call(member, member.examples[-1], given, "torch")
    found = call.loss()
    unseen.undo()
    call.check(found, call.loss())


@members(EXACT)
def test_targets_without_a_look(member: Member, unseen: pytest.MonkeyPatch) -> None:
    call = Call(member, member.examples[-1], {}, "torch")
    call.problem.bias[9] = -3.0  # float rows give every class a weight
    call.tensors[2] = call.wanted[2] = call.problem.bias.clone().requires_grad_()
    choices: list[tuple[str, dict[str, Any]]] = [(kind, {}) for kind in TARGETS]
    choices += [("ids", {"label_smoothing": 0.2}), ("bool rows", {"label_smoothing": 0.2, "normalize": True})]
    found = []
    for each in (found.append, lambda loss: call.check(found.pop(0), loss)):
        for kind, given in choices:
            if (kind != "float rows" or member.takes.float_rows) and (not given or member.takes.smoothing):
                call.problem.target, call.given = TARGETS[kind], given
                each(call.loss())
        unseen.undo()

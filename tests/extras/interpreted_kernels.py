"""The Triton kernels, interpreted on the CPU, against the plain losses in float64: values and gradients.

Run by test_triton.py in a process of its own, because Triton decides when it is imported whether it interprets or
compiles. The cases are those of the native kernels and of the keywords: tests/heads/test_native.py and
tests/contracts/test_keywords.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import manymax
from benchmarks.interpreter import patch_once
from manymax import FAMILY, ManymaxError
from manymax.engine import triton_backend, triton_check
from manymax.engine.member import Member
from manymax.heads import head_function
from tests.contracts import test_keywords as keywords
from tests.heads import test_native as native
from tests.heads.plain import HeadCase, agree, value_and_gradients

pytestmark = pytest.mark.extras


@pytest.fixture(autouse=True, scope="session")
def interpreter() -> None:
    """The interpreter in bearable time. No import does it: doctest imports this file where there is no Triton."""
    patch_once()


# Settings of every member that has Triton kernels, one for each way through them.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "softmax": [{}],
    "sparsemax": [{}],
    "entmax": [{"alpha": 1.05}, {"alpha": 1.7}, {"alpha": 1.5}],
    "rankmax": [{}],
    "sl_at_k": [{"k": 4, "gate_temperature": 0.7}],
    "talos": [{"k": 4, "tau": 0.6}],
    "bsl": [{"tau": 0.5}],
    "psl": [{"activation": "relu", "tau": 0.4}, {"activation": "tanh", "tau": 0.4}],
}
BACKEND = triton_backend.BACKEND
# One alpha for each kind of power.
LABELS = [
    label
    for label in native.MEMBERS
    if label.partition("-")[0] in SETTINGS and label not in ("entmax-1.01", "entmax-1.3")
]
CASES = [
    pytest.param(FAMILY[name], setting, id="-".join([name, *map(str, setting.values())]))
    for name, settings in SETTINGS.items()
    for setting in settings
]
every_label = pytest.mark.parametrize("label", LABELS)
every_member = pytest.mark.parametrize(("member", "setting"), CASES)


@pytest.fixture(autouse=True)
def large_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes as long for a small tile as for a large one: a GPU's products in a few tests alone."""
    from manymax.engine import triton_entries

    if "numbers_of_classes" not in request.node.name or "5003" in request.node.name:
        for name, size in {"TILE": 256, "DEPTH": 64, "CHUNK": 1024, "ENTRIES": 512}.items():
            monkeypatch.setattr(triton_entries, name, size)


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kernels that are launched. A test in which none is would compare plain torch with itself."""
    found: list[str] = []
    real = triton_backend.launch

    def launch(kernel: Any, *arguments: Any, **constants: Any) -> None:
        found.append(kernel.fn.__name__)
        real(kernel, *arguments, **constants)

    for module in kernel_modules():
        monkeypatch.setattr(module, "launch", launch)
    # Differences of infinities, whose nan is not used: a GPU says nothing about them, numpy would.
    with np.errstate(all="ignore"):
        yield found
    assert found


def kernel_modules() -> list[Any]:
    """The modules that launch kernels."""
    from manymax.engine import triton_entries
    from manymax.members.entmax import kernel_triton as entmax
    from manymax.members.psl import kernel_triton as psl
    from manymax.members.rankmax import kernel_triton as rankmax
    from manymax.members.softmax import kernel_triton as softmax

    return [triton_entries, softmax, entmax, psl, rankmax]


# The contract cases -------------------------------------------------------------------------------


@every_label
def test_every_situation(label: str) -> None:
    """In float32; `test_every_keyword` is in float64."""
    native.test_every_keyword(label, BACKEND, torch.float32)


@pytest.mark.parametrize("num_classes", [1, 2, 17, 511, 512, 513, 5003])
@every_label
def test_numbers_of_classes(label: str, num_classes: int) -> None:
    native.test_numbers_of_classes(label, BACKEND, num_classes)


@native.every_dtype
@every_label
def test_difficult_scores(label: str, dtype: torch.dtype) -> None:
    native.test_difficult_scores(label, BACKEND, dtype)


@pytest.mark.parametrize("most", [2, 31])
@pytest.mark.parametrize("label", ["rankmax", "sparsemax", "entmax-1.1"])
def test_many_positives(label: str, most: int) -> None:
    """More than are looked at together, and fewer."""
    native.test_many_positives(label, BACKEND, torch.float32, most)


@pytest.mark.parametrize("alpha", [1.1, 1.5, 1.7, 2.0])
def test_the_gradient_in_alpha(alpha: float) -> None:
    native.test_the_gradient_in_alpha(BACKEND, torch.float32, alpha)


@every_label
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_scores_that_are_refused(label: str, bad: float) -> None:
    native.test_scores_that_are_refused(label, BACKEND, bad)


@every_member
def test_every_keyword(member: Member, setting: dict[str, Any]) -> None:
    """In float64, with several positives in a row, to 1e-9."""
    for given, needed in keywords.CASES.values():
        if not needed or getattr(member, needed):
            call = keywords.Call(member, setting, given, BACKEND)
            call.check(call.loss(), keywords.reference(call))


@every_member
def test_every_statistic(member: Member, setting: dict[str, Any], launches: list[str]) -> None:
    served = [example for example in member.examples if member.needed("kernel")(**example).triton]
    keywords.test_every_statistic(replace(member, examples=tuple(served)), BACKEND)


# Faults that others had and nobody saw ------------------------------------------------------------


@every_member
def test_half_precision_is_rounded_once(member: Member, setting: dict[str, Any]) -> None:
    """A nearly perfect prediction: the gradient is p - 1, which is 0 if p is rounded before 1 is subtracted.

    And value and gradient come from the same scores: the value is that of float64 at the very numbers that were given.
    """
    queries = torch.full((2, 4), 1.5).bfloat16()
    vectors = torch.zeros(40, 4).bfloat16()
    vectors[7] = 1.25
    vectors[8] = 0.5
    target = torch.tensor([7, 7])
    results = []
    for dtype, backend in ((torch.bfloat16, BACKEND), (torch.float64, "torch")):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in (queries, vectors)]
        loss = head_function(member)(*leaves, target, options={"backend": backend}, reduction="sum", **setting)
        results.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    assert results[0][0].dtype == torch.float32
    torch.testing.assert_close(results[0][0].double(), results[1][0], rtol=1e-5, atol=1e-6)
    for ours, exact in zip(results[0][1:], results[1][1:], strict=True):
        # Rounded once, to 8 bits.
        torch.testing.assert_close(ours.double(), exact, rtol=2.0**-8, atol=1e-6)


@every_member
def test_a_learned_temperature_next_to_masks(member: Member, setting: dict[str, Any]) -> None:
    """0 x inf is nan: the gradient of a temperature must not multiply the score of a mask with its gradient of 0."""
    gradients = []
    for backend in (BACKEND, "torch"):
        temperature = torch.tensor(0.7, requires_grad=True)
        bias = torch.zeros(30)
        bias[::3] = -torch.inf
        random = torch.Generator().manual_seed(0)
        input, vectors = torch.randn(5, 4, generator=random), torch.randn(30, 4, generator=random)
        loss = head_function(member)(
            *(input, vectors, torch.tensor([1, 2, 4, 5, 7])),
            linear_bias=bias,
            temperature=temperature,
            options={"backend": backend},
            **setting,
        )
        gradients.append(torch.autograd.grad(loss, temperature)[0])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-6)


@every_member
def test_the_losses_of_rows_are_those_of_the_sum(member: Member, setting: dict[str, Any]) -> None:
    """With one loss per row the backward computes the scores a second time: they must be the same scores."""
    problem, target = native.problem_of(130), native.target_of("padded ids", 130)
    case = HeadCase(member, setting, BACKEND)

    def total(*given: Any, **more: Any) -> Tensor:
        return case.head(*given, **more).sum()

    results = [
        value_and_gradients(total, problem.leaves(torch.float32), target, reduction=reduction)
        for reduction in ("none", "sum")
    ]
    agree(results[0], results[1], 1e-6)


# The self-check -----------------------------------------------------------------------------------


def test_a_kernel_that_differs_is_named_and_not_used(monkeypatch: pytest.MonkeyPatch, launches: list[str]) -> None:
    from manymax.members.softmax import kernel_triton

    real = kernel_triton.block_softmax_triton

    def wrong(block: Any, link: Any = None) -> Any:
        result = real(block, link)
        result.parts[0].table.mul_(1.01)
        return result

    monkeypatch.setattr(kernel_triton, "block_softmax_triton", wrong)
    monkeypatch.setattr(triton_check, "_found", {})
    monkeypatch.setenv("MANYMAX_BACKEND", BACKEND)
    input, vectors, target = torch.ones(3, 4), torch.eye(20, 4), torch.arange(3)
    expected = manymax.linear_softmax_loss(input, vectors, target, options={"backend": "torch"})
    with pytest.warns(
        UserWarning, match=r"'softmax' differs from plain torch on cpu: its gradients of queries are off by"
    ):
        found = manymax.linear_softmax_loss(input, vectors, target)
    assert torch.equal(found, expected)
    count = len(launches)
    manymax.linear_softmax_loss(input, vectors, target)  # once per process: neither a second check nor a second warning
    assert len(launches) == count
    with pytest.raises(ManymaxError, match="cannot serve this call: the Triton kernel 'softmax' differs"):
        manymax.linear_softmax_loss(input, vectors, target, options={"backend": BACKEND})


def test_a_kernel_that_does_not_compile_is_not_used(monkeypatch: pytest.MonkeyPatch, launches: list[str]) -> None:
    from manymax.members.softmax import kernel_triton

    def fails(*arguments: Any, **constants: Any) -> None:
        launches.append("fails")
        raise RuntimeError("no compiler for this device")

    monkeypatch.setattr(kernel_triton, "launch", fails)
    monkeypatch.setattr(triton_check, "_found", {})
    monkeypatch.setenv("MANYMAX_BACKEND", BACKEND)
    with pytest.warns(UserWarning, match="does not run on cpu: RuntimeError: no compiler for this device"):
        manymax.linear_softmax_loss(torch.ones(3, 4), torch.eye(20, 4), torch.arange(3))

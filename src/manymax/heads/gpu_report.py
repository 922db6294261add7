"""What Triton kernels compute on a device, beside float64, and how long steps of heads take there.

This is what `manymax gpu-check` prints. Nobody has run the kernels on every device: whoever has one can, and send what
was found.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from manymax.engine.member import Member
from manymax.engine.triton_backend import BACKEND
from manymax.errors import ManymaxError
from manymax.heads.build import head_function
from manymax.members import FAMILY

# By how much values and gradients may differ from float64 at the same numbers, relative to the largest number of a
# tensor. Gradients of half precision are rounded to it, once.
DEVICE_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}
TF32 = 2e-3  # where products are allowed to round their operands to TF32
WARM_UP, REPEATS = 3, 15

# Keywords of the cases whose values are compared; a soft cap is in the table of scores of the reference too.
CASES: dict[str, dict[str, Any]] = {
    "one positive": {},
    "several positives, class weights, masked classes": {"weight": True, "masked": True},
    "label smoothing": {"label_smoothing": 0.1},
    "soft cap": {"softcap": 2.0},
}


@dataclass(frozen=True)
class ValueReport:
    """One comparison: the largest difference from float64, relative to the largest number; None if it is no number.

    why: why the kernel did not run, or None.
    """

    member: str
    setting: Mapping[str, Any]
    case: str
    dtype: str
    classes: int
    difference: float | None
    tolerance: float
    why: str | None = None

    @property
    def passed(self) -> bool:
        """Whether the difference is rounding."""
        return self.difference is not None and self.difference <= self.tolerance


@dataclass(frozen=True)
class TimeReport:
    """The median time of a step, forward and backward, and the memory that it takes beside its arguments.

    why: why there is none, or None.
    """

    loss: str
    way: str
    dtype: str
    milliseconds: float | None
    megabytes: float | None
    why: str | None = None


def with_kernels() -> Iterator[tuple[Member, Mapping[str, Any]]]:
    """Every member that has Triton kernels, with each of its examples of settings."""
    for member in FAMILY.values():
        if member.kind == "exact":
            for setting in member.examples:
                if member.needed("kernel")(**setting).triton:
                    yield member, setting


def compare_values(
    device: torch.device, rows: int, sizes: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> Iterator[ValueReport]:
    """Compare the kernels of every member with its plain loss in float64, in every case, size and precision."""
    for member, setting in with_kernels():
        for case, keywords in CASES.items():
            if "label_smoothing" in keywords and not member.takes.smoothing:
                continue
            for classes in sizes:
                for dtype in dtypes:
                    found = member.name, setting, case, str(dtype).removeprefix("torch."), classes
                    tf32 = device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
                    tolerance = max(DEVICE_TOLERANCE[dtype], TF32 if tf32 else 0.0)
                    try:
                        difference = _difference(member, setting, keywords, device, rows, classes, dtype)
                    except (ManymaxError, RuntimeError) as error:
                        yield ValueReport(*found, None, tolerance, f"{type(error).__name__}: {str(error)[:500]}")
                        continue
                    yield ValueReport(*found, difference if difference < float("inf") else None, tolerance)


def _difference(
    member: Member,
    setting: Mapping[str, Any],
    keywords: Mapping[str, Any],
    device: torch.device,
    rows: int,
    classes: int,
    dtype: torch.dtype,
) -> float:
    """The largest difference of loss and gradients from float64, relative to the largest number of each."""
    random = torch.Generator().manual_seed(0)
    # Numbers of a few bits, so that every score is exact in every precision, and what comes after it is compared.
    queries, vectors = (torch.randint(-8, 9, (size, 16), generator=random) / 8 for size in (rows, classes))
    # Supports of all sizes, from a single class to all of them.
    queries = queries * torch.tensor([1 / 64, 1.0, 8.0]).repeat(-(-rows // 3))[:rows].unsqueeze(1)
    queries, vectors = queries.to(dtype), vectors.to(dtype)
    target = torch.randint(classes, (rows, 3 if "weight" in keywords else 1), generator=random)
    bias, weight = torch.zeros(classes), None
    if "masked" in keywords:
        bias[torch.arange(classes) % 5 == 3] = -torch.inf
        target = torch.where(target % 5 == 3, -100, target)
        target[:, 0] = torch.arange(rows) % -(-classes // 5) * 5
    if "weight" in keywords:
        weight = 0.5 + torch.arange(classes) % 4
    shared = {"label_smoothing": keywords["label_smoothing"]} if "label_smoothing" in keywords else {}
    given = {**shared, **{name: keywords[name] for name in ("softcap",) if name in keywords}}

    leaves = [tensor.to(device).requires_grad_() for tensor in (queries, vectors, bias)]
    of_class = None if weight is None else weight.to(device)
    loss = head_function(member)(
        *leaves[:2],
        target.to(device),
        linear_bias=leaves[2],
        weight=of_class,
        options={"backend": BACKEND},
        **given,
        **setting,
    )
    found = [loss.detach(), *torch.autograd.grad(loss, leaves)]

    exact = [tensor.double().requires_grad_() for tensor in (queries, vectors, bias)]
    scores = exact[0] @ exact[1].T + exact[2]
    if "softcap" in keywords:
        scores = keywords["softcap"] * torch.tanh(scores / keywords["softcap"])
    of_class = None if weight is None else weight.double()
    expected = member.loss(scores, target, weight=of_class, **shared, **setting)
    wanted = [expected.detach(), *torch.autograd.grad(expected, exact)]
    worst = 0.0
    for ours, theirs in zip(found, wanted, strict=True):
        gap = (ours.cpu().double() - theirs).abs().max() / theirs.abs().max().clamp(min=1e-6)
        worst = max(worst, float(gap)) if gap == gap else float("inf")
    return worst


# From queries (N, d), class vectors (C, d) and target (N,) to a loss.
Step = Callable[..., Tensor]


def time_steps(
    device: torch.device, rows: int, classes: int, features: int, dtypes: tuple[torch.dtype, ...]
) -> Iterator[TimeReport]:
    """Time the kernels of every member, the same head in plain torch, and the plain loss on the table of scores."""
    for member, setting in with_kernels():
        title = ", ".join([member.title, *(f"{name} = {value}" for name, value in setting.items())])
        for dtype in dtypes:
            for way, step in _ways(member, setting).items():
                yield time_of(title, way, step, device, rows, classes, features, dtype)


def _ways(member: Member, setting: Mapping[str, Any]) -> dict[str, Step]:
    """From the name of a way to its step."""
    head = head_function(member)
    ways: dict[str, Step] = {
        f"head, {backend}": lambda q, w, y, b=backend: head(q, w, y, options={"backend": b}, **setting)
        for backend in (BACKEND, "torch")
    }
    ways["eager, the whole table"] = lambda q, w, y: member.loss(q @ w.T, y, **setting)
    return ways


def time_of(
    loss: str, way: str, step: Step, device: torch.device, rows: int, classes: int, features: int, dtype: torch.dtype
) -> TimeReport:
    """Time one way to compute a loss and its gradients."""
    random = torch.Generator().manual_seed(0)
    leaves = [
        (torch.randn(size, features, generator=random) * features**-0.25).to(device, dtype).requires_grad_()
        for size in (rows, classes)
    ]
    target = torch.randint(classes, (rows,), generator=random).to(device)
    names = loss, way, str(dtype).removeprefix("torch.")

    def run() -> None:
        torch.autograd.grad(step(leaves[0], leaves[1], target), leaves)

    try:
        for _ in range(WARM_UP):
            run()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        times = []
        for _ in range(REPEATS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize(device)
            times.append(begin.elapsed_time(end))
        peak = torch.cuda.max_memory_allocated(device) - before
    except Exception as error:  # other packages raise what they like, and one way that fails leaves the others
        return TimeReport(*names, None, None, f"{type(error).__name__}: {str(error).strip()[:300]}")
    return TimeReport(*names, statistics.median(times), peak / 2**20)

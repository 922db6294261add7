"""The shared keywords of heads: every member x back end x keyword against a slow float64 reference.

The reference makes the whole table of scores, and one loss for each positive of each row by the member's plain loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import manymax
from manymax import FAMILY, ArgumentError, ArgumentTypeError, LossResult, SoftTarget
from manymax.engine import native_library
from manymax.engine.keywords import STATISTICS
from manymax.engine.member import Member
from manymax.heads import head_function
from manymax.members import REFERENCE_LOSSES
from manymax.members.taylor_softmax.loss import taylor_exp
from tests.contracts.keyword_formulas import CLASSES, DIM, ROWS, bound, log_h, reference
from tests.heads.products import products_of

BACKENDS = ("torch", *(f"native-{level}" for level in native_library.levels_here()))
ALL = [*FAMILY.values(), *REFERENCE_LOSSES.values()]
EXACT = [member for member in ALL if member.kind == "exact"]

# Keywords, and the field of a member that says whether it takes them; "" if all do.
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "temperature": ({"temperature": 0.7}, ""),
    "learned temperature": ({"temperature": torch.tensor(1.7, dtype=torch.float64)}, ""),
    "normalize": ({"normalize": True, "temperature": 0.2}, ""),
    "softcap": ({"softcap": 1.5}, ""),
    "all of the scores": ({"normalize": True, "temperature": 0.1, "softcap": 2.0}, ""),
    "exclude": ({"exclude": True}, ""),
    "exclude positives": ({"exclude": "positives"}, "log_partition"),
    "decoupled": ({"decoupled": True}, "log_partition"),
    "decoupled and exclude": ({"decoupled": True, "exclude": "positives", "softcap": 3.0}, "log_partition"),
    "z_loss": ({"z_loss": 0.3}, "log_partition"),
    "z_loss and all": ({"z_loss": 0.3, "decoupled": True, "exclude": True, "normalize": True}, "log_partition"),
    "row_weight": ({"row_weight": True}, ""),
    "num_items": ({"num_items": 11}, ""),
    "row_weight and num_items": ({"row_weight": True, "num_items": torch.tensor(3.5)}, ""),
    "bound": ({"bound": True, "softcap": 2.0}, "bounded"),
    "bound and all": ({"bound": True, "exclude": "positives", "decoupled": True, "row_weight": True}, "bounded"),
}


def members(rows: list[Member]) -> Any:
    """Run a test once for each of these members."""
    return pytest.mark.parametrize("member", rows, ids=lambda member: member.name)


class Problem:
    """Queries, class vectors with a masked class, and rows with several positives, one of them ignored."""

    def __init__(self, single: bool = False) -> None:
        torch.manual_seed(7)
        self.input = torch.randn(ROWS, DIM, dtype=torch.float64)
        self.vectors = torch.randn(CLASSES, DIM, dtype=torch.float64)
        self.vectors[4] = 0.0
        self.bias = torch.randn(CLASSES, dtype=torch.float64)
        self.bias[9] = -torch.inf
        self.target = torch.tensor(
            [[3, 8, 20], [1, -100, -100], [2, 70, -100], [-100] * 3, [5, 6, 7], [82, 0, 4], [4] * 3]
        )
        if single:
            self.target = self.target[:, 0]
        self.weight = torch.rand(CLASSES, dtype=torch.float64) + 0.5
        self.row_weight = torch.tensor([1.0, 0.5, 0.0, 2.0, 3.0, 0.25, 1.0], dtype=torch.float64)
        # Some of no row, some of all kinds: the positive of another row, padding, a masked class, that of the largest
        # score, and so of a maximum that native code has found before.
        self.exclude = torch.randint(CLASSES, (ROWS, 6))
        self.exclude[:, 2], self.exclude[0, 0] = -100, 9
        self.exclude[:, 1] = (self.input @ self.vectors.T + self.bias).argmax(1)

    def keywords(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The keywords of a case with the tensors that its markers stand for."""
        made = dict(given)
        if made.get("row_weight") is True:
            made["row_weight"] = self.row_weight
        if made.get("bound") is True:
            made["bound"] = torch.linspace(-2, 3, ROWS, dtype=torch.float64)
        if "exclude" in made:
            own = self.target.reshape(ROWS, -1)
            others = self.exclude.clone()
            if made["exclude"] is True and own.shape[1] > 1:  # no positive of a row with several
                others[(others.unsqueeze(2) == own.unsqueeze(1)).any(2)] = -100
            made["exclude"] = torch.cat([others, own], 1) if made["exclude"] == "positives" else others
        return made


class Call:
    """One head with the keywords of a case, on one back end."""

    def __init__(self, member: Member, settings: Mapping[str, Any], given: Mapping[str, Any], backend: str) -> None:
        self.problem = Problem()
        self.member, self.settings, self.backend = member, settings, backend
        self.given = self.problem.keywords(given)
        self.tensors = [
            t.clone().requires_grad_() for t in (self.problem.input, self.problem.vectors, self.problem.bias)
        ]
        self.wanted = list(self.tensors)
        if isinstance(self.given.get("temperature"), Tensor):
            self.given["temperature"] = self.given["temperature"].clone().requires_grad_()
            self.wanted.append(self.given["temperature"])

    def loss(self, reduction: str = "mean") -> Tensor:
        """By the head."""
        input, vectors, bias = self.tensors
        options = {"backend": self.backend, "block_rows": 3}
        keywords = {**self.given, **self.settings, "reduction": reduction, "weight": self.problem.weight}
        head = head_function(self.member)
        return head(input, vectors, self.problem.target, linear_bias=bias, options=options, **keywords)

    def check(self, loss: Tensor, expected: Tensor) -> None:
        """Value and every gradient."""
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-10)
        found, theirs = torch.autograd.grad(loss, self.wanted), torch.autograd.grad(expected, self.wanted)
        for ours, other in zip(found, theirs, strict=True):
            # The reference multiplies 0 by the -inf of a masked class.
            torch.testing.assert_close(ours, torch.nan_to_num(other), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
@members(EXACT)
def test_every_keyword(member: Member, case: str, backend: str) -> None:
    given, needed = CASES[case]
    for settings in member.examples:
        call = Call(member, settings, given, backend)
        if needed and not getattr(member, needed):
            with pytest.raises(ArgumentError, match=r"no meaning|pass one row for each positive"):
                call.loss()
            continue
        call.check(call.loss(), reference(call))
        if "num_items" not in call.given:  # one loss per row: the same sum
            rows = call.loss("none")
            assert rows.shape == (ROWS,)
            call.check(rows.sum(), call.loss("sum"))


# Statistics --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@members(EXACT)
def test_every_statistic(member: Member, backend: str) -> None:
    """Against the probabilities of the member's map, in the shape of the rows; and the loss is as without them."""
    names = ("argmax", "correct", *member.statistics)
    for settings in member.examples:
        call = Call(member, settings, {"softcap": 6.0}, backend)
        plain = call.loss()
        call.given["stats"] = names
        found: Any = call.loss()
        assert isinstance(found, LossResult)
        call.check(found.loss, plain)
        expected = statistics(call)
        assert set(expected) >= set(names)
        for name in names:
            ours = getattr(found, name)
            assert ours.shape == (ROWS,)
            assert not ours.requires_grad
            torch.testing.assert_close(ours, expected[name].to(ours.dtype), rtol=1e-9, atol=1e-10, equal_nan=True)
        assert found.log_z is None or "log_z" in names


def statistics(call: Call) -> dict[str, Tensor]:
    """The statistics of the rows, from the whole table of scores."""
    input, vectors, bias = (tensor.detach() for tensor in call.tensors)
    scores, problem = input @ vectors.T + bias, call.problem
    cap = call.given["softcap"]
    scores = torch.where(scores > -torch.inf, cap * torch.tanh(scores / cap), scores)
    rows: dict[str, list[float]] = {name: [] for name in STATISTICS}
    for n, (s, row) in enumerate(zip(scores, problem.target, strict=True)):
        ids = row[row >= 0].unique()
        if not len(ids):
            found: dict[str, Any] = {name: float("nan") for name in STATISTICS} | {
                "argmax": -100,
                "correct": 0,
                "support": 0,
            }
        else:
            t = problem.weight[ids] / problem.weight[ids].sum()
            found = row_statistics(call, s, ids, t, bound(call, n, s))
        for name in STATISTICS:
            rows[name].append(float(found.get(name, 0)))
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in rows.items()}


def row_statistics(call: Call, s: Tensor, ids: Tensor, t: Tensor, b: Tensor) -> dict[str, Any]:
    """Those of a row with positives `ids` of weights t, which sum to 1."""
    member, settings = call.member, call.settings
    if member.needs_label:  # a map for each positive
        p = torch.stack([member.map(s, y, **settings)[y] for y in ids])  # type: ignore[misc]
        best = int(s.argmax())
        nothing = dict.fromkeys(STATISTICS, 0.0)
        found = {"nll": -(t * p.log()).sum(), "target_prob": (t * p).sum(), "argmax": best, "correct": best in ids}
        return nothing | found
    if member.map is None:
        best = int(s.argmax())
        return {"argmax": best, "correct": best in ids}
    p = member.map(s, **settings)
    best = int(p.argmax())
    partition = torch.logsumexp(s, 0)
    if member.name == "talos":
        partition = log_h(s, b, settings["tau"]).logsumexp(0)
    if "order" in settings:
        partition = (taylor_exp(s, settings["order"])).sum().log()
    return {
        "nll": -(t * p[ids].log()).sum(),
        "log_z": partition,
        "entropy": torch.special.entr(p).sum(),
        "argmax": best,
        "correct": best in ids,
        "target_prob": (t * p[ids]).sum(),
        "support": (p > 0).sum(),
    }


@members(EXACT)
def test_statistics_cost_no_product(member: Member) -> None:
    problem = Problem()
    leaves = [tensor.clone().requires_grad_() for tensor in (problem.input, problem.vectors, problem.bias)]

    def step(**keywords: Any) -> Any:
        result = head_function(member)(*leaves[:2], problem.target, linear_bias=leaves[2], **keywords)
        return result.loss if isinstance(result, LossResult) else result

    names = ("argmax", "correct", *member.statistics)
    counted = [products_of(lambda given=given: step(**given).backward(), CLASSES) for given in ({}, {"stats": names})]
    assert counted[0].count == counted[1].count > 0
    assert counted[0].rows == counted[1].rows


# Targets and rows --------------------------------------------------------------------------------


@members([member for member in EXACT if member.takes.float_rows])
def test_soft_targets_are_float_rows(member: Member) -> None:
    """The k best of a teacher, whose mass is below 1; a class that is listed twice; padding."""
    problem, random = Problem(), torch.Generator().manual_seed(1)
    ids = torch.randint(CLASSES, (ROWS, 4), generator=random)
    ids[ids == 9], ids[1], ids[2, 1:], ids[3, 1] = 8, -100, -100, ids[3, 0]
    probs = torch.rand(ROWS, 4, generator=random, dtype=torch.float64) / 5
    dense = torch.zeros(ROWS, CLASSES, dtype=torch.float64).scatter_add(1, ids.clamp(min=0), probs * (ids >= 0))
    for backend in BACKENDS:
        leaves = [tensor.clone().requires_grad_() for tensor in (problem.input, problem.vectors, problem.bias)]
        options, keywords = {"backend": backend}, {"weight": problem.weight}
        target = SoftTarget(ids, probs)
        loss = head_function(member)(*leaves[:2], target, linear_bias=leaves[2], options=options, **keywords)
        # As a sum over the classes of float rows that sum to 1: t = sum_i t_i e_i.
        scores = leaves[0] @ leaves[1].T + leaves[2]
        each = [[n, c] for n in range(ROWS) for c in range(CLASSES) if dense[n, c] > 0]
        rows, classes = torch.tensor(each).T
        terms = member.loss(scores[rows], classes, reduction="none")
        expected = (problem.weight[classes] * dense[rows, classes] * terms).sum() / (dense.sum(1) > 0).sum()
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-10)
        found, theirs = torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves)
        for ours, other in zip(found, theirs, strict=True):
            torch.testing.assert_close(ours, torch.nan_to_num(other), rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(member.loss(scores, target, **keywords), expected, rtol=1e-9, atol=1e-10)


@members(EXACT)
def test_shift_is_a_slice(member: Member) -> None:
    random = torch.Generator().manual_seed(0)
    input = torch.randn(2, 5, DIM, generator=random, dtype=torch.float64)
    vectors = torch.randn(CLASSES, DIM, generator=random, dtype=torch.float64)
    target = torch.randint(CLASSES, (2, 5), generator=random)
    head = head_function(member)
    shifted = head(input, vectors, target, shift=True, reduction="none")
    torch.testing.assert_close(shifted, head(input[:, :-1], vectors, target[:, 1:], reduction="none"))
    with pytest.raises(ArgumentError, match="one row less"):
        head(input, vectors, target, shift=True, row_weight=torch.ones(2, 5))


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"temperature": 0.0}, ArgumentError, "temperature"),
    ({"temperature": torch.ones(2)}, ArgumentTypeError, "temperature"),
    ({"temperature": "1"}, ArgumentTypeError, "temperature"),
    ({"softcap": 0.0}, ArgumentError, "softcap"),
    ({"softcap": True}, ArgumentTypeError, "softcap"),
    ({"z_loss": -1.0}, ArgumentError, "z_loss"),
    ({"exclude": torch.zeros(3, 2, dtype=torch.long)}, ArgumentError, "exclude"),
    ({"exclude": torch.full((4, 2), 83)}, ArgumentError, "exclude"),
    ({"exclude": torch.zeros(4, 2)}, ArgumentTypeError, "exclude"),
    ({"row_weight": torch.ones(3)}, ArgumentError, "row_weight"),
    ({"row_weight": torch.full((4,), torch.nan)}, ArgumentError, "row_weight"),
    ({"row_weight": -torch.ones(4)}, ArgumentError, "num_items"),
    ({"num_items": 0}, ArgumentError, "num_items"),
    ({"num_items": 3, "reduction": "sum"}, ArgumentError, "num_items"),
    ({"num_items": "3"}, ArgumentTypeError, "num_items"),
    ({"stats": ("nil",)}, ArgumentError, "Did you mean 'nll'"),
    ({"shift": True, "target": torch.arange(3)}, ArgumentError, "shift"),
    ({"decoupled": True, "label_smoothing": 0.1}, ArgumentError, "contradict"),
    ({"decoupled": True, "stats": ("nll",)}, ArgumentError, "contradict"),
    ({"target": SoftTarget(torch.zeros(4, 2, dtype=torch.long), -torch.ones(4, 2))}, ArgumentError, "probs"),
    ({"target": SoftTarget(torch.full((4, 2), 83), torch.ones(4, 2))}, ArgumentError, "ids"),
    ({"target": SoftTarget(torch.zeros(4, 2, dtype=torch.long), torch.ones(4, 3))}, ArgumentError, "both"),
]


@pytest.mark.parametrize(("given", "error", "words"), BAD, ids=lambda value: str(value)[:40])
def test_bad_values_are_refused(given: dict[str, Any], error: type[Exception], words: str) -> None:
    input, vectors = torch.zeros(4, DIM), torch.zeros(CLASSES, DIM)
    keywords = {"target": torch.arange(4), **given}
    with pytest.raises(error, match=words):
        manymax.linear_softmax_loss(input, vectors, **keywords)


def test_what_has_no_meaning_is_refused_with_a_reason() -> None:
    input, vectors, target = torch.zeros(4, DIM), torch.zeros(CLASSES, DIM), torch.arange(4)
    for name, keyword in (
        ("sparsemax", "decoupled"),
        ("rankmax", "decoupled"),
        ("softmax", "bound"),
        ("rg", "normalize"),
    ):
        with pytest.raises(ArgumentError, match=f"`{keyword}` has no meaning for {name}: "):
            manymax.linear_loss(name, input, vectors, target, **{keyword: target if keyword == "bound" else True})
    for keyword in ("temperature", "row_weight", "stats"):
        with pytest.raises(ArgumentError, match=f"`{keyword}` has no meaning for hierarchical_softmax: "):
            manymax.linear_hierarchical_softmax_loss(input, vectors, target, **{keyword: 1})
        with pytest.raises(ArgumentError, match=f"`{keyword}` has no meaning for hierarchical_softmax: "):
            manymax.LinearHierarchicalSoftmaxLoss(DIM, CLASSES, **{keyword: 1})
    with pytest.raises(ArgumentError, match="rankmax has no 'log_z'"):
        manymax.linear_loss("rankmax", input, vectors, target, stats=("log_z",))

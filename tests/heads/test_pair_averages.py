"""The compositional correction: each training pair keeps a moving average of its estimated sums from step to step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

import manymax
from manymax import ArgumentError
from manymax.engine import drawn_blocks, native_library
from manymax.samplers import InBatchSampler, UniformSampler
from tests.heads.plain import needs_library

CLASSES, ROWS, DIM, NEGATIVES, PAIRS = 23, 70, 4, 6, 200
BACKENDS = ["torch", *(pytest.param(f"native-{level}", marks=needs_library) for level in native_library.levels_here())]
PARTITION = {"correction": "partition"}
# How the positives of a batch are given. Each has rows without one, and pairs that are not in order.
FORMS = ("ids", "padded", "grouped", "shift")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 64 rows, so that there are several of them."""
    monkeypatch.setattr(drawn_blocks, "CLOSED_FORM_SCORES", 1)


class Step:
    """Queries, class vectors and targets of a step, and a list of its positives: (row, class, pair, weight)."""

    def __init__(self, form: str, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        shape = (ROWS // 7, 7) if form == "shift" else (ROWS,)
        self.input = torch.randn(*shape, DIM, generator=random, dtype=torch.float64).requires_grad_()
        self.vectors = torch.randn(CLASSES, DIM, generator=random, dtype=torch.float64).requires_grad_()
        self.weight = torch.rand(*shape, generator=random, dtype=torch.float64)
        self.weight.view(-1)[3] = 0.0
        count = () if form in ("ids", "shift") else (3,)
        self.target = torch.randint(CLASSES, (*shape, *count), generator=random)
        self.target.view(ROWS, -1)[11] = -100
        if form == "padded":
            self.target[20] = torch.tensor([5, 2, 5])  # a class that is listed twice counts once
        # Few numbers, so that some pairs are met several times in one step.
        self.ids = torch.randint(40, self.target.shape, generator=random)
        self.keywords: dict[str, Any] = {"row_weight": self.weight}
        rows, target, ids = torch.arange(ROWS), self.target, self.ids
        if form == "shift":
            self.keywords = {"row_weight": self.weight[:, 1:], "shift": True}
            rows, target, ids = rows.view(shape)[:, :-1].flatten(), target[:, 1:].flatten(), ids[:, 1:].flatten()
        found: dict[tuple[int, int], tuple[int, float]] = {}
        weights = self.keywords["row_weight"].flatten()
        for place, row in enumerate(rows.tolist()):
            for c, number in zip(target[place].view(-1).tolist(), ids[place].view(-1).tolist(), strict=True):
                if c >= 0 and weights[place] != 0:
                    found.setdefault((row, c), (number, weights[place].item()))
        self.positives = [(row, c, *found[row, c]) for row, c in sorted(found)]
        if form == "grouped":
            rows, column = (self.target >= 0).nonzero(as_tuple=True)
            pairs = rows, self.target[rows, column], self.ids[rows, column]
            groups, self.target, self.ids = manymax.group_pairs(*pairs)
            self._of_groups(pairs, groups)

    def _of_groups(self, pairs: tuple[Tensor, ...], groups: Tensor) -> None:
        """Only rows with a positive are left; a pair that occurs twice has its smallest number and twice the weight."""
        smallest: dict[tuple[int, int], int] = {}
        times: dict[tuple[int, int], int] = {}
        for row, c, number in zip(*(column.tolist() for column in pairs), strict=True):
            smallest[row, c] = min(number, smallest.get((row, c), number))
            times[row, c] = times.get((row, c), 0) + 1
        weight = self.weight.tolist()
        keys = [key for key in sorted(smallest) if weight[key[0]] != 0]
        self.positives = [(*key, smallest[key], weight[key[0]] * times[key]) for key in keys]
        self.keywords = {"row_weight": self.weight[groups]}
        self.groups = groups

    def queries(self) -> Tensor:
        return self.input[self.groups] if hasattr(self, "groups") else self.input


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def by_hand(step: Step, averages: dict[int, float], gamma: float, shared: bool, decoupled: bool) -> tuple[Tensor, ...]:
    """The mean loss and a sum whose gradient is that of the head, pair by pair; `averages` are of u itself."""
    rows, classes = (torch.tensor(column) for column in list(zip(*step.positives, strict=True))[:2])
    scores = step.input.view(ROWS, DIM) @ step.vectors.T
    owner = rows if (rows[1:] == rows[:-1]).any() else None
    draw = UniformSampler(CLASSES)(
        NEGATIVES, target=classes, owner=owner, input=scores[rows].detach(), shared=shared, generator=generator()
    )
    sums = []
    for place, (row, c, _, _) in enumerate(step.positives):
        ids = draw.ids if shared else draw.ids[place]
        weights = (scores[row, ids] - scores[row, c]).exp() * CLASSES / NEGATIVES
        sums.append((weights * (ids != c)).sum() + (0 if decoupled else 1))
    by_pair: dict[int, list[float]] = {}
    for (_, _, number, _), g in zip(step.positives, sums, strict=True):
        by_pair.setdefault(number, []).append(g.item())
    for number, found in by_pair.items():
        mean = sum(found) / len(found)
        averages[number] = (1 - gamma) * averages.get(number, mean) + gamma * mean
    divisor = sum(weight for *_, weight in step.positives)
    loss = sum(weight * math.log(averages[number]) for *_, number, weight in step.positives) / divisor
    surrogate = [
        weight * g / averages[number] / divisor for (*_, number, weight), g in zip(step.positives, sums, strict=True)
    ]
    return torch.tensor(loss, dtype=torch.float64), torch.stack(surrogate).sum()


@pytest.mark.parametrize("decoupled", [False, True], ids=["coupled", "decoupled"])
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("form", FORMS)
def test_three_steps_by_hand(form: str, shared: bool, decoupled: bool) -> None:
    expected: dict[int, float] = {}
    averages = torch.full((PAIRS,), -torch.inf, dtype=torch.float64)
    head = manymax.LinearSampledSoftmaxLoss(
        None, CLASSES, num_negatives=NEGATIVES, shared=shared, decoupled=decoupled, compositional=0.3, **PARTITION
    )
    for number in range(3):
        step = Step(form, number)
        # A new target has new numbers of pairs in part: some pairs are met for the first time in each step.
        head.generator, head.shift = generator(), "shift" in step.keywords
        rows = {"row_weight": step.keywords["row_weight"]}
        loss = head(step.queries(), step.target, step.vectors, pair_ids=step.ids, pair_averages=averages, **rows)
        value, surrogate = by_hand(step, expected, 0.3, shared, decoupled)
        torch.testing.assert_close(loss.detach(), value, rtol=1e-10, atol=0)
        leaves = step.input, step.vectors
        for found, wanted in zip(
            torch.autograd.grad(loss, leaves), torch.autograd.grad(surrogate, leaves), strict=True
        ):
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
        met = torch.tensor([math.log(expected[i]) if i in expected else -math.inf for i in range(PAIRS)])
        torch.testing.assert_close(averages, met.double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_with_gamma_one_it_is_plain_sampled_softmax(shared: bool, reduction: str, backend: str) -> None:
    step, results = Step("ids", 0), []
    for given in ({}, {"compositional": 1.0, "num_pairs": PAIRS}):
        how = {"shared": shared, "reduction": reduction, "options": {"backend": backend}, **PARTITION}
        head = manymax.LinearSampledSoftmaxLoss(None, CLASSES, num_negatives=NEGATIVES, **how, **given)
        for _ in range(2):  # the averages of the first step have no weight in the second
            head.generator = generator()
            ids = {"pair_ids": torch.arange(ROWS)} if given else {}
            leaves = [tensor.detach().float().requires_grad_() for tensor in (step.input, step.vectors)]
            loss = head(leaves[0], step.target, leaves[1], **ids)
            upstream = torch.linspace(1, 2, loss.numel()).view(loss.shape)
        results.append((loss.detach(), *torch.autograd.grad(loss, leaves, upstream)))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted)


def test_the_plain_loss_is_that_of_the_head() -> None:
    step = Step("ids", 0)
    step.target[11] = 0
    ids, scores = torch.arange(ROWS), (step.input @ step.vectors.T).detach()
    sampler = InBatchSampler(CLASSES, counts=1.0 + torch.arange(CLASSES))
    head = manymax.LinearSampledSoftmaxLoss(
        None, CLASSES, sampler, None, shared=True, compositional=0.25, num_pairs=ROWS, **PARTITION
    )
    plain = manymax.SampledSoftmaxLoss(compositional=0.25, num_pairs=ROWS, **PARTITION)
    for _ in range(2):
        draw = sampler(None, target=step.target, input=step.input.detach(), shared=True)
        own = draw.source_row == ids.unsqueeze(1)
        negative = torch.where(own, -torch.inf, scores[:, draw.ids])
        log_q = draw.log_q + math.log(1 - 1 / ROWS)  # one of the columns is the row's own positive, and no draw
        hits = draw.ids == step.target.unsqueeze(1)
        positive = scores.gather(1, step.target.unsqueeze(1)).squeeze(1)
        expected = plain(positive, negative, log_q_negative=log_q, hits=hits, pair_ids=ids)
        found = head(step.input.detach(), step.target, step.vectors.detach(), pair_ids=ids)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        assert plain.pair_averages is not None
        torch.testing.assert_close(head.pair_averages, plain.pair_averages)
        scores = scores * 1.1
        step.input.data *= 1.1


def gradients(scores: Tensor, log_q: Tensor, gamma: float, k: int, chains: int, steps: int) -> tuple[Tensor, Tensor]:
    """The mean gradient (C,) at fixed scores with the label 0, once averages have settled, and its standard error."""
    random = torch.Generator().manual_seed(1)
    averages, total = torch.full((chains,), -torch.inf, dtype=torch.float64), torch.zeros(chains, len(scores)).double()
    settled = math.ceil(6 / gamma)
    for step in range(settled + steps):
        ids = torch.multinomial(log_q.exp(), chains * k, replacement=True, generator=random).view(chains, k)
        leaf = scores.expand(chains, -1).clone().requires_grad_()
        loss = manymax.sampled_softmax_loss(
            leaf[:, 0],
            leaf.gather(1, ids),
            log_q_negative=log_q[ids],
            hits=ids == 0,
            compositional=gamma,
            pair_ids=torch.arange(chains),
            pair_averages=averages,
            reduction="sum",
            **PARTITION,
        )
        if step >= settled:
            total += torch.autograd.grad(loss, leaf)[0] / steps
    return total.mean(0), total.std(0) / chains**0.5


def predicted_bias(scores: Tensor, log_q: Tensor, gamma: float, k: int) -> Tensor:
    """The leading term of the bias of the gradient in the scores (C,) at fixed scores.

    With a sum g, its gradient G, and X and H one draw's part of both: g' / u = (G + H - E H) / (g + U), where U is the
    error of the average. Var U = gamma / (2 - gamma) Var X / k and Cov(H, U) = gamma Cov(H, X) / k.
    """
    q = log_q.exp()
    x = ((scores - scores[0]).exp() / q).index_fill(0, torch.tensor([0]), 0.0)  # of a draw of each class
    slopes = torch.diag(x)
    slopes[:, 0] = -x  # the score of the positive is in all of them
    mean, g, slope = q @ x, 1 + q @ x, q @ slopes
    variance, covariance = q @ (x - mean) ** 2, (q * (x - mean)) @ slopes
    return (slope / g**3 * variance * gamma / (2 - gamma) - gamma * covariance / g**2) / k


def test_at_fixed_scores_the_gradient_becomes_the_exact_one_as_gamma_falls() -> None:
    scores = torch.tensor([0.3, 1.0, -0.5, 0.0, 0.7], dtype=torch.float64)
    log_q = torch.tensor([0.2, 0.35, 0.15, 0.2, 0.1], dtype=torch.float64).log()
    exact, k, biases = scores.softmax(0) - torch.eye(5)[0], 8, []
    for gamma in (1.0, 0.3, 0.1):
        mean, error = gradients(scores, log_q, gamma, k, chains=4000, steps=60)
        bias, expected = mean - exact, predicted_bias(scores, log_q, gamma, k)
        # The next terms of the series are smaller by a factor of about Var X / (k g^2) gamma.
        assert ((bias - expected).abs() <= 4 * error + 0.15 * gamma * expected.abs().max()).all()
        assert bias.abs().max() > 8 * error.max()  # what is measured is not noise
        biases.append(bias.abs().max().item())
    assert biases[1] < 0.35 * biases[0]
    assert biases[2] < 0.15 * biases[0]


def test_averages_of_huge_and_tiny_sums_are_finite() -> None:
    averages = torch.full((2,), -torch.inf)
    for sign in (1.0, -1.0):
        positive = torch.tensor([1e4, -1e4], requires_grad=True)
        loss = manymax.sampled_softmax_loss(
            positive,
            torch.zeros(2, 3),
            log_q_negative=0.0,
            compositional=0.5,
            pair_ids=torch.tensor([0, 1] if sign > 0 else [1, 0]),
            pair_averages=averages,
            hit_policy="keep",
            **PARTITION,
        )
        loss.backward()
        assert loss.isfinite()
        assert positive.grad is not None
        assert positive.grad.isfinite().all()
    # u of both is half of exp(10,000) now: the other half is 1.
    torch.testing.assert_close(averages, torch.full((2,), 1e4 - math.log(2)))


def test_a_loss_that_overflows_is_refused_and_not_kept() -> None:
    averages = torch.tensor([0.5, -torch.inf, 0.5])
    with pytest.raises(ArgumentError, match="the loss is nan: scores are so far apart"):
        manymax.sampled_softmax_loss(
            torch.tensor([-3e38, -3e38, 0.0]),
            torch.tensor([[3e38], [3e38], [0.0]]),
            log_q_negative=0.0,
            compositional=0.5,
            pair_ids=torch.arange(3),
            pair_averages=averages,
            hit_policy="keep",
            **PARTITION,
        )
    assert averages[:2].tolist() == [0.5, -math.inf]


def test_a_saved_head_goes_on_bit_for_bit_and_an_evaluation_changes_nothing() -> None:
    def make() -> Any:
        return manymax.LinearSampledSoftmaxLoss(
            None,
            CLASSES,
            num_negatives=NEGATIVES,
            compositional=0.1,
            num_pairs=PAIRS,
            generator=generator(),
            **PARTITION,
        )

    steps = [Step("ids", number) for number in range(4)]

    def advance(head: Any, part: list[Step]) -> list[Tensor]:
        return [head(s.input, s.target, s.vectors, pair_ids=s.ids).detach() for s in part]

    whole = make()
    losses = advance(whole, steps)
    first = make()
    advance(first, steps[:2])
    kept = first.pair_averages.clone()
    advance(first.eval(), steps[2:])
    assert first.pair_averages.equal(kept)
    second = make()
    second.load_state_dict(first.state_dict())
    second.generator.set_state(make_state(make, steps[:2], advance))
    assert advance(second, steps[2:]) == losses[2:]
    assert second.pair_averages.equal(whole.pair_averages)
    # A head that keeps nothing has the state that it always had.
    assert "pair_averages" not in manymax.LinearSampledSoftmaxLoss(DIM, CLASSES).state_dict()


def make_state(make: Any, steps: list[Step], advance: Any) -> Tensor:
    """The state of the generator of negatives after some steps."""
    head = make()
    advance(head, steps)
    state: Tensor = head.generator.get_state()
    return state


def call(**given: Any) -> Tensor:
    """A call of the function with averages for four pairs, or with what is given."""
    usual: dict[str, Any] = {"compositional": 0.1, "pair_ids": torch.arange(4), "pair_averages": torch.zeros(4)}
    usual |= {"target": torch.arange(4), "num_negatives": 3, **PARTITION, **given}
    target = usual.pop("target")
    kept = {name: value for name, value in usual.items() if value is not None}
    return manymax.linear_sampled_softmax_loss(
        torch.ones(4, DIM), torch.ones(CLASSES, DIM), target, UniformSampler(CLASSES), **kept
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"compositional": 0.0}, r"`compositional` must be a number in \(0, 1\]"),
        ({"compositional": 1.5}, r"`compositional` must be a number in \(0, 1\]"),
        ({"compositional": math.nan}, "`compositional` must be a number; got nan"),
        ({"correction": "logq"}, "`compositional` is for `correction='partition'`"),
        ({"debias": "delta"}, "`debias='delta'` and `compositional` contradict each other"),
        ({"z_loss": 0.1}, "`z_loss` and `compositional` contradict each other"),
        ({"pair_ids": None}, "`pair_ids` is missing"),
        ({"pair_averages": None}, "`pair_averages` is missing"),
        ({"compositional": None}, "`pair_ids` has no effect on a loss without `compositional`"),
        ({"pair_ids": torch.arange(3)}, r"`pair_ids` must have a number for each positive, \(4,\); got \(3,\)"),
        ({"pair_ids": torch.arange(4.0)}, "`pair_ids` must be a tensor of integer ids; got torch.float32"),
        ({"pair_ids": torch.arange(4) - 1}, r"`pair_ids` must be in \[0, 4\), .*; got -1 to 2"),
        ({"pair_ids": torch.arange(4) + 1}, r"`pair_ids` must be in \[0, 4\), .*; got 1 to 4"),
        ({"pair_averages": torch.tensor([0.0, math.nan, 0.0, 0.0])}, "`pair_averages` must hold finite .* got nan"),
        ({"pair_averages": torch.tensor([0.0, math.inf, 0.0, 0.0])}, "`pair_averages` must hold finite .* got inf"),
        ({"pair_averages": torch.zeros(4).bfloat16()}, "`pair_averages` must be a tensor of float32 or float64"),
        ({"pair_averages": torch.zeros(4, 1)}, r"`pair_averages` must be \(num_pairs,\), .* shape \(4, 1\)"),
        ({"pair_averages": torch.zeros(4, requires_grad=True)}, r"`pair_averages` must be .* \(4,\) with one"),
        ({"target": torch.eye(4, CLASSES).bool()}, "`pair_ids` number the positives of a row: pass `target` as ids"),
    ],
)
def test_what_is_refused_changes_no_average(given: dict[str, Any], message: str) -> None:
    averages = given.get("pair_averages")
    before = None if averages is None else averages.detach().clone()
    with pytest.raises(manymax.ManymaxError, match=message):
        call(**given)
    if before is not None:
        torch.testing.assert_close(averages.detach(), before, equal_nan=True)


def test_numbers_of_pairs_are_refused_where_they_mean_nothing() -> None:
    make = manymax.LinearSampledSoftmaxLoss
    with pytest.raises(ArgumentError, match="`num_pairs` has no effect without `compositional`"):
        make(None, CLASSES, num_pairs=3)
    with pytest.raises(ArgumentError, match="`num_pairs` must be an integer of at least 1; got 0"):
        make(None, CLASSES, compositional=0.1, num_pairs=0, **PARTITION)
    with pytest.raises(ArgumentError, match="`pair_ids` has no effect on a loss without"):
        manymax.LinearNCELoss(DIM, CLASSES)(torch.ones(4, DIM), torch.arange(4), pair_ids=torch.arange(4))
    with pytest.raises(ArgumentError, match="`pair_ids` must be as long as `rows`"):
        manymax.group_pairs(torch.arange(3), torch.arange(3), torch.arange(2))


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(ArgumentError, match=r"`compositional` works in one process, .* here are 2"):
        call()


def test_a_step_of_nothing_leaves_averages_as_they_are() -> None:
    averages = torch.full((4,), 0.5)
    assert call(target=torch.full((4,), -100), pair_averages=averages) == 0
    assert call(row_weight=torch.tensor([0.0, 1.0, 0.0, 0.0]), pair_averages=averages) > 0
    assert (averages == 0.5).tolist() == [True, False, True, True]

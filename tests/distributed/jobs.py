"""What the ranks do in the tests: the sharded head next to the head on one machine, value and every gradient."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import manymax
from manymax import ArgumentError, ManymaxError
from manymax.distributed import Network, ShardedHead, measure_network
from manymax.distributed.collectives import ProcessRanks
from manymax.engine import native
from manymax.engine.head import LinearHead
from manymax.samplers import SAMPLERS, Draw, Sampler
from tests.heads.plain import Problem, agree, class_weights, make_problem, make_target, upstream

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


SAMPLED = ("SampledSoftmax", "NCE", "BPR", "BCE")


def uneven(num_classes: int, ranks: int) -> list[int]:
    """Half of what is left for every rank but the last, which gets the rest."""
    sizes: list[int] = []
    for _ in range(ranks - 1):
        sizes.append((num_classes - sum(sizes)) // 2)
    return [*sizes, num_classes - sum(sizes)]


def make_head(name: str, problem: Problem, **options: Any) -> LinearHead:
    """A head on one machine with the class vectors of the problem."""
    dtype, (num_classes, dim) = problem.linear_weight.dtype, problem.linear_weight.shape
    bias = problem.linear_bias is not None
    if name in SAMPLED:
        sampler = options.pop("sampler", {"name": "uniform"})
        counts = 1.0 + torch.arange(num_classes) % 7
        made = SAMPLERS[sampler["name"]].make(num_classes, counts, **sampler.get("options", {}))
        options = {"num_negatives": 7, "sampler": made, "generator": torch.Generator().manual_seed(5), **options}
    made_by = getattr(manymax.heads, f"Linear{name}Loss")
    if "options" in options:  # what has no effect on a head is refused
        options["options"] = {k: v for k, v in options["options"].items() if k in made_by.honours}
    head = made_by(dim, num_classes, bias=bias, dtype=dtype, **options)
    with torch.no_grad():
        head.linear.weight.copy_(problem.linear_weight)
        if bias:
            head.linear.bias.copy_(problem.linear_bias)
    return head.to(dtype)


def gradients(head: Any, input: Tensor, target: Any) -> dict[str, Tensor]:
    """The loss and its gradients in the queries and in every parameter, dense."""
    value = head(input, target)
    names, parameters = zip(*head.named_parameters(), strict=True)
    grads = torch.autograd.grad(value, [input, *parameters], upstream(value), materialize_grads=True)
    found = {"value": value.detach(), "input": grads[0]}
    return found | {name: grad.to_dense() for name, grad in zip(names, grads[1:], strict=True)}


def compare(
    group: dist.ProcessGroup,
    name: str,
    problem: Problem,
    target: Any,
    sizes: list[int] | None = None,
    **options: Any,
) -> None:
    """Hold the sharded head to the head on one machine."""
    dtype = problem.linear_weight.dtype
    whole = make_head(name, problem, **options)
    sharded = ShardedHead(make_head(name, problem, **options), sizes=sizes, group=group)
    input = problem.input.clone().requires_grad_()
    expected = gradients(whole, input, target)
    actual = gradients(sharded, input, target)
    start, stop = sharded.span.tolist()
    for key in ("linear.weight", "linear.bias"):
        if key in expected:
            expected[key] = expected[key][start:stop]
    actual = {key.removeprefix("head."): grad for key, grad in actual.items()}
    assert list(actual) == list(expected)
    unit = max([1.0, *problem.input.abs().flatten().tolist()])
    note = (name, options, sizes, dist.get_rank(group))
    for key in expected:
        agree([actual[key]], [expected[key]], TOLERANCE[dtype], (key, note), unit)
    same_everywhere(actual["value"], group)
    same_everywhere(actual["input"], group)


def same_everywhere(value: Tensor, group: dist.ProcessGroup) -> None:
    """Bit for bit."""
    gathered = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, value.contiguous(), group=group)
    assert all(torch.equal(value, other) for other in gathered)


def exact_options(name: str) -> list[dict[str, Any]]:
    """Every reduction, multilabel mode, smoothing and class weight with every other."""
    smoothing = (0.0,) if name == "Rankmax" else (0.0, 0.25)
    choices = itertools.product(("sum", "normalized"), smoothing, (False, True), ("mean", "sum", "none"))
    names = ("multilabel", "label_smoothing", "weighted", "reduction")
    return [dict(zip(names, choice, strict=True)) for choice in choices]


def every_option(group: dist.ProcessGroup, name: str, kind: str, setting: Mapping[str, Any], part: int) -> int:
    """A quarter of all combinations, for masked classes, ignored rows, batch dimensions and uneven shards."""
    num_classes = 67
    problem = make_problem(3, 4, num_classes=num_classes, masked=True)
    target = make_target(kind, 3, 4, num_classes=num_classes)
    sizes = uneven(num_classes, dist.get_world_size(group))
    chosen = exact_options(name)[part::4]
    for options in chosen:
        weight = class_weights(num_classes) if options.pop("weighted") else None
        compare(group, name, problem, target, sizes, weight=weight, **options, **setting)
    return len(chosen)


def supports(group: dist.ProcessGroup, name: str, setting: Mapping[str, Any]) -> None:
    """Wide, thin and mixed supports of many classes, with and without bias, float64 and float32, sparse gradients."""
    for regime, (dtype, bias, sparse) in itertools.product(
        ("wide", "near", "thin", "mixed"),
        ((torch.float64, True, False), (torch.float32, False, False), (torch.float64, False, True)),
    ):
        problem = make_problem(13, num_classes=1203, regime=regime, bias=bias)
        problem = Problem(*(None if part is None else part.to(dtype) for part in problem_parts(problem)))
        target = make_target("ids", 13, num_classes=1203)
        options = {"block_rows": 6, "sparse_grad": sparse}
        compare(group, name, problem, target, options=options, **setting)
        if native.available():
            compare(group, name, problem, target, options={**options, "compiled": True}, **setting)


def problem_parts(problem: Problem) -> tuple[Tensor, Tensor, Tensor | None]:
    return problem.input, problem.linear_weight, problem.linear_bias


def one_rank_has_it_all(group: dist.ProcessGroup, name: str, setting: Mapping[str, Any]) -> None:
    """All classes of a row's support and its positive on one rank, whichever it is; all others far below, or masked."""
    num_classes = 90
    for top, floor in itertools.product((2, 44, 87), (-40.0, -torch.inf)):
        problem = make_problem(6, num_classes=num_classes, regime="near")
        bias = torch.where((torch.arange(num_classes) - top).abs() < 3, 0.0, floor).double()
        problem = Problem(problem.input, problem.linear_weight, bias)
        far = top if floor == -torch.inf else (top + 45) % num_classes
        compare(group, name, problem, torch.tensor([top, top + 1, top - 1, top, -100, far]), **setting)


def grouped_and_empty(group: dist.ProcessGroup, name: str, setting: Mapping[str, Any]) -> None:
    """Grouped pairs, no rows at all, nothing but ignored rows, one class per rank."""
    _, pairs = manymax.group_pairs(torch.tensor([7, 3, 7, 7, 5]), torch.tensor([0, 2, 1, 1, 19]))
    compare(group, name, make_problem(3, num_classes=20), pairs, **setting)
    compare(group, name, make_problem(0, num_classes=20), torch.zeros(0, dtype=torch.long), **setting)
    compare(group, name, make_problem(4, num_classes=20), torch.full((4,), -100), **setting)
    ranks = dist.get_world_size(group)
    compare(group, name, make_problem(5, num_classes=ranks), torch.arange(5) % ranks, **setting)


def learned_alpha(group: dist.ProcessGroup) -> None:
    """The gradient of alpha, with and without Omega in the loss."""
    for alpha, multilabel, (kind, reduction) in itertools.product(
        (1.1, 1.5, 1.9), ("sum", "normalized"), (("ids", "mean"), ("float rows", "none"))
    ):
        problem, target = make_problem(8, num_classes=60), make_target(kind, 8, num_classes=60)
        options = {"multilabel": multilabel, "reduction": reduction, "label_smoothing": 0.1}
        compare(group, "Entmax", problem, target, alpha=alpha, learnable=True, **options)


# Sampled -----------------------------------------------------------------------------------------


def every_sampler(group: dist.ProcessGroup, name: str, settings: Mapping[str, Any]) -> None:
    """All samplers, per row and shared, dense and sparse, ids and several positives."""
    for entry in SAMPLERS.values():
        if entry.name == "midx":  # follows all class vectors: has a test of its own
            continue
        for options, shared, (kind, sparse) in itertools.product(
            entry.examples, (False, True), (("ids", False), ("padded ids", True), ("bool rows", False))
        ):
            problem, target = make_problem(9, num_classes=40), make_target(kind, 9, num_classes=40)
            sampler = {"name": entry.name, "options": options}
            k = 3 if entry.needs_scores or entry.name == "in_batch" else 7
            compare(
                group,
                name,
                problem,
                target,
                sampler=sampler,
                shared=shared,
                sparse_grad=sparse,
                num_negatives=k,
                **settings,
            )


def sampled_options(group: dist.ProcessGroup, name: str, settings: Mapping[str, Any], part: int) -> None:
    """Half of the reductions, multilabel modes, class weights and hit policies; hits are frequent with few classes."""
    choices = itertools.product(("mean", "sum", "none"), ("sum", "normalized"), (False, True), ("keep", "mask"))
    for index, (reduction, multilabel, weighted, hit_policy) in enumerate(choices):
        if sum(divmod(index, 4)) % 2 != part:
            continue
        problem, target = make_problem(2, 5, num_classes=9), make_target("padded ids", 2, 5, num_classes=9)
        weight = class_weights(9) if weighted else None
        options = {"reduction": reduction, "multilabel": multilabel, "weight": weight}
        if name in ("SampledSoftmax", "NCE"):
            options["hit_policy"] = hit_policy
        sampler = {"name": "popularity" if index % 3 else "uniform"}
        sizes = uneven(9, dist.get_world_size(group))
        compare(group, name, problem, target, sizes, sampler=sampler, **{**settings, **options})


def touched_rows(group: dist.ProcessGroup) -> None:
    """A row-sparse gradient has the rows of this rank that the head on one machine has."""
    random = torch.Generator().manual_seed(2)
    problem = Problem(*(9.0 * torch.randn(size, 6, generator=random) for size in (9, 1203)))
    target = problem.scores().topk(2).indices[:, 1]  # few classes are near it
    for name, options in (
        ("Sparsemax", {"options": {"sparse_grad": True}}),
        ("Rankmax", {"options": {"sparse_grad": True}}),
        ("SampledSoftmax", {"sparse": True}),
        ("NCE", {"sparse": True, "shared": True}),
    ):
        whole, sharded = make_head(name, problem, **options), make_head(name, problem, **options)
        sharded = ShardedHead(sharded, group=group)
        whole(problem.input, target).backward()
        sharded(problem.input, target).backward()
        expected, own = (head.weight.grad.coalesce().indices()[0] for head in (whole.linear, sharded.head.linear))
        start, stop = sharded.span.tolist()
        assert 0 < len(expected) < 1203
        assert torch.equal(own + start, expected[(expected >= start) & (expected < stop)]), name


def large_offset(group: dist.ProcessGroup, name: str) -> None:
    """In float32 an offset of the scores, which are exact all the same, must not cost the digits of log q."""
    problem = make_problem(9, num_classes=40, regime="near")
    parts = [part.float() for part in problem.parts()]
    problem = Problem(parts[0], parts[1], parts[2] + 4096)
    target = make_target("ids", 9, num_classes=40)
    options = {"reduction": "none"} | ({"sampler": {"name": "popularity"}} if name == "SampledSoftmax" else {})
    exact = make_head(name, Problem(*(part.double() for part in problem.parts())), **options)
    sharded = ShardedHead(make_head(name, problem, **options), group=group)
    agree([sharded(problem.input, target).detach()], [exact(problem.input.double(), target).detach()], 1e-6)


def quantised(group: dist.ProcessGroup) -> None:
    """MIDX follows the class vectors that it was shown; without any it says what to do."""
    problem, target = make_problem(9, num_classes=40), make_target("ids", 9, num_classes=40)
    heads = [make_head("NCE", problem, sampler={"name": "midx", "options": {"num_codewords": 3}}) for _ in range(2)]
    for head in heads:
        head.sampler.refresh(problem.linear_weight, torch.Generator().manual_seed(1))
    expected = gradients(heads[0], problem.input.clone().requires_grad_(), target)
    actual = gradients(ShardedHead(heads[1], group=group), problem.input.clone().requires_grad_(), target)
    agree([actual["value"], actual["input"]], [expected["value"], expected["input"]], 1e-10)
    fresh = ShardedHead(make_head("NCE", problem, sampler={"name": "midx", "options": {}}), group=group)
    with pytest.raises(ArgumentError, match=r"call `refresh\(linear_weight\)`"):
        fresh(problem.input, target)


def remembering(sampler: Sampler) -> list[Draw]:
    """Every draw from now on."""
    drawn: list[Draw] = []
    draw = sampler.draw

    def remembered(request: Any) -> Draw:
        drawn.append(draw(request))
        return drawn[-1]

    sampler.draw = remembered  # type: ignore[method-assign]
    return drawn


def draws_without_a_generator(group: dist.ProcessGroup, shared: bool) -> float:
    """ProcessRanks whose global generators differ, or whose own generators do, still draw the same negatives."""
    problem, target = make_problem(9, num_classes=40), make_target("ids", 9, num_classes=40)
    values = []
    for own in (False, True):
        torch.manual_seed(100 + dist.get_rank(group))
        generator = torch.Generator().manual_seed(100 + dist.get_rank(group)) if own else None
        head = ShardedHead(make_head("SampledSoftmax", problem, shared=shared, generator=generator), group=group)
        drawn = remembering(head.head.sampler)
        value = head(problem.input, target)
        same_everywhere(value.detach(), group)
        same_everywhere(drawn[0].ids, group)
        assert float(head(problem.input, target)) != float(value)  # fresh draws in every call
        values.append(float(value))
    return values[1]


# What is sent ------------------------------------------------------------------------------------


@contextmanager
def counting() -> Iterator[list[Tensor]]:
    """Every message of this rank, in order."""
    sent: list[Tensor] = []

    def counted(call: Any, tensor_at: int) -> Any:
        def wrapper(*arguments: Any, **options: Any) -> Any:
            sent.append(arguments[tensor_at].detach().clone())
            return call(*arguments, **options)

        return wrapper

    places = {"all_reduce": 0, "broadcast": 0, "all_gather": 1, "send": 0}
    with mock.patch.multiple(dist, **{name: counted(getattr(dist, name), place) for name, place in places.items()}):
        yield sent


def messages(
    group: dist.ProcessGroup, name: str, setting: Mapping[str, Any], num_classes: int, positives: int
) -> tuple[list[int], list[int]]:
    """What a call and its backward send, in numbers, for 32 rows in one block."""
    problem = make_problem(32, num_classes=num_classes, regime="near")
    ids = torch.arange(32 * positives).reshape(32, positives) % num_classes
    head = ShardedHead(make_head(name, problem, **setting), group=group)
    with counting() as forward:
        value = head(problem.input.clone().requires_grad_(), ids)
    with counting() as backward:
        value.backward()
    return [values.numel() for values in forward], [values.numel() for values in backward]


def blocks(group: dist.ProcessGroup, sizes: list[int], block_scores: int) -> list[int]:
    """The rows of each block of 130, as the exchanges of softmax show them: a maximum and a mark for each row."""
    problem = make_problem(130, num_classes=sum(sizes))
    head = make_head("Softmax", problem, options={"block_scores": block_scores})
    with counting() as sent:
        ShardedHead(head, sizes=sizes, group=group)(problem.input, torch.zeros(130, dtype=torch.long))
    return [values.numel() // 2 for values in sent[1::2]]


def step_traffic(
    group: dist.ProcessGroup, name: str, batch: int, num_classes: int, positives: int
) -> tuple[float, float]:
    """Sums and bytes of a step in float32, where a broadcast, of uint8, counts half."""
    problem = make_problem(batch, num_classes=num_classes, regime="near", bias=False)
    problem = Problem(problem.input.float(), problem.linear_weight.float())
    ids = torch.arange(batch * positives).reshape(batch, positives) % num_classes
    head = ShardedHead(make_head(name, problem), group=group)
    with counting() as sent:
        head(problem.input.requires_grad_(), ids).backward()
    shares = [0.5 if values.dtype == torch.uint8 else 1.0 for values in sent]
    return sum(shares), sum(share * v.numel() * v.element_size() for share, v in zip(shares, sent, strict=True))


def network(group: dist.ProcessGroup) -> Network:
    return measure_network(ProcessRanks(group), rounds=3, megabytes=1)


# Ranking, state, errors --------------------------------------------------------------------------


def ranking(group: dist.ProcessGroup) -> None:
    """Against the k best of the whole table, with seen classes left out, for more classes than a shard has too."""
    for num_classes, k, masked in ((40, 5, True), (40, 40, True), (301, 7, False), (301, 290, False)):
        problem = make_problem(3, 4, num_classes=num_classes, regime="near", masked=masked)
        random = torch.Generator().manual_seed(3)
        seen = torch.randint(num_classes, (3, 4, 9), generator=random)
        seen = torch.where(torch.rand(3, 4, 9, generator=random) < 0.3, -100, seen)
        sizes = uneven(num_classes, dist.get_world_size(group))
        head = ShardedHead(make_head("Softmax", problem), sizes=sizes, group=group)
        for exclude in (None, seen):
            values, ids = head.topk(problem.input, k, exclude=exclude)
            expected, _ = manymax.linear_topk(
                problem.input, problem.linear_weight, k, linear_bias=problem.linear_bias, exclude=exclude
            )
            assert torch.equal(values, expected)
            scores, live = problem.scores(), values > -torch.inf
            assert torch.equal(scores.gather(-1, ids.clamp(min=0))[live], values[live])  # ids may differ among ties
            assert (ids[~live] == -100).all()
            for row in ids.reshape(-1, k):
                assert len(row[row >= 0].unique()) == (row >= 0).sum()
            if exclude is not None:
                assert not (ids.unsqueeze(-1) == exclude.clamp(min=-1).unsqueeze(-2)).any()
        taylor = make_head("TaylorSoftmax", problem)  # ranked by p, not by scores
        expected = taylor.topk(3 * problem.input, k)
        found = ShardedHead(taylor, sizes=sizes, group=group).topk(3 * problem.input, k)
        assert torch.equal(found[0], expected[0])


def stateful(group: dist.ProcessGroup, sizes: list[int] | None = None) -> ShardedHead:
    """A head with vectors, bias, class weights, a learned number and a sampler that learns."""
    head = manymax.LinearNCELoss(
        None,
        21,
        manymax.samplers.InBatchSampler(21),
        None,
        log_z=0.5,
        learnable=True,
        weight=class_weights(21),
    )
    return ShardedHead(head, 3, bias=True, sizes=sizes, group=group, dtype=torch.float64)


def save(group: dist.ProcessGroup, sizes: list[int] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """A step of training, then the state of this rank and that of all."""
    head = stateful(group, sizes)
    head(torch.ones(4, 3, dtype=torch.float64), torch.tensor([20, 3, 3, 11])).backward()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter -= 0.1 * parameter.grad
    return head.state_dict(), head.full_state_dict()


def load(group: dist.ProcessGroup, states: list[dict[str, Any]], sizes: list[int] | None) -> dict[str, Any]:
    """The state of all ranks after loading the parts."""
    torch.manual_seed(dist.get_rank(group))
    head = stateful(group, sizes)
    head.load_shards(states)
    return head.full_state_dict()


def state_of(
    group: dist.ProcessGroup, name: str, setting: Mapping[str, Any], states: list[dict[str, Any]]
) -> tuple[dict[str, Any], dict[str, Any], float]:
    """The state of this rank and of all, and the loss, of a member with its own vectors or with those of `states`."""
    problem, num_classes = make_problem(6, num_classes=17), 17
    sizes = uneven(num_classes, dist.get_world_size(group))
    weight = class_weights(num_classes)
    if states:  # all is to come from them
        problem, weight = Problem(problem.input, 0 * problem.linear_weight, 0 * problem.linear_bias), 0 * weight
    head = ShardedHead(make_head(name, problem, weight=weight, **setting), sizes=sizes, group=group)
    if states:
        head.load_shards(states)
    loss = head(problem.input, make_target("ids", 6, num_classes=num_classes))
    return head.state_dict(), head.full_state_dict(), loss.item()


def load_wrong_part(group: dist.ProcessGroup, states: list[dict[str, Any]]) -> None:
    """The state of another rank, or of too few ranks."""
    head = stateful(group)
    with pytest.raises(RuntimeError, match="`load_shards` takes the states of all ranks"):
        head.load_state_dict(states[(dist.get_rank(group) + 1) % 2])
    if dist.get_rank(group) == 1:
        with pytest.raises(ArgumentError, match="`states` must hold the classes 11 to 20 of this rank; class 11 is in"):
            head.load_shards(states[:1])


def first_vectors(group: dist.ProcessGroup) -> dict[str, Any]:
    """The first vectors of a head whose ranks have different seeds but for the first; blocks of 8 classes."""
    torch.manual_seed(11 + dist.get_rank(group))
    with mock.patch("manymax.distributed.sharded_head.INIT_ROWS", 8):
        return stateful(group).full_state_dict()


def refusals(group: dist.ProcessGroup) -> None:
    """A fault on one rank ends in an error on all of them, and the ranks can go on."""
    rank, problem = dist.get_rank(group), make_problem(6, num_classes=40, bias=True)
    target = make_target("ids", 6, num_classes=40)
    head = ShardedHead(make_head("Sparsemax", problem), group=group)

    def refused(match_there: str, match_elsewhere: str, *arguments: Any, there: int = 1, head: Any = head) -> None:
        with pytest.raises(ManymaxError, match=match_there if rank == there else match_elsewhere):
            head(*arguments)

    own = head.shards.size
    wrong = torch.zeros(own + (rank == 1), problem.input.shape[1], dtype=torch.float64)
    refused("`linear_weight` must have .* the classes of rank 1", "another rank refused", problem.input, target, wrong)
    rows = 6 - (rank == 1)
    refused("got 5 rows on one, 6 on another", "got 5 rows on", problem.input[:rows], target[:rows])
    bias = torch.zeros(40, dtype=torch.float64)
    bias[39] = -torch.inf
    masked = ShardedHead(make_head("Rankmax", Problem(problem.input, problem.linear_weight, bias)), group=group)
    refused("a masked class", "another rank", problem.input, torch.full((6,), 39), head=masked)
    with torch.no_grad():
        head.linear_weight[0, 0] = torch.nan if rank == 1 else 0.0
    refused("must not hold nan", "must not hold nan", problem.input, target)
    for name in ("Softmax", "Rankmax"):
        again = ShardedHead(make_head(name, problem), group=group)
        with torch.no_grad():
            again.linear_weight[0, 0] = torch.nan if rank == 1 else 0.0
        refused("must not hold nan", "must not hold nan", problem.input, target, head=again)
    fine = ShardedHead(make_head("Softmax", problem), group=group)
    assert fine(problem.input, target).isfinite()


def twice(group: dist.ProcessGroup) -> None:
    """RG can be differentiated twice: a penalty on the gradient of the queries."""
    problem, target = make_problem(5, num_classes=30, regime="near"), make_target("ids", 5, num_classes=30)
    found = []
    for head in (make_head("RG", problem), ShardedHead(make_head("RG", problem), group=group)):
        input = problem.input.clone().requires_grad_()
        (slope,) = torch.autograd.grad(head(input, target), input, create_graph=True)
        parameters = list(head.parameters())
        found.append(torch.autograd.grad(slope.square().sum(), [input, *parameters]))
    start, stop = head.span.tolist()
    agree(list(found[1]), [found[0][0], *(grad[start:stop] for grad in found[0][1:])], 1e-10)

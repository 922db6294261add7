"""What every head does, asked of every member and reference loss: one interface, whichever loss it computes."""

from __future__ import annotations

import copy
import inspect
import pydoc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manymax
from manymax import FAMILY, ArgumentError, ArgumentTypeError, heads
from manymax.engine.keywords import PER_CALL
from manymax.engine.member import Member
from manymax.heads import head_class, head_function
from manymax.members import REFERENCE_LOSSES

C, DIM, ROWS = 37, 8, 64
ALL = [*FAMILY.values(), *REFERENCE_LOSSES.values()]
HAS_VECTORS = [member for member in ALL if member.kind != "tree"]
TREES = [member for member in ALL if member.kind == "tree"]
EXACT = [member for member in HAS_VECTORS if member.kind != "sampled"]
SAMPLED = [member for member in HAS_VECTORS if member.kind == "sampled"]
OPTIONS = {  # keywords and defaults, in the order of torch's linear_cross_entropy
    "linear_bias": None,
    "weight": None,
    "reduction": "mean",
    "ignore_index": -100,
    "label_smoothing": 0.0,
    "multilabel": "sum",
    "options": None,
}


def members(rows: list[Member]) -> Any:
    """Run a test once for each of these members."""
    return pytest.mark.parametrize("member", rows, ids=lambda member: member.name)


def function(member: Member) -> Callable[..., Tensor]:
    """The head as a function: the public one, or a new one for a member that a test adds to the family."""
    return getattr(heads, f"linear_{member.loss_name}", None) or head_function(member)


def module(member: Member) -> type[nn.Module]:
    """The head as a module."""
    return head_class(member)


def make_head(member: Member, in_features: int | None = DIM, **options: Any) -> Any:
    """A head of the member, with class vectors (or node vectors) of its own unless `in_features` is None."""
    torch.manual_seed(0)
    if member.kind == "tree":
        return module(member)(in_features, C, manymax.HuffmanTree(torch.arange(1, C + 1)), **options)
    if member.kind == "sampled":
        options = {"num_negatives": 10, "generator": torch.Generator().manual_seed(0), **options}
    return module(member)(in_features, C, **options)


def some_queries(*batch: int) -> Tensor:
    return torch.randn(*batch, DIM, generator=torch.Generator().manual_seed(3))


def some_labels(*batch: int) -> Tensor:
    return torch.randint(C, batch, generator=torch.Generator().manual_seed(4))


# Names and signatures ----------------------------------------------------------------------------


@members(ALL)
def test_every_member_has_a_function_and_a_module(member: Member) -> None:
    names = {function(member).__name__, module(member).__name__}
    assert names == {f"linear_{member.loss_name}", f"Linear{member.class_name}Loss"}
    if member.loss.__module__.startswith("manymax."):
        assert names <= set(heads.__all__)
        assert member.name not in FAMILY or names <= set(manymax.__all__)
    assert issubclass(module(member), manymax.LinearHead)
    assert inspect.getdoc(function(member))
    assert inspect.getdoc(module(member))


@members(EXACT)
def test_arguments_are_those_of_torch(member: Member) -> None:
    ours = inspect.signature(function(member)).parameters
    assert list(ours)[:3] == ["input", "linear_weight", "target"]
    assert [name for name in ours if name in OPTIONS] == list(OPTIONS)
    assert {name: ours[name].default for name in OPTIONS} == OPTIONS
    assert all(ours[name].kind == inspect.Parameter.KEYWORD_ONLY for name in OPTIONS)
    for setting in member.settings:
        assert ours[setting.name].default == setting.default
    theirs = getattr(torch.nn.functional, "linear_cross_entropy", None)
    if theirs is not None:  # new in torch
        shared = [name for name in inspect.signature(theirs).parameters if name in ours]
        assert [name for name in ours if name in shared] == shared


@members(SAMPLED)
def test_arguments_of_sampled_heads(member: Member) -> None:
    ours = inspect.signature(function(member)).parameters
    assert list(ours)[:5] == ["input", "linear_weight", "target", "sampler", "num_negatives"]
    plain = inspect.signature(member.loss).parameters
    for setting in member.settings:
        assert ours[setting.name].default == setting.default
        assert setting.default == plain[setting.name].default or setting.start is not None
    # The head finds out by drawing what the plain sampled loss is told.
    assert set(plain) - set(ours) <= {"positive", "negative", "log_q_positive", "log_q_negative", "hits", "num_classes"}
    for name in ("linear_bias", "weight", "reduction", "ignore_index", "multilabel"):
        assert ours[name].default == OPTIONS[name]


@members(ALL)
def test_the_module_takes_every_option_of_the_function(member: Member) -> None:
    taken = inspect.signature(module(member)).parameters
    assert list(taken)[:2] == ["in_features", "num_classes"]
    assert all(parameter.kind is not parameter.VAR_KEYWORD for parameter in taken.values())
    given = inspect.signature(function(member)).parameters
    in_calls = inspect.signature(module(member).forward).parameters
    for name in set(given) - {"input", "linear_weight", "linear_bias", "target", "sampler", "tree"}:
        assert (in_calls if name in PER_CALL else taken)[name].default == given[name].default
    for text in (pydoc.render_doc(function(member)), pydoc.render_doc(module(member))):
        assert all(name in text for name in given if name not in ("input", "linear_weight", "linear_bias", "target"))


@members(HAS_VECTORS)
def test_an_unknown_keyword_is_refused_as_by_python(member: Member) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'reductoin'"):
        make_head(member, reductoin="sum")
    sampler = (manymax.samplers.UniformSampler(C),) if member.kind == "sampled" else ()
    with pytest.raises(TypeError, match="unexpected keyword argument 'reductoin'"):
        function(member)(some_queries(5), torch.randn(C, DIM), some_labels(5), *sampler, reductoin="sum")


@members(HAS_VECTORS)
def test_an_argument_that_is_given_twice_is_refused_as_by_python(member: Member) -> None:
    defaults = [setting.default for setting in member.settings]
    for i, setting in enumerate(member.settings if member.kind != "sampled" else ()):
        with pytest.raises(TypeError, match=f"multiple values for argument '{setting.name}'"):
            module(member)(DIM, C, *defaults[: i + 1], **{setting.name: setting.default})
    if member.kind == "sampled":
        sampler = manymax.samplers.UniformSampler(C)
        with pytest.raises(TypeError, match="multiple values for argument 'sampler'"):
            module(member)(DIM, C, sampler, sampler=sampler)
        with pytest.raises(TypeError, match="multiple values for argument 'num_negatives'"):
            function(member)(some_queries(5), torch.randn(C, DIM), some_labels(5), sampler, 3, num_negatives=3)
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'sampler'"):
            function(member)(some_queries(5), torch.randn(C, DIM), some_labels(5))
    with pytest.raises(TypeError, match="further positional arguments"):
        function(member)(some_queries(5), torch.randn(C, DIM), some_labels(5), None, None, None)


@members(ALL)
def test_an_option_is_honoured_or_refused(member: Member) -> None:
    head = module(member)
    for name, value in {"block_rows": 3, "matmul": "bf16", "sparse_grad": True, "retain_graph": True}.items():
        if name in head.honours:
            changed = make_head(member, options={name: value}, bias=name == "sparse_grad")
            loss, usual = (each(some_queries(5), some_labels(5)) for each in (changed, make_head(member)))
            loss.backward()
            assert name != "matmul" or loss != usual  # rounded products show in the loss
            if name == "sparse_grad":
                assert [parameter.grad.is_sparse for parameter in changed.sparse_parameters()] == [True] * 2
        else:
            with pytest.raises(ArgumentError, match=rf"`options.{name}` has no effect on this head: it"):
                make_head(member, options={name: value})


@members(SAMPLED)
def test_the_old_name_of_sparse_gradients_works_with_a_warning(member: Member) -> None:
    with pytest.warns(DeprecationWarning, match="`sparse` is called `sparse_grad` now"):
        head = make_head(member, sparse=True)
    head(some_queries(5), some_labels(5)).backward()
    assert head.linear.weight.grad.is_sparse


# A module is its function ------------------------------------------------------------------------


# Settings other than the defaults; a member that is not here is set to the last of its examples.
SETTINGS: dict[str, dict[str, Any]] = {
    "entmax": {"alpha": 1.3},
    "taylor_softmax": {"order": 4},
    "sampled_softmax": {"correction": "partition", "hit_policy": "keep", "debias": "delta", "shared": True},
    "nce": {"log_z": 0.5, "hit_policy": "mask", "shared": True},
}


@members(HAS_VECTORS)
def test_a_module_calls_its_function_with_all_it_was_given(member: Member) -> None:
    options: dict[str, Any] = {
        **SETTINGS.get(member.name, member.examples[-1]),
        "weight": torch.rand(C),
        "reduction": "sum",
        "ignore_index": 5,
        "multilabel": "normalized",
    }
    arguments: tuple[Any, ...] = ()
    if member.kind == "sampled":
        arguments = (manymax.samplers.LogUniformSampler(C), 7)
        options["sparse_grad"] = True
    else:
        options["label_smoothing"] = 0.2 if member.takes.smoothing else 0.0
        given = {"block_rows": 3} if member.takes.smoothing else {"block_rows": 3, "sparse_grad": True}
        options["options"] = {name: value for name, value in given.items() if name in module(member).honours}
    input, target = some_queries(9), some_labels(9, 3)
    target[4] = 5

    def with_generator() -> dict[str, Any]:
        return {**options, "generator": torch.Generator().manual_seed(1)} if member.kind == "sampled" else options

    head = module(member)(DIM, C, *arguments, bias=True, **with_generator())
    expected = function(member)(
        input, head.linear.weight, target, *arguments, linear_bias=head.linear.bias, **with_generator()
    )
    value = head(input, target)
    assert torch.equal(value, expected)
    value.backward()
    asked = "sparse_grad" in {**options, **options.get("options", {})}
    assert [parameter.grad.is_sparse for parameter in head.linear.parameters()] == [asked] * 2
    tied = torch.randn(C, DIM)
    head = module(member)(None, C, *arguments, **with_generator())
    expected = function(member)(input, tied, target, *arguments, **with_generator())
    assert torch.equal(head(input, target, tied), expected)
    key = head.ranking_key or (lambda scores: scores)
    assert torch.equal(head.topk(input, 3, tied)[1], key(input @ tied.T).topk(3).indices)


def test_learnable_settings_are_parameters() -> None:
    entmax = manymax.LinearEntmaxLoss(DIM, C, 1.4, learnable=True)
    nce = manymax.LinearNCELoss(DIM, C, log_z=0.3, learnable=True)
    for head, count in (
        (entmax, 2),
        (nce, 2),
        (manymax.LinearEntmaxLoss(DIM, C), 1),
        (manymax.LinearNCELoss(DIM, C), 1),
    ):
        assert len(list(head.parameters())) == count
        head(some_queries(9), some_labels(9)).backward()
        assert all(parameter.grad is not None and parameter.grad.any() for parameter in head.parameters())
    assert isinstance(entmax.alpha, Tensor)
    assert entmax.alpha.item() == pytest.approx(1.4)
    assert manymax.LinearEntmaxLoss(DIM, C, 1.4).alpha == 1.4


@members(ALL)
def test_a_head_is_saved_copied_and_printed(member: Member) -> None:
    head = make_head(member, bias=True)
    other = make_head(member, bias=True)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    other.load_state_dict(head.state_dict())
    assert torch.equal(other.scores(some_queries(5)), head.scores(some_queries(5)))
    if member.kind != "sampled":  # generators do not copy
        assert torch.equal(copy.deepcopy(head)(some_queries(5), some_labels(5)), head(some_queries(5), some_labels(5)))
    assert type(head).__name__ in repr(head)


@members(HAS_VECTORS)
def test_the_vectors_start_like_those_of_a_linear_layer(member: Member) -> None:
    head = make_head(member, bias=True, dtype=torch.float64)
    torch.manual_seed(0)
    layer = nn.Linear(DIM, C, dtype=torch.float64)
    assert torch.equal(head.linear.weight, layer.weight)
    assert torch.equal(head.linear.bias, layer.bias)
    assert make_head(member).linear.bias is None


# One interface -----------------------------------------------------------------------------------


def train(head: Any, queries: nn.Parameter, target: Tensor, vectors: nn.Parameter | None) -> list[float]:
    """The losses of forty steps of a training loop that does not know which loss it has."""
    parameters = [queries, *head.parameters(), *([] if vectors is None else [vectors])]
    optimizer, losses = torch.optim.Adam(parameters, lr=0.1), []
    for _ in range(40):
        optimizer.zero_grad()
        loss = head(queries, target) if vectors is None else head(queries, target, vectors)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("several", [False, True], ids=["ids", "padded ids"])
@pytest.mark.parametrize("tied", [False, True], ids=["own", "tied"])
@members(ALL)
def test_a_training_loop_takes_any_head(member: Member, tied: bool, several: bool) -> None:
    """The loss falls, and its positives are ranked first afterwards, or among the first K if it aims at a list of K."""
    if tied and member.kind == "tree":
        pytest.skip("has no class vectors")
    aims = {"k": 2} if any(setting.name == "k" for setting in member.settings) else {}
    head = make_head(member, None if tied else DIM, **aims)
    queries = nn.Parameter(some_queries(ROWS))
    vectors = nn.Parameter(torch.randn(C, DIM, generator=torch.Generator().manual_seed(5)) / 3) if tied else None
    listed = some_labels(ROWS, 2 if several else 1)
    listed[::3, 1:] = -100
    losses = train(head, queries, listed if several else listed.squeeze(1), vectors)
    assert sum(losses[-5:]) < sum(losses[:5]) - 1
    best = head.topk(queries, aims.get("k", 1), *([] if vectors is None else [vectors]))[1]
    assert (best.unsqueeze(2) == listed.unsqueeze(1)).any(2).any(1).double().mean() > 0.6


@members(ALL)
def test_topk_ranks_by_scores(member: Member) -> None:
    """Or by log p, for a member whose p does not keep the order of the scores."""
    head, input = make_head(member), some_queries(2, 3)
    key = getattr(head, "ranking_key", None)
    scores = head.scores(input) if key is None else key(head.scores(input))
    assert scores.shape == (2, 3, C)
    exclude = torch.where(torch.arange(6).reshape(2, 3, 1) % 2 == 0, scores.topk(2).indices, -100)
    for excluded in (None, exclude):
        left = scores.detach().clone()
        if excluded is not None:
            for row, ids in zip(left.view(6, C), excluded.view(6, 2), strict=True):
                row[ids[ids >= 0]] = -torch.inf
        for k in (1, 4, C):
            values, ids = head.topk(input, k, exclude=excluded)
            torch.testing.assert_close(values, left.topk(k).values, rtol=1e-5, atol=1e-5)
            live = values > -torch.inf
            assert (ids[~live] == -100).all()
            torch.testing.assert_close(left.gather(-1, ids.clamp(min=0))[live], values[live], rtol=1e-5, atol=1e-5)
            assert all(len(set(row)) == len(row) for row in ids.view(6, k)[:, : C - 2].tolist())
        assert not values.requires_grad


@members(TREES)
def test_a_tree_ranks_by_log_probabilities(member: Member) -> None:
    scores = make_head(member).scores(some_queries(5))
    torch.testing.assert_close(scores.exp().sum(-1), torch.ones(5))


@members(ALL)
def test_a_training_loop_may_group_its_pairs(member: Member) -> None:
    users, items = torch.tensor([4, 1, 4, 4, 0, 1]), torch.tensor([7, 7, 2, 7, 30, 11])
    head, queries = make_head(member), some_queries(5)
    groups, target = manymax.group_pairs(users, items)
    grouped = head(queries[groups], target)
    assert grouped.isfinite()
    if member.kind != "sampled" and not member.joint:  # grouped pairs draw other negatives, or have one loss together
        torch.testing.assert_close(grouped, head(queries[users], items))


# Errors ------------------------------------------------------------------------------------------


@members(HAS_VECTORS)
def test_a_head_without_vectors_asks_for_them(member: Member) -> None:
    head = make_head(member, None)
    assert not list(head.parameters())
    for method in (lambda: head(some_queries(5), some_labels(5)), lambda: head.scores(some_queries(5))):
        with pytest.raises(
            ArgumentError, match=r"built without class vectors \(`in_features=None`\): pass `linear_weight`"
        ):
            method()
    with pytest.raises(ArgumentError, match="built without class vectors"):
        head.topk(some_queries(5), 3)
    with pytest.raises(ArgumentError, match="`bias` needs class vectors of the head's own"):
        make_head(member, None, bias=True)


@members(HAS_VECTORS)
def test_vectors_of_another_number_of_classes_are_refused(member: Member) -> None:
    for head in (make_head(member), make_head(member, None)):
        for vectors in (torch.randn(C + 1, DIM), torch.randn(()), torch.randn(DIM)):
            for method in (head.scores, lambda *a, head=head: head.topk(a[0], 3, a[1])):
                with pytest.raises(ArgumentError, match=rf"`linear_weight` must have {C} rows; got shape"):
                    method(some_queries(5), vectors)
            with pytest.raises(ArgumentError, match=rf"`linear_weight` must have {C} rows"):
                head(some_queries(5), some_labels(5), vectors)
        with pytest.raises(ArgumentTypeError, match="`linear_weight` must be a tensor or None; got list"):
            head(some_queries(5), some_labels(5), [[1.0]])
    with pytest.raises(ArgumentError, match="`num_classes` must be at least 1; got 0"):
        module(member)(DIM, 0)


@members(TREES)
def test_a_tree_refuses_class_vectors(member: Member) -> None:
    head, vectors = make_head(member), torch.randn(C, DIM)
    for method in (
        lambda: head(some_queries(5), some_labels(5), vectors),
        lambda: head.scores(some_queries(5), vectors),
        lambda: head.topk(some_queries(5), 3, vectors),
    ):
        with pytest.raises(ArgumentError, match="`linear_weight` must be None: hierarchical softmax"):
            method()


@members(HAS_VECTORS)
def test_options_are_checked_when_a_head_is_built(member: Member) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [({"reduction": "meen"}, "mean"), ({"multilabel": "summ"}, "sum")]
    if member.kind != "sampled":
        wrong += [({"label_smoothing": 2.0}, "label_smoothing"), ({"options": {"matmull": "bf16"}}, "matmul")]
    for options, hint in wrong:
        with pytest.raises(ValueError, match=hint):
            make_head(member, **options)

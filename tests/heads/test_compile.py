"""A model with a head under torch.compile and torch.export: an exact head is one operator in one graph.

Values and gradients are those of eager code bit for bit: the operator calls the same code.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manymax
from manymax import FAMILY, ManymaxError, SoftTarget
from manymax.engine.member import Member
from manymax.heads import head_class, head_function, operator
from manymax.heads.operator import linear_head
from tests.contracts.marginmax import MEMBER as MARGINMAX

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, about what it traces

ROWS, DIM, CLASSES = 9, 6, 50
HEADS = [member for member in FAMILY.values() if member.kind != "tree"]
IN_GRAPHS = [member for member in HEADS if member.kind != "sampled"]
IDS = torch.randint(CLASSES, (ROWS,), generator=torch.Generator().manual_seed(5))
LISTS = torch.stack([IDS, (IDS + 1) % CLASSES, torch.full_like(IDS, -100)], 1)
POSITIVE = torch.rand(ROWS, generator=torch.Generator().manual_seed(6))


@pytest.fixture(autouse=True)
def dynamo() -> Iterator[Any]:
    """The compiler, with nothing compiled and nothing counted."""
    found = pytest.importorskip("torch._dynamo")
    found.reset()
    found.utils.counters.clear()
    yield found
    found.reset()


class Model(nn.Module):
    """A layer before the head, and arithmetic after it."""

    def __init__(self, member: Member, **keywords: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.Linear(DIM, DIM), head_class(member)(DIM, CLASSES, **keywords)

    def forward(self, input: Tensor, target: Tensor, **given: Any) -> Any:
        return 2 * self.head(torch.relu(self.layer(input)), target, **given)


class Functional(Model):
    """The same with the head as a function."""

    def forward(self, input: Tensor, target: Tensor, **given: Any) -> Any:
        queries, weight = torch.relu(self.layer(input)), self.head.linear.weight
        return 2 * manymax.linear_softmax_loss(queries, weight, target, **given)


def slow_but_first(rows: list[Any]) -> list[Any]:
    """The rows, marked slow but for the first: compiling takes time, and most faults show in any of them."""
    return [rows[0], *(pytest.param(row, marks=pytest.mark.slow) for row in rows[1:])]


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    """Of all parameters, through rows of different weights where there are rows."""
    return list(
        torch.autograd.grad((loss * torch.linspace(1, 2, loss.numel()).view(loss.shape)).sum(), [*model.parameters()])
    )


def equal(found: list[Tensor], expected: list[Tensor]) -> None:
    """Bit for bit."""
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize(
    "model", slow_but_first([*(Model(member) for member in IN_GRAPHS), Functional(FAMILY["softmax"])])
)
def test_one_graph_and_no_second_compilation(model: Model, dynamo: Any) -> None:
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for seed in range(4):
        torch.manual_seed(seed)
        input, target = torch.randn(ROWS, DIM), torch.randint(CLASSES, (ROWS,))
        # A number of items that differs from step to step may cost one more graph, and not one in each step.
        loss, expected = (each(input, target, num_items=ROWS + seed) for each in (compiled, model))
        equal([loss, *gradients(model, loss)], [expected, *gradients(model, expected)])
    assert dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    assert not dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("model", slow_but_first([Model(member) for member in HEADS if member.kind == "sampled"]))
def test_a_head_that_draws_is_one_break(model: Model, dynamo: Any) -> None:
    compiled = torch.compile(model, backend="eager")
    for seed in range(4):
        torch.manual_seed(seed)
        input, target = torch.randn(ROWS, DIM), torch.randint(CLASSES, (ROWS,))
        torch.manual_seed(seed)
        loss = compiled(input, target)
        torch.manual_seed(seed)
        equal([loss], [model(input, target)])
    # One graph before the head and one after it, for all four steps.
    assert dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert sum(dynamo.utils.counters["graph_break"].values()) == 1


# Every keyword ----------------------------------------------------------------------------------------------


def keywords() -> dict[str, dict[str, Any]]:
    """Arguments that replace those of a plain call, by name."""
    rows = torch.linspace(-2, 2, ROWS * CLASSES).view(ROWS, CLASSES).sin().softmax(-1)
    grouped = manymax.group_pairs(torch.arange(ROWS).repeat(2), torch.cat([IDS, (IDS + 3) % CLASSES]))[1]
    weight = torch.linspace(0.1, 2, CLASSES)
    return {
        "plain": {},
        "temperature": {"temperature": torch.tensor(1.5, requires_grad=True)},
        "scores": {"temperature": 0.7, "normalize": True, "softcap": 2.0},
        "exclude": {"exclude": (IDS.unsqueeze(1) + torch.tensor([3, 7, 0])) % CLASSES},
        "decoupled": {"decoupled": True, "z_loss": 0.1},
        "bound": {"bound": POSITIVE},
        "rows": {"row_weight": POSITIVE, "num_items": torch.tensor(7.0)},
        "ignored": {"target": IDS.where(IDS > 20, -100)},
        "weight": {"weight": weight, "label_smoothing": 0.1},
        "negative weight": {"weight": weight - 1, "reduction": "sum"},
        "several": {"target": LISTS, "reduction": "none", "row_weight": POSITIVE},
        "normalized": {"target": LISTS, "multilabel": "normalized"},
        "soft": {"target": SoftTarget(LISTS[:, :2], POSITIVE.unsqueeze(1) * torch.tensor([0.3, 0.6]))},
        "grouped": {"target": grouped},
        "float rows": {"target": rows},
        "bool rows": {"target": rows > 0.025},
        "shift": {
            "input": torch.linspace(-2, 2, 60).sin().view(2, 5, DIM),
            "target": IDS[:5].repeat(2, 1),
            "shift": True,
        },
        "statistics": {"stats": ("argmax", "correct", "nll")},
        "one statistic of rows": {"stats": ("argmax",), "reduction": "none"},
        "a word": {"stats": "argmax"},
        "options": {"options": {"backend": "torch", "block_rows": 3}},
        "half": {"dtype": torch.bfloat16, "options": manymax.HeadOptions(block_rows=4)},
        "half of rows": {"dtype": torch.float16, "reduction": "none"},
        "no class": {"target": IDS + CLASSES},
    }


def outcome(step: Any, member: Member, given: dict[str, Any]) -> list[Tensor] | str:
    """Loss, statistics and gradients of a step; or what it refuses."""
    torch.manual_seed(3)
    dtype = given.pop("dtype", torch.float32)
    input = given.pop("input", torch.randn(ROWS, DIM)).to(dtype).requires_grad_()
    vectors, bias = (torch.randn(*size, dtype=dtype, requires_grad=True) for size in ((CLASSES, DIM), (CLASSES,)))
    wanted = [input, vectors, bias, *(v for v in given.values() if isinstance(v, Tensor) and v.requires_grad)]
    try:
        result = step(input, vectors, bias, given.pop("target", IDS), given)
    except ManymaxError as error:
        return str(error)
    loss = result if isinstance(result, Tensor) else result.loss
    stats = [] if isinstance(result, Tensor) else [value for value in vars(result).values() if value is not None]
    # Powers of two, so that it does not matter for the bits where a factor is multiplied on.
    factors = 2.0 ** (torch.arange(loss.numel()) % 3 - 1).view(loss.shape)
    return [loss, *stats, *torch.autograd.grad((factors * loss).sum(), wanted)]


@pytest.mark.slow
@pytest.mark.parametrize("member", IN_GRAPHS, ids=lambda member: member.name)
def test_every_keyword_in_one_graph(member: Member, dynamo: Any) -> None:
    cases = keywords()
    if any(setting.learned for setting in member.settings):
        cases["learned"] = {"alpha": torch.tensor(1.4, requires_grad=True), "target": LISTS, "multilabel": "normalized"}
    head, refused = head_function(member), 0
    for name, given in cases.items():

        def step(input: Tensor, vectors: Tensor, bias: Tensor, target: Any, given: dict[str, Any]) -> Any:
            return head(1.0 * input, vectors, target, linear_bias=bias, **given)

        dynamo.reset()
        expected = outcome(step, member, dict(given))
        found = outcome(torch.compile(step, backend="aot_eager", fullgraph=True), member, dict(given))
        if isinstance(expected, str):  # by the head itself, when the graph runs
            refused += 1
            assert found == expected, name
        else:
            assert not isinstance(found, str), (name, found)
            equal(found, expected)
    assert refused < len(cases) / 2


# Precision, devices and other limits ------------------------------------------------------------------------


def test_gradients_are_rounded_after_the_factor_from_above() -> None:
    """Scaled losses are what keeps small gradients alive in float16: rounded before the factor they would be 0."""
    torch.manual_seed(0)
    tensors = [(1e-4 * torch.randn(*shape)).half().requires_grad_() for shape in ((ROWS, DIM), (CLASSES, DIM))]

    def step(input: Tensor, vectors: Tensor) -> Tensor:
        return 1e4 * manymax.linear_softmax_loss(1.0 * input, vectors, IDS, num_items=10**5)

    found = torch.autograd.grad(torch.compile(step, backend="aot_eager", fullgraph=True)(*tensors), tensors)
    expected = torch.autograd.grad(step(*tensors), tensors)
    assert all(grad.count_nonzero() > grad.numel() // 2 for grad in found)
    equal(list(found), list(expected))


def test_what_no_graph_can_hold(dynamo: Any) -> None:
    """Row-sparse gradients are a break, and a full graph is refused with the way out."""
    model = Model(FAMILY["entmax"], options={"sparse_grad": True})
    compiled = torch.compile(model, backend="eager")
    compiled(torch.ones(ROWS, DIM), IDS).backward()
    assert model.head.linear.weight.grad.is_sparse
    assert sum(dynamo.utils.counters["graph_break"].values()) == 1
    dynamo.reset()
    with pytest.raises(Exception, match="leave `fullgraph=True` out"):
        torch.compile(model, backend="eager", fullgraph=True)(torch.ones(ROWS, DIM), IDS)


def test_without_private_names_a_head_is_one_break(dynamo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator, "RECORDS", False)
    model = Model(FAMILY["softmax"])
    loss = torch.compile(model, backend="eager")(torch.ones(ROWS, DIM), IDS)
    equal([loss], [model(torch.ones(ROWS, DIM), IDS)])
    assert sum(dynamo.utils.counters["graph_break"].values()) == 1


@pytest.mark.slow
def test_members_of_ones_own() -> None:
    """Also two of one name, each with its own kernel."""
    from dataclasses import replace

    other = replace(MARGINMAX, kernel=FAMILY["softmax"].kernel, settings=())
    for member, expected in ((MARGINMAX, None), (other, manymax.linear_softmax_loss)):
        input, vectors = (
            torch.linspace(-1, 1, ROWS * DIM).view(ROWS, DIM),
            torch.linspace(-1, 1, 300).view(CLASSES, DIM),
        )
        head = head_function(member)

        def step(input: Tensor, head: Any = head, vectors: Tensor = vectors) -> Tensor:
            return head(1.0 * input, vectors, IDS)

        loss = torch.compile(step, backend="aot_eager", fullgraph=True)(input)
        equal([loss], [(expected or head)(input, vectors, IDS)])


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_inductor(reduction: str) -> None:
    model = Model(FAMILY["entmax"], reduction=reduction)
    input = torch.linspace(-2, 2, ROWS * DIM).sin().view(ROWS, DIM)
    loss, expected = torch.compile(model, fullgraph=True)(input, IDS), model(input, IDS)
    for ours, theirs in zip([loss, *gradients(model, loss)], [expected, *gradients(model, expected)], strict=True):
        torch.testing.assert_close(ours, theirs)  # inductor fuses the layer before the head


@pytest.mark.slow
def test_the_operator_keeps_the_rules_of_operators() -> None:
    """Torch's own checks: forms of results, gradients, no change of arguments, and tracing with sizes that vary."""
    queries, vectors = torch.randn(ROWS, DIM, requires_grad=True), torch.randn(CLASSES, DIM, requires_grad=True)
    wants = [True, True, False]
    for words in (
        "",
        "; stats='nll,argmax,correct,support,'",
        "; reduction='none'",
        "; reduction='none'; stats='nll,'",
    ):
        call = "softmax; input; linear_weight; target" + words
        torch.library.opcheck(linear_head, ([queries, vectors, IDS], call, wants))


# torch.export -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("member", IN_GRAPHS, ids=lambda member: member.name)
def test_an_exported_program_trains(member: Member, strict: bool) -> None:
    """Saved and loaded, for any number of rows: the values and gradients of the module."""
    learned = {"learnable": True} if any(setting.learned for setting in member.settings) else {}
    for given in ({**learned}, {"reduction": "none"}):
        model, any_rows = Model(member, **given), torch.export.Dim("rows")
        sizes = {"input": {0: any_rows}, "target": {0: any_rows}}
        program = torch.export.export(model, (torch.randn(ROWS, DIM), IDS), dynamic_shapes=sizes, strict=strict)
        assert sum("linear_head" in str(node.target) for node in program.graph.nodes) == 1
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        loaded = torch.export.load(file).module()
        input, target = torch.randn(5, DIM), IDS[:5]
        loss, expected = loaded(input, target), model(input, target)
        equal([loss, *gradients(loaded, loss)], [expected, *gradients(model, expected)])
        with pytest.raises(ManymaxError, match="no second derivatives"):
            torch.autograd.grad(loaded(input, target).sum(), [*loaded.parameters()], create_graph=True)

"""Class-sharded heads against the heads on one machine, for 1 to 4 ranks: value and every gradient to 1e-10."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import manymax
from manymax import ArgumentError, ManymaxError
from manymax.distributed import ShardedHead
from tests.distributed import jobs_exact, jobs_keywords, jobs_messages, jobs_sampled, jobs_state
from tests.distributed.pool import Pool
from tests.heads.plain import needs_library

# Two ranks exchange all that more of them do: one rank, three and four are for `make test-all`.
RANKS = [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 3, 4))]
EXACT: list[tuple[str, dict[str, Any]]] = [
    ("Softmax", {}),
    ("Sparsemax", {}),
    ("Entmax", {"alpha": 1.0}),
    ("Entmax", {"alpha": 1.1}),
    ("Entmax", {"alpha": 1.5}),
    ("Entmax", {"alpha": 1.8}),
    ("Rankmax", {}),
    ("Rankmax", {"k": 3}),
    ("TaylorSoftmax", {"order": 2}),
    ("TaylorSoftmax", {"order": 6}),
    ("SlAtK", {"k": 4, "gate_temperature": 0.7}),
    ("Talos", {"k": 4, "tau": 0.6}),
    ("Psl", {"activation": "relu", "tau": 0.4}),
    ("Bsl", {"tau": 0.4}),
    ("RG", {}),
]
KINDS = ("ids", "padded ids", "bool rows", "float rows")
SAMPLED: list[tuple[str, dict[str, Any]]] = [
    ("SampledSoftmax", {}),
    ("SampledSoftmax", {"correction": "none"}),
    ("NCE", {"learnable": True, "log_z": 0.3}),
    ("BPR", {}),
    ("BCE", {}),
    ("GBCE", {"t": 0.5}),
]
DEBIASED: list[tuple[str, dict[str, Any]]] = [
    ("SampledSoftmax", {"correction": "partition"}),
    ("SampledSoftmax", {"correction": "corrected_logq"}),
    ("SampledSoftmax", {"correction": "partition", "debias": "delta"}),
    ("SampledSoftmax", {"correction": "partition", "debias": "jackknife"}),
]


def members(rows: list[tuple[str, dict[str, Any]]], quick: tuple[str, ...] | None = None) -> Any:
    """The test for each of these members; slow for those whose name is not among `quick`, if that is given."""
    ids = ["-".join([name, *map(str, setting.values())]) for name, setting in rows]
    marks = [() if quick is None or label in quick else pytest.mark.slow for label in ids]
    cases = [pytest.param(*row, marks=mark) for row, mark in zip(rows, marks, strict=True)]
    return pytest.mark.parametrize(("name", "setting"), cases, ids=ids)


@members(EXACT)
@pytest.mark.parametrize("ranks", RANKS)
def test_every_option(pool: Pool, name: str, setting: dict[str, Any], ranks: int) -> None:
    """Each kind of target gets a quarter of the combinations of options, a different one per number of ranks."""
    for index, kind in enumerate(KINDS):
        takes = getattr(manymax.heads, f"Linear{name}Loss").member.takes
        if kind == "float rows" and not takes.float_rows:
            continue
        tried = pool.run(ranks, jobs_exact.every_option, name, kind, setting, (index + ranks) % 4)
        assert tried == [6 if takes.smoothing else 3] * ranks


@members([row for row in EXACT + SAMPLED if row[0] != "RG"], quick=("Softmax", "Entmax-1.5", "SampledSoftmax", "BCE"))
@pytest.mark.parametrize("ranks", RANKS)
def test_every_keyword(pool: Pool, name: str, setting: dict[str, Any], ranks: int) -> None:
    pool.run(ranks, jobs_keywords.every_keyword, name, setting)


@members(EXACT, quick=("Entmax-1.5", "Softmax"))
def test_supports_of_all_sizes(pool: Pool, name: str, setting: dict[str, Any]) -> None:
    pool.run(2, jobs_exact.supports, name, setting)


NATIVE: list[tuple[str, dict[str, Any]]] = [
    *(("Entmax", {"alpha": alpha}) for alpha in (1.01, 1.3, 1.5, 1.7)),
    *(
        ("Psl", {"activation": "atan", "tau": 0.3}),
        ("Softmax", {}),
        ("Sparsemax", {}),
        ("Rankmax", {}),
        ("Rankmax", {"k": 3}),
        ("Entmax", {"alpha": 1.1, "learnable": True}),
    ),
]


@needs_library
@pytest.mark.parametrize("choice", [("torch",), ("native",), ("torch", "native"), ("native", "torch")], ids="+".join)
@members(NATIVE, quick=("Softmax", "Sparsemax", "Rankmax", "Entmax-1.3", "Entmax-1.1-True"))
def test_back_ends_of_the_ranks(pool: Pool, name: str, setting: dict[str, Any], choice: tuple[str, ...]) -> None:
    """All ranks with one, and ranks with different ones, which exchange the same numbers."""
    pool.run(2, jobs_exact.back_ends, name, setting, choice)


@members(EXACT)
def test_a_support_on_one_rank(pool: Pool, name: str, setting: dict[str, Any]) -> None:
    pool.run(3, jobs_exact.one_rank_has_it_all, name, setting)


@members(EXACT + SAMPLED)
def test_grouped_and_empty_targets(pool: Pool, name: str, setting: dict[str, Any]) -> None:
    pool.run(3, jobs_exact.grouped_and_empty, name, setting)


@pytest.mark.parametrize("ranks", RANKS)
def test_learned_alpha(pool: Pool, ranks: int) -> None:
    pool.run(ranks, jobs_exact.learned_alpha)


@pytest.mark.parametrize("name", ["Softmax", "Sparsemax", "SampledSoftmax"])
def test_a_large_offset_in_float32(pool: Pool, name: str) -> None:
    pool.run(2, jobs_sampled.large_offset, name)


def test_rg_can_be_differentiated_twice(pool: Pool) -> None:
    pool.run(3, jobs_exact.twice)


@members([row for row in EXACT if row[0] != "RG"], quick=("Softmax", "Entmax-1.5"))
def test_nothing_is_computed_that_nobody_wants(pool: Pool, name: str, setting: dict[str, Any]) -> None:
    """One product for the scores and one for each gradient that is wanted, of the 3 rows of 12 that count."""
    expected = [(count, 3 * count) for count in (3, 2, 2, 1)]
    assert pool.run(2, jobs_exact.wanted_products, name, setting) == [expected] * 2
    # Scores and the gradient of the class vectors, of 4 rows: that a row counts on one rank is enough.
    assert pool.run(2, jobs_exact.masked_rows, name, setting) == [8, 8]


# Sampled members ---------------------------------------------------------------------------------


@members(SAMPLED, quick=("SampledSoftmax", "NCE-True-0.3"))
@pytest.mark.parametrize("ranks", RANKS)
def test_every_sampler(pool: Pool, name: str, setting: dict[str, Any], ranks: int) -> None:
    pool.run(ranks, jobs_sampled.every_sampler, name, setting)


@members([*SAMPLED, *DEBIASED])
@pytest.mark.parametrize("ranks", RANKS)
def test_every_option_of_sampled_members(pool: Pool, name: str, setting: dict[str, Any], ranks: int) -> None:
    """Half of the combinations of options for each number of ranks."""
    pool.run(ranks, jobs_sampled.sampled_options, name, setting, ranks // 2 % 2)


def test_rows_of_a_sparse_gradient(pool: Pool) -> None:
    pool.run(2, jobs_sampled.touched_rows)


def test_a_sampler_that_follows_the_class_vectors(pool: Pool) -> None:
    pool.run(2, jobs_sampled.quantised)


@pytest.mark.parametrize("shared", [False, True], ids=["per row", "shared"])
def test_all_ranks_draw_what_the_first_draws(pool: Pool, shared: bool) -> None:
    alone = pool.run(1, jobs_sampled.draws_without_a_generator, shared)
    assert pool.run(3, jobs_sampled.draws_without_a_generator, shared) == pytest.approx(alone * 3, rel=1e-12)


def test_all_ranks_cut_the_rows_alike(pool: Pool) -> None:
    """The largest shard decides how many rows a block has, and every block has exchanges of its own."""
    assert pool.run(2, jobs_messages.blocks, [3000, 10], 200_000) == [[64, 64, 2], [64, 64, 2]]


# What is sent ------------------------------------------------------------------------------------

ROWS, DIM = 32, 6
AGREED = 3  # numbers that the check at the start of a call sends
STATE = 5056  # bytes of the state of torch's generator


@pytest.mark.parametrize("positives", [1, 3])
@pytest.mark.parametrize(
    ("name", "setting", "per_row", "once"),
    [
        ("Softmax", {}, lambda p: 4, 0),
        ("TaylorSoftmax", {}, lambda p: 2, 0),
        ("Rankmax", {}, lambda p: 2 + 4 * p, 0),
        ("RG", {}, lambda p: 1, 2 * (DIM + 1) + (DIM + 1) ** 2 + 2),
        ("SampledSoftmax", {}, lambda p: 4 * p, STATE),
        ("NCE", {}, lambda p: 2 * p, STATE),
    ],
)
def test_a_few_numbers_per_row_however_many_classes(
    pool: Pool, name: str, setting: dict[str, Any], per_row: Any, once: int, positives: int
) -> None:
    for num_classes in (200, 2000):
        for forward, backward in pool.run(2, jobs_messages.messages, name, setting, num_classes, positives):
            assert sum(forward) == per_row(positives) * ROWS + once + AGREED
            assert max(backward) <= ROWS * (DIM + 1)  # the gradient of the queries; RG has the bias as a feature
            assert sum(backward) <= ROWS * (DIM + 1) + 2 * (DIM + 1)


@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0])
def test_a_threshold_search_sends_two_sums_for_each_step(pool: Pool, alpha: float) -> None:
    for num_classes in (200, 2000):
        for forward, backward in pool.run(2, jobs_messages.messages, "Entmax", {"alpha": alpha}, num_classes, 1):
            assert set(forward[1:]) == {2 * ROWS}
            assert len(forward) <= 1 + 2 + 12 + 1  # the check, two maxima, steps, sums at the end
            assert backward == [ROWS * DIM]


# Ranking, state, errors --------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", RANKS)
def test_ranking(pool: Pool, ranks: int) -> None:
    pool.run(ranks, jobs_state.ranking)


def same(state: dict[str, Any], other: dict[str, Any]) -> bool:
    return list(state) == list(other) and all(torch.equal(state[name], other[name]) for name in state)


def test_a_state_survives_another_number_of_ranks(pool: Pool) -> None:
    saved = pool.run(3, jobs_state.save, [2, 18, 1])
    states, (full, *rest) = [own for own, _ in saved], [whole for _, whole in saved]
    assert rest == [{}, {}]
    assert [tuple(state["span"].tolist()) for state in states] == [(0, 2), (2, 20), (20, 21)]
    assert full["linear.weight"].shape == (21, 3)
    assert full["sampler.frequency.num_seen"].sum() == 4
    for ranks, sizes in ((1, None), (2, [20, 1]), (4, None)):
        for parts in (states, states[::-1], [full]):
            loaded = pool.run(ranks, jobs_state.load, parts, sizes)[0]
            assert same(loaded, full)
    alone = manymax.LinearNCELoss(
        3, 21, manymax.samplers.InBatchSampler(21), None, learnable=True, bias=True, weight=torch.ones(21)
    ).double()
    alone.load_state_dict(full)
    assert torch.equal(alone.linear.weight, full["linear.weight"])


@members([*EXACT, *SAMPLED, ("Entmax", {"alpha": 1.3, "learnable": True})], quick=("Softmax", "Entmax-1.3-True"))
def test_the_state_of_every_member_survives_another_number_of_ranks(
    pool: Pool, name: str, setting: dict[str, Any]
) -> None:
    states, fulls, losses = zip(*pool.run(3, jobs_state.state_of, name, setting, []), strict=True)
    for ranks in (1, 2, 4):
        loaded = pool.run(ranks, jobs_state.state_of, name, setting, list(states))
        assert same(loaded[0][1], fulls[0])
        assert [loss for _, _, loss in loaded] == pytest.approx([losses[0]] * ranks, rel=1e-12)


def test_a_state_of_other_classes_is_refused(pool: Pool) -> None:
    states = [own for own, _ in pool.run(2, jobs_state.save, None)]
    pool.run(2, jobs_state.load_wrong_part, states)


def test_first_vectors_are_the_same_for_every_number_of_ranks(pool: Pool) -> None:
    first = pool.run(1, jobs_state.first_vectors)[0]
    reach = 3**-0.5
    assert first["linear.weight"].unique().numel() == 63
    assert 0.8 * reach < first["linear.weight"].abs().max() <= reach
    for ranks in (2, 3):
        assert same(pool.run(ranks, jobs_state.first_vectors)[0], first)


def test_a_fault_on_one_rank_is_an_error_on_all(pool: Pool) -> None:
    pool.run(2, jobs_state.refusals)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"head": torch.nn.Linear(2, 3)}, "`head` must be of the class LinearHead; got Linear"),
        ({"sizes": [2, 1]}, r"`sizes` must be 1 sizes of at least 1 with sum 3, one for each rank; got \(2, 1\)"),
        ({"in_features": 4}, "`in_features` and `bias` are for a head without class vectors"),
        ({"head": manymax.LinearRGLoss(None, 3), "bias": True}, "`bias` needs class vectors made here"),
        (
            {"head": manymax.LinearHierarchicalSoftmaxLoss(2, 3)},
            "`head` of hierarchical_softmax cannot be split over ranks: its vectors belong to the nodes of a tree",
        ),
    ],
)
def test_arguments_that_make_no_sense(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ManymaxError, match=message):
        ShardedHead(**{"head": manymax.LinearSoftmaxLoss(2, 3), **arguments})


def test_a_process_alone_needs_no_group() -> None:
    head = ShardedHead(manymax.LinearSoftmaxLoss(None, 3))
    with pytest.raises(ArgumentError, match="built without class vectors: pass `linear_weight`"):
        head(torch.zeros(1, 2), torch.zeros(1, dtype=torch.long))
    with pytest.raises(ArgumentError, match="`k` must be an integer from 1 to the number of classes, 3; got 4"):
        head.topk(torch.zeros(1, 2), 4, torch.zeros(3, 2))
    assert float(head(torch.zeros(1, 2), torch.zeros(1, dtype=torch.long), torch.zeros(3, 2))) == pytest.approx(
        1.0986123
    )
    assert "classes 0 to 2, rank 0 of 1" in repr(head)

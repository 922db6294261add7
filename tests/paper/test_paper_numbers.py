"""The paper's printed numbers, checked against one another: each table repeats parts of others."""

from __future__ import annotations

from collections import Counter

import pytest

from manymax.members import FAMILY
from manymax.paper.numbers import DATA, NUMBERS, PAPER_TABLES, PaperNumber

LEARNING_RATE_TABLES = {"mf": "mf_losses", "sasrec": "sasrec_losses", "lightgcn": "lightgcn_ml1m"}


def select(table: str, data: str, loss: str, metric: str, **setting: object) -> list[PaperNumber]:
    return [
        n
        for n in NUMBERS
        if (n.table, n.data, n.loss, n.metric) == (table, data, loss, metric)
        and all(n.setting.get(key) == value for key, value in setting.items())
    ]


def test_every_cell_of_the_seven_tables_is_there() -> None:
    # learning rates: 7 losses x 3 metrics x 3 rates x 3 sets, and RG with one column; SASRec lacks HSM and RG
    expected = {
        "mf_losses": 7 * 27 + 9,
        "sasrec_losses": 6 * 27,
        "lightgcn_ml1m": 5 * 9,
        "mf_k_sweep": 2 * 36,
        "sasrec_k_sweep": 2 * 36,
        "mf_q_choice": 2 * 18,
        "sasrec_q_choice": 2 * 18,
    }
    assert Counter(n.table for n in NUMBERS) == expected
    assert {t.name for t in PAPER_TABLES} == set(expected)
    assert len({n.loss for n in NUMBERS}) == 8
    assert {n.loss for n in NUMBERS} <= set(FAMILY)
    keys = [(n.table, n.data, n.loss, n.metric, *n.setting.items()) for n in NUMBERS]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("table", "data", "loss", "metric", "setting", "value"),
    [
        ("mf_losses", "ml-1m", "softmax", "ndcg@20", {"lr": 1e-3}, 0.2661),
        ("mf_losses", "gowalla", "sparsemax", "ndcg@20", {"lr": 1e-4}, 0.0992),
        ("mf_losses", "electronics", "rg", "recall@20", {}, 0.0563),
        ("sasrec_losses", "electronics", "nce", "precision@20", {"lr": 5e-4}, 0.0019),
        ("lightgcn_ml1m", "ml-1m", "sampled_softmax", "recall@20", {"lr": 1e-3}, 0.2523),
        ("sasrec_k_sweep", "ml-1m", "nce", "ndcg@20", {"num_negatives": 5}, 0.0174),
        ("mf_q_choice", "gowalla", "nce", "recall@20", {"sampler": "dns"}, 0.1048),
    ],
)
def test_cells_read_off_the_page(table: str, data: str, loss: str, metric: str, setting: dict, value: float) -> None:
    (number,) = select(table, data, loss, metric, **setting)
    assert number.value == value


def test_a_hundred_negatives_and_uniform_repeat_a_learning_rate_column() -> None:
    repeated = [n for n in NUMBERS if n.setting.get("num_negatives") == 100 or n.setting.get("sampler") == "uniform"]
    assert len(repeated) == 72
    for n in repeated:
        rates = select(LEARNING_RATE_TABLES[n.backbone], n.data, n.loss, n.metric)
        assert n.value in [rate.value for rate in rates], n


def test_what_the_paper_prints_twice_differently_is_marked() -> None:
    def printed(n: PaperNumber) -> float:
        (other,) = select(n.table.replace("q_choice", "k_sweep"), n.data, n.loss, n.metric, num_negatives=100)
        return other.value

    uniform = [n for n in NUMBERS if n.setting.get("sampler") == "uniform"]
    assert [n for n in uniform if n.value != printed(n)] == [n for n in NUMBERS if n.status == "contradicted"]


def test_the_sequential_tables_have_one_target_per_user() -> None:
    rounding = 0.0001  # of P@20, and of R@20 / 20; four DNS cells are off by up to 0.00012, so not of one run
    for n in NUMBERS:
        if n.backbone == "sasrec" and n.metric == "recall@20":
            (precision,) = select(n.table, n.data, n.loss, "precision@20", **n.setting)
            assert abs(n.value / 20 - precision.value) < 1.2 * rounding, n
            assert "one target" in n.note


def test_data_sets() -> None:
    assert set(DATA) == {n.data for n in NUMBERS}
    wrong = [name for name, data in DATA.items() if abs(data.sparsity - data.counted_sparsity) > 0.00501]
    assert wrong == ["gowalla"]

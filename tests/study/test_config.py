"""Settings: one name each, wrong ones refused in words, and a hash that is equal exactly for equal runs."""

from __future__ import annotations

import pytest
from pydantic_core import PydanticUndefined

from manymax.errors import ArgumentError, ManymaxError, UnknownNameError
from manymax.members import FAMILY
from manymax.samplers import SAMPLERS
from manymax.study.config import ONLY_FOR, RunConfig


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"bach_size": 4}, "unknown option 'bach_size': did you mean 'batch_size'?"),
        ({"loss": "sparsmax"}, "unknown loss 'sparsmax': did you mean 'sparsemax'?"),
        ({"loss": "ssm", "sampler": "unifrom"}, "unknown sampler 'unifrom': did you mean 'uniform'?"),
        ({"backbone": "sasrek"}, "unknown backbone 'sasrek': did you mean 'sasrec'?"),
        ({"lr": 0}, "`lr`: input should be greater than 0; got 0."),
        ({"lr": "fast"}, "`lr`: input should be a valid number"),
        ({"lr": float("nan")}, "`lr`: input should be a finite number"),
        ({"epochs": 2.5}, "`epochs`: input should be a valid integer"),
        ({"alpha": 1.2}, "`alpha` has no effect with loss 'softmax': it belongs to loss 'entmax'. Leave it out."),
        ({"power": 0.5, "loss": "ssm"}, "`power` has no effect with sampler 'uniform'"),
        ({"power": 0.5, "sampler": "popularity"}, "`sampler` has no effect with loss 'softmax'"),
        ({"dropout": 0.1}, "`dropout` has no effect with backbone 'mf'"),
        ({"temperature": 0.2}, "`temperature` has no effect with scale 'dot'"),
        ({"ridge": 1.0}, "`ridge` has no effect with solver 'gradient'"),
        ({"solver": "als"}, "`solver='als'` solves loss 'rg' on backbone 'mf'"),
        ({"solver": "als", "loss": "rg", "lr": 0.1}, "`lr` has no effect with solver 'als'"),
        ({"cutoffs": "5,x"}, "`cutoffs.1`: input should be a valid integer"),
        ({"cutoffs": "0"}, "`cutoffs` must be at least 1; got 0."),
        ({"cutoffs": ()}, "`cutoffs`: tuple should have at least 1 item"),
        ({"monitor": "ndgc@20"}, "`monitor` must be one of"),
        ({"monitor": "ndcg@10"}, "`monitor` must be one of '20'; got '10'."),
        ({"columns": "user:uid"}, "`columns` must look like user=..,item=..; got 'user:uid'."),
        ({"split": "random"}, "`split`: input should be 'ratio'"),
    ],
)
def test_a_wrong_setting_is_refused_in_words(settings: dict, complaint: str) -> None:
    with pytest.raises(ManymaxError) as caught:
        RunConfig(**settings)
    assert complaint in str(caught.value)
    assert isinstance(caught.value, ArgumentError | UnknownNameError)


def test_a_mistake_in_two_options_names_both() -> None:
    with pytest.raises(ArgumentError, match=r"`lr`.*`epochs`"):
        RunConfig(lr=-1, epochs=0)


def test_text_as_on_a_command_line() -> None:
    config = RunConfig(columns="user=uid, item=book", cutoffs="20,5")
    assert config.columns == {"user": "uid", "item": "book"}
    assert config.cutoffs == (5, 20)
    assert config.monitored == "ndcg@20"
    assert RunConfig(cutoffs=10).monitored == "ndcg@10"
    assert RunConfig(cutoffs=[5, 20], monitor="recall@5").monitored == "recall@5"


def test_other_names_are_made_one() -> None:
    assert RunConfig(loss="hsm").content_hash() == RunConfig(loss="hierarchical_softmax").content_hash()
    short, long = RunConfig(loss="ssm", sampler="pop"), RunConfig(loss="sampled_softmax", sampler="popularity")
    assert short.content_hash() == long.content_hash()


def test_every_setting_that_has_an_effect_changes_the_hash() -> None:
    base = RunConfig()
    other = {
        "data": "planted-tiny",
        "backbone": "sasrec",
        "loss": "rankmax",
        "split": "given",
        "scale": "cosine",
        "computation": "table",
    }
    for name, field in RunConfig.model_fields.items():
        if name in base.unused() or name == "solver":
            continue
        value = other.get(name, _another(field.default, name))
        assert RunConfig(**{name: value}).content_hash() != base.content_hash(), name


def _another(value: object, name: str) -> object:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    texts = {"columns": {"user": "u"}, "cutoffs": (5, 20), "monitor": "recall@20", "multilabel": "normalized"}
    texts |= {"init": "xavier", "batches": "users", "preset": "paper-table", "size": "tiny", "name": "x"}
    return texts.get(name, 1)


def test_the_hash_survives_a_round_trip() -> None:
    config = RunConfig(loss="entmax", alpha=1.3, cutoffs=(5, 20), columns={"user": "u", "item": "i"}, clip=0.1)
    assert RunConfig(**config.model_dump(mode="json")) == config
    assert RunConfig(**config.model_dump(mode="json")).content_hash() == config.content_hash()


def test_a_grid_may_name_settings_that_only_some_members_take() -> None:
    grid = {"alpha": 1.3, "num_negatives": 7, "sampler": "popularity", "power": 0.5, "dropout": 0.1, "lr": 0.01}
    for loss in FAMILY:
        config = RunConfig.trimmed({"loss": loss, **grid})
        assert config.lr == 0.01
        assert config.alpha == (1.3 if loss == "entmax" else 1.5)
        sampled = FAMILY[loss].kind == "sampled"
        assert (config.num_negatives, config.power) == ((7, 0.5) if sampled else (100, 1.0))
        assert config.content_hash() == RunConfig.trimmed({"loss": loss, **grid, "dropout": 0.9}).content_hash()
    with pytest.raises(UnknownNameError, match="bach_size"):
        RunConfig.trimmed({"bach_size": 3})


def test_the_table_of_restricted_options_names_what_exists() -> None:
    for names, option, values in ONLY_FOR:
        assert {*names, option} <= set(RunConfig.model_fields)
        if option == "sampler":
            assert set(values) <= set(SAMPLERS)


def test_every_setting_has_a_default_and_one_line_of_meaning() -> None:
    for name, field in RunConfig.model_fields.items():
        assert field.default is not PydanticUndefined, name
        assert field.description, name
        assert field.description.endswith("."), name
        assert len(field.description) < 100, name


def test_settings_cannot_be_changed_afterwards() -> None:
    with pytest.raises(Exception, match="frozen"):
        RunConfig().lr = 1.0  # type: ignore[misc]

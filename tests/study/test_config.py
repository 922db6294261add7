"""Settings: their names, errors for wrong ones, and a hash that is equal for equal runs only."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic_core import PydanticUndefined

from manymax.engine.member import Setting
from manymax.errors import ArgumentError, ManymaxError, UnknownNameError
from manymax.members import FAMILY
from manymax.study.config import RunConfig
from manymax.study.run_options import FLAT_FORM, LATER_OPTIONS, LATER_SETTINGS, flat, options


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
        ({"solver": "als"}, "`solver='als'` needs loss 'rg', backbone 'mf'"),
        ({"solver": "als", "loss": "rg", "lr": 0.1}, "`lr` has no effect with solver 'als'"),
        ({"cutoffs": "5,x"}, "`cutoffs.1`: input should be a valid integer"),
        ({"cutoffs": "0"}, "`cutoffs` must be at least 1; got 0."),
        ({"cutoffs": ()}, "`cutoffs`: tuple should have at least 1 item"),
        ({"monitor": "ndgc@20"}, "`monitor` must be one of"),
        ({"monitor": "ndcg@10"}, "`monitor` must be one of '20'; got '10'."),
        ({"columns": "user:uid"}, "`columns` must look like user=NAME,item=NAME; got 'user:uid'."),
        ({"split": "random"}, "`split`: input should be 'ratio'"),
    ],
)
def test_a_wrong_setting_is_refused_with_a_message(settings: dict, complaint: str) -> None:
    with pytest.raises(ManymaxError) as caught:
        RunConfig(**settings)
    assert complaint in str(caught.value)
    assert isinstance(caught.value, ArgumentError | UnknownNameError)


def test_a_mistake_in_two_options_names_both() -> None:
    with pytest.raises(ArgumentError, match=r"`lr`.*`epochs`"):
        RunConfig(lr=-1, epochs=0)


def test_text_as_on_a_command_line() -> None:
    config = RunConfig(columns="user=uid, item=book", cutoffs="20,5")
    assert config.data.columns == {"user": "uid", "item": "book"}
    assert config.evaluation.cutoffs == (5, 20)
    assert config.monitored == "ndcg@20"
    assert RunConfig(cutoffs=10).monitored == "ndcg@10"
    assert RunConfig(cutoffs=[5, 20], monitor="recall@5").monitored == "recall@5"


def test_aliases_become_the_canonical_name() -> None:
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
        "backend": "torch",
    }
    for option in options():
        if option.name in base.unused() or option.name == "solver":
            continue
        value = other.get(option.name, _another(option.default, option.name))
        assert RunConfig(**{option.name: value}).content_hash() != base.content_hash(), option.name


def _another(value: object, name: str) -> object:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    texts = {"columns": {"user": "u"}, "cutoffs": (5, 20), "monitor": "recall@20", "multilabel": "normalized"}
    texts |= {
        "init": "xavier",
        "batches": "users",
        "exclude": "positives",
        "preset": "paper-table",
        "size": "tiny",
        "name": "x",
        "encoding": "latin-1",
        "date_format": "%d.%m.%Y",
    }
    return texts.get(name, 1)


def test_the_hash_survives_a_round_trip() -> None:
    config = RunConfig(loss="entmax", alpha=1.3, cutoffs=(5, 20), columns={"user": "u", "item": "i"}, clip=0.1)
    for form in (config.nested(), config.flat(), config.model_dump(mode="json")):
        assert RunConfig(**form) == config
        assert RunConfig(**form).content_hash() == config.content_hash()


def test_a_grid_may_name_settings_that_only_some_members_take() -> None:
    grid = {"alpha": 1.3, "num_negatives": 7, "sampler": "popularity", "power": 0.5, "dropout": 0.1, "lr": 0.01}
    for loss in FAMILY:
        config = RunConfig.trimmed({"loss": loss, **grid})
        assert config.training.lr == 0.01
        assert config.flat()["alpha"] == (1.3 if loss == "entmax" else 1.5)
        sampled = FAMILY[loss].kind == "sampled"
        assert (config.sampler.num_negatives, config.flat()["power"]) == ((7, 0.5) if sampled else (100, 1.0))
        assert config.content_hash() == RunConfig.trimmed({"loss": loss, **grid, "dropout": 0.9}).content_hash()
    with pytest.raises(UnknownNameError, match="bach_size"):
        RunConfig.trimmed({"bach_size": 3})


def test_every_setting_has_a_default_and_one_line_of_meaning() -> None:
    assert [option.name for option in options()][: len(FLAT_FORM)] == list(FLAT_FORM)
    for option in options():
        assert option.default is not PydanticUndefined, option.name
        assert option.help.endswith("."), option.name
        assert len(option.help) < 100, option.name


def test_settings_cannot_be_changed_afterwards() -> None:
    with pytest.raises(Exception, match="frozen"):
        RunConfig().training.lr = 1.0  # type: ignore[misc]
    with pytest.raises(Exception, match="frozen"):
        RunConfig(loss="entmax").loss.alpha = 1.2


@pytest.mark.parametrize(
    ("nested", "same"),
    [
        ({"loss": {"name": "ssm", "correction": "none"}}, {"loss": "ssm", "correction": "none"}),
        ({"loss.name": "entmax", "loss.alpha": "1.2"}, {"loss": "entmax", "alpha": 1.2}),
        ({"loss": "entmax", "loss.learnable_alpha": True}, {"loss": "entmax", "learnable_alpha": True}),
        ({"data": {"source": "x.csv", "name": "x"}, "seed": 3}, {"data": "x.csv", "name": "x", "seed": 3}),
        ({"backbone": {"name": "sasrec", "dropout": 0}}, {"backbone": "sasrec", "dropout": 0.0}),
        ({"loss": "nce", "sampler": {"name": "dns", "pool": 9}}, {"loss": "nce", "sampler": "dns", "pool": 9}),
        ({"loss": "rg", "training": {"solver": "als", "ridge": 1}}, {"loss": "rg", "solver": "als", "ridge": 1.0}),
    ],
    ids=str,
)
def test_nested_and_flat_settings_are_the_same_run(nested: dict, same: dict) -> None:
    assert RunConfig(**nested) == RunConfig(**same)
    assert RunConfig(**nested).content_hash() == RunConfig(**same).content_hash()
    assert RunConfig(**RunConfig(**nested).nested()) == RunConfig(**same)
    assert flat(RunConfig(**nested).nested()) == RunConfig(**same).flat()


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"loss": "entmax", "alpha": 3}, "`alpha` must be a number in [1, 2] (1 is softmax, 2 is sparsemax); got 3."),
        ({"loss": {"name": "taylor_softmax", "order": 3}}, "`order` must be an even integer in [2, 30]"),
        (
            {"loss": "ssm", "correction": "logp"},
            "`correction` must be one of 'none', 'logq', 'partition', 'corrected_logq'; got 'logp'.",
        ),
        ({"loss": "ssm", "sampler": "dns", "pool": 0}, "`pool` must be an integer of at least 1; got 0."),
        ({"backbone": "sasrec", "dropout": 1.0}, "`dropout` must be a number in [0, 1); got 1.0."),
        ({"loss": "rg", "solver": "als", "ridge": 0}, "`ridge` must be a number above 0; got 0."),
        ({"loss": "entmax", "alpha": "much"}, "`alpha` must be a number; got 'much'."),
        ({"loss": "nce", "label_smoothing": 0.1}, "`label_smoothing` has no effect with loss 'nce'"),
        ({"loss": {"name": "entmax", "alfa": 1.2}}, "unknown setting of loss 'alfa': did you mean 'alpha'?"),
        ({"los.alpha": 1.2}, "unknown group of settings 'los': did you mean 'loss'?"),
        ({"training": 3}, "`training` is a group of settings, so it must be a table; got 3."),
        ({"alpha": 1.2, "loss": {"name": "entmax", "alpha": 1.2}}, "`alpha` is given twice"),
        ({"computation": "tabel"}, "unknown computation 'tabel': did you mean 'table'?"),
        ({"solver": "asl"}, "`solver` must be one of 'gradient', 'als'; got 'asl'. Did you mean 'als'?"),
    ],
    ids=str,
)
def test_settings_that_a_row_declares_are_checked(settings: dict, complaint: str) -> None:
    with pytest.raises(ManymaxError) as caught:
        RunConfig(**settings)
    assert complaint in str(caught.value)


def test_a_record_holds_the_settings_that_have_an_effect() -> None:
    nested = RunConfig(loss="nce", sampler="popularity").nested()
    assert nested["loss"] == {
        "name": "nce",
        "exclude": "none",
        "hit_policy": None,
        "log_z": None,
        "learnable_log_z": False,
    }
    assert nested["sampler"]["power"] == 1.0
    assert "sampler" not in RunConfig().nested()


def test_a_setting_with_a_name_that_is_taken_is_refused() -> None:
    taken = replace(FAMILY["softmax"], name="mine", aliases=(), settings=(Setting("lr", float, 1.0, "Not Adam's."),))
    with (
        FAMILY.extended(taken),
        pytest.raises(ManymaxError, match="setting `lr` of 'mine': every run has"),
    ):
        RunConfig()


ROOT = Path(__file__).parents[2]
KEPT, OLD = ROOT / "results", ROOT / "tests" / "fixtures" / "v0_1_0"

# Number of records whose hash no `RunConfig` since 0.1.0 computes: they are older, or were edited.
OLDER = 51


def test_the_hashes_of_all_kept_records_are_those_of_version_0_1_0() -> None:
    """The folders of studies are named by them. Every record also reads flat as it was written."""
    contents = [
        (path, json.loads(path.read_text(encoding="utf-8")))
        for name in ("record.json", "settings.json")
        for path in OLD.rglob(name)
    ]
    for path in (*KEPT.glob("*.jsonl"), *(KEPT / "study").glob("*.jsonl")):  # those of results/public are later ones
        contents += [(path, json.loads(line)["record"]) for line in path.read_text(encoding="utf-8").splitlines()]
    later = [(name, value) for name, value in LATER_OPTIONS.items() if name != "computation"]
    others = []
    for path, content in contents:
        config = RunConfig(**content["settings"])
        assert flat(content["settings"]) == content["settings"]
        assert flat(config.nested()) == flat(RunConfig(**config.nested()).nested()) == config.flat()
        if config.content_hash() != content["hash"]:
            others.append(path)
        elif "computation" in content["settings"]:  # the last of that version's options: names and order are the same
            now = [each for each in config.flat().items() if each not in LATER_SETTINGS.items()]
            assert now == [*content["settings"].items(), *later]
    assert len(contents) > 400
    assert len(others) == OLDER
    assert not [path for path in others if "fixtures" in path.parts or path.stem == "planted"]

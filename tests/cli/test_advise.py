"""`manymax advise`: its text, its JSON, and the files that it reads."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from manymax.cli.advise import read_machine
from manymax.cli.advise_study import when_grown
from manymax.cli.app import app
from manymax.cli.tensors import read_tensor
from manymax.errors import ArgumentError, ManymaxError
from manymax.members import FAMILY
from manymax.study.report.answer import answers
from manymax.study.report.runs import read_study
from manymax.theory.cost import Machine, Shape, predict_seconds
from tests.study.report.generated import write_run

MACHINE = Machine(flops=1e-11, exponentials=1e-9, fresh=2e-9, near=4e-10, far=1e-9, sorted=2e-8, calls=1e-6)


@pytest.fixture
def machine(tmp_path: Path) -> str:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(asdict(MACHINE)))
    return str(path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["advise", *arguments])


def output(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_table_with_reasons(machine: str) -> None:
    text = output("200", "--machine", machine, "--examples", "5000", "--max-memory", "0.004", "--positives", "2")
    ranked_by, table = text[: text.index("member")], text[text.index("member") :]
    assert " ".join(ranked_by.split()).startswith("Ranked by closeness to the softmax loss: ")
    lines = table.splitlines()
    assert lines[0].split()[:3] == ["member", "settings", "step"]
    assert lines[2].split()[:2] == ["1", "softmax"]
    assert "multilabel='sum', num_negatives=" in text
    for title in ("Why, and what each gives up", "Rejected", "Assumed"):
        assert title in lines
    assert "gives up convexity: the loss is concave between its kinks" in text
    assert "GB of memory; the limit is 0.004 GB" in text
    assert "standard deviation of 1.2" in text


@pytest.mark.parametrize("count", ["2e2", "200", "2_00"])
def test_counts_in_any_notation(machine: str, count: str) -> None:
    content = json.loads(output(count, "--examples", "1e4", "--machine", machine, "--json"))
    assert (content["situation"]["num_classes"], content["situation"]["examples"]) == (200, 10_000)


@pytest.mark.parametrize("count", ["1.5", "many", "1e-3", "inf", "nan"])
def test_what_is_no_count(machine: str, count: str) -> None:
    result = run(count, "--machine", machine)
    assert result.exit_code != 0
    assert "a count must be a whole number, such as 40981 or 1e6" in f"{result.output}{result.exception}"


def test_limits_that_no_member_fits(machine: str) -> None:
    text = output("200", "--machine", machine, "--max-memory", "1e-9")
    assert text.startswith("No member fits the limits.\n\nRejected\n")
    assert "Why" not in text


def test_json_has_everything_and_serves_as_a_machine_file(machine: str, tmp_path: Path) -> None:
    options = ["200", "--num-negatives", "7", "--metric", "recall", "--shared", "--json"]
    text = output(*options, "--machine", machine)
    content = json.loads(text)
    assert {c["member"] for c in content["ranked"] + content["rejected"]} == {*FAMILY}
    assert content["situation"]["metric"] == "recall"
    assert content["machine"] == asdict(MACHINE)
    sampled = next(c for c in content["ranked"] if c["member"] == "nce")
    assert sampled["settings"] == {"num_negatives": 7, "shared": True}
    again = tmp_path / "advice.json"
    again.write_text(text)
    assert output(*options, "--machine", str(again)) == text


def test_every_option_reaches_the_advisor(machine: str, tmp_path: Path) -> None:
    scores, log_q = torch.randn(2, 30), torch.randn(30).log_softmax(0)
    np.save(tmp_path / "scores.npy", scores.numpy())
    torch.save(log_q, tmp_path / "log_q.pt")
    text = output(
        *("30", "--machine", machine, "--json", "--dim", "8", "--batch", "16", "--examples", "100"),
        *("--positives", "2.5", "--max-memory", "1", "--max-step-seconds", "0.5", "--max-epoch-seconds", "9"),
        *("--target", "0.3", "--scores", str(tmp_path / "scores.npy"), "--log-q", str(tmp_path / "log_q.pt")),
    )
    content = json.loads(text)
    assert content["situation"] == {
        "num_classes": 30,
        "dim": 8,
        "batch": 16,
        "examples": 100,
        "positives": 2.5,
        "metric": "ndcg",
        "max_memory": 1e9,
        "max_step_seconds": 0.5,
        "max_epoch_seconds": 9.0,
        "num_negatives": None,
        "shared": False,
        "target": 0.3,
    }
    assert not any("standard deviation" in text for text in content["assumptions"])
    assert {c["proposal"] for c in content["ranked"] + content["rejected"]} == {None, "uniform", "given", "dns"}
    spread = json.loads(output("30", "--machine", machine, "--spread", "0.25", "--json"))
    assert "standard deviation of 0.25" in spread["assumptions"][0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-5"], "`num_classes` must be an integer of at least 1"),
        (["50", "--metric", "ngcd"], "`metric` must be one of"),
        (["50", "--num-negatives", "51"], "`num_negatives` must be at most the number of classes, 50; got 51"),
        (["50", "--max-memory", "-1"], "`max_memory` must be a finite number above 0"),
        (["50", "--scores", "scores.txt"], "`--scores` must be a file that ends in .npy, .pt, .safetensors"),
        (["50", "--log-q", "missing.npy"], "`--log-q` cannot be read from 'missing.npy'"),
    ],
)
def test_wrong_options_end_in_a_message(arguments: list[str], message: str, machine: str) -> None:
    result = (
        run("--machine", machine, "--", *arguments) if arguments == ["-5"] else run(*arguments, "--machine", machine)
    )
    assert isinstance(result.exception, ManymaxError)
    assert message in str(result.exception)
    assert result.stdout == ""


def test_a_machine_from_before_the_native_back_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    older = asdict(MACHINE)
    del older["native"]
    path.write_text(json.dumps(older))
    assert read_machine(path) == MACHINE
    path.write_text(json.dumps(asdict(MACHINE) | {"native": True}))
    assert read_machine(path).native


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "`--machine` must be a readable JSON file"),
        ("{", "`--machine` must be a readable JSON file"),
        ("[1]", "`--machine` must hold an object of seconds by kind of work"),
        ('{"machine": 3}', "`--machine` must hold an object of seconds by kind of work"),
        ('{"flop": 1e-11}', "unknown kind of work 'flop': did you mean 'flops'"),
        ('{"flops": "fast"}', "`machine.flops` must be seconds, at least 0; got 'fast'"),
        ('{"flops": 1e-11, "streamed": 1e-9}', "every kind of work; exponentials, passes, fresh, near"),
        (json.dumps(asdict(Machine())), "`flops` above 0"),
    ],
)
def test_a_wrong_machine_is_refused(content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ManymaxError) as caught:
        read_machine(path)
    assert message in str(caught.value)


def test_float8_is_converted_and_sparse_tensors_are_refused(tmp_path: Path) -> None:
    torch.save(torch.ones(2, 3).to(torch.float8_e4m3fn), tmp_path / "small.pt")
    assert torch.equal(read_tensor("--scores", tmp_path / "small.pt"), torch.ones(2, 3))
    torch.save(torch.ones(2, 3).to_sparse(), tmp_path / "sparse.pt")
    with pytest.raises(ManymaxError, match=r"`--scores` must be dense; .* `\.to_dense\(\)`"):
        read_tensor("--scores", tmp_path / "sparse.pt")


def test_a_tensor_is_read_from_every_file_format(tmp_path: Path) -> None:
    value = torch.randn(2, 3)
    np.save(tmp_path / "a.npy", value.numpy())
    torch.save(value, tmp_path / "a.pt")
    save_file({"scores": value}, tmp_path / "a.safetensors")
    for kind in ("npy", "pt", "safetensors"):
        assert torch.equal(read_tensor("--scores", tmp_path / f"a.{kind}"), value)


class Trap:
    """An object whose pickle runs code when it is loaded, as a hostile file could."""

    def __reduce__(self) -> tuple[object, ...]:
        return (pytest.fail, ("a pickle was run",))


def test_files_that_hold_something_else_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "objects.npy", np.array([Trap()], dtype=object), allow_pickle=True)
    (tmp_path / "code.pt").write_bytes(pickle.dumps(Trap(), protocol=2))
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "noise.npy").write_bytes(b"no array")
    (tmp_path / "noise.safetensors").write_bytes(b"no tensors")
    (tmp_path / "folder.npy").mkdir()
    for name in ("objects.npy", "code.pt", "empty.pt", "noise.npy", "noise.safetensors", "folder.npy"):
        with pytest.raises(ArgumentError, match="`--scores` cannot be read from"):
            read_tensor("--scores", tmp_path / name)
    torch.save({"a": torch.zeros(1), "b": torch.zeros(1)}, tmp_path / "two.pt")
    torch.save({"a": 3}, tmp_path / "number.pt")
    for name in ("two.pt", "number.pt"):
        with pytest.raises(ArgumentError, match="`--scores` must be a file with one tensor"):
            read_tensor("--scores", tmp_path / name)


STUDY = Path(__file__).parents[1] / "fixtures" / "v0_1_0" / "study"


class TestStudy:
    def losses(self, machine: str, *arguments: str) -> list[dict]:
        content = json.loads(output(*arguments, "--study", str(STUDY), "--machine", machine, "--json"))
        assert content["ranked_by"].startswith(f"Ranked by {content['metric']} on the validation part")
        return content["losses"]

    def test_the_best_come_first_and_among_equal_ones_the_fastest(
        self, machine: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("manymax.cli.advise_study.EQUAL_QUALITY", 0.3)  # so that several losses are equal
        losses = self.losses(machine, "1e5")
        places = {(each["data"], each["backbone"]) for each in losses}
        assert len(places) > 2
        for place in places:
            here = [each for each in losses if (each["data"], each["backbone"]) == place]
            best = max(each["valid"] for each in here)
            equal = [each for each in here if each["valid"] >= 0.7 * best]
            assert here[: len(equal)] == [each for each in here if each["equal"]]
            assert sorted(map(str, equal)) == sorted(map(str, here[: len(equal)]))
            assert len(equal) > 5 or len(here) == 1 or place[1] != "mf"
            times = [each["step_seconds"] or math.inf for each in here[: len(equal)]]
            assert times == sorted(times)
            others = [each["valid"] for each in here[len(equal) :]]
            assert others == sorted(others, reverse=True)

    def test_times_are_those_at_the_size_asked_for(self, machine: str) -> None:
        sizes = (self.losses(machine, size) for size in ("1000", "1e5"))
        small, large = ({each["loss"]: each["step_seconds"] for each in losses} for losses in sizes)
        assert large["rankmax"] > 50 * small["rankmax"]
        pooled = "sampled_softmax (num_negatives=4)"  # the one that chooses its negatives among a pool of 10
        assert large[pooled] < 5 * small[pooled]
        shape = Shape(1024, 100_000, 64, num_negatives=4, num_candidates=10)
        assert large[pooled] == predict_seconds("sampled_softmax", shape, MACHINE)
        assert large["bpr"] is None

    def test_without_a_size_it_is_that_of_the_study(self, machine: str) -> None:
        text = " ".join(output("--study", str(STUDY), "--machine", machine).split())
        assert "measured in" in text
        assert "with 20 items" in text
        assert "for 20 classes" in text
        assert "ndcg@5 valid test seeds step" in text

    def test_limits_are_marked(self, machine: str) -> None:
        text = output("1e5", "--study", str(STUDY), "--machine", machine, "--max-step-seconds", "0.01")
        rankmax = next(line for line in text.splitlines() if " rankmax" in line)
        assert rankmax.endswith("over the limit")

    def test_neither_a_size_nor_a_study(self, machine: str, tmp_path: Path) -> None:
        assert "give the number of classes, or a finished study" in str(run("--machine", machine).exception)
        assert isinstance(run("10", "--study", str(tmp_path), "--machine", machine).exception, ManymaxError)


def test_a_winner_whose_cost_is_not_modelled_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manymax.advisor.measure_machine", lambda dim: MACHINE)
    for loss, quality in (("bpr", 0.4), ("softmax", 0.3)):
        write_run(tmp_path, loss=loss, quality=quality)
    (answer,) = answers(read_study(tmp_path))
    told = when_grown(answer, 100)
    assert told.startswith("at 15,000 items: softmax, -2")
    assert told.endswith("What bpr would take is not modelled")

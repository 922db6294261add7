"""`manymax diagnose` on built-in scores, files and runs: what it computes, writes and refuses."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib.image
import numpy as np
import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner, Result

from manymax.cli.app import app
from manymax.members import FAMILY
from manymax.members.sampled_softmax.theory import ESTIMATES
from manymax.study import diagnosis
from manymax.study.config import RunConfig
from manymax.study.run import run as run_study
from manymax.theory.bias_variance import estimate
from manymax.theory.gradient_deviation import gradient_estimators
from tests.exact import normal

SMALL = ("--rows", "4", "--num-negatives", "3", "--draws", "50")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["diagnose", *arguments])


def content(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout, parse_constant=pytest.fail)
    return found


@pytest.fixture(scope="module", params=["softmax", "hsm"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / request.param
    settings: dict[str, Any] = {"data": "planted-tiny", "dim": 8, "batch_size": 500, "epochs": 1, "lr": 0.01}
    run_study(RunConfig(**settings, loss=request.param), folder)
    return folder


@pytest.mark.parametrize("name", diagnosis.BUILT_IN)
def test_built_in_scores(name: str) -> None:
    found = content(name, *SMALL, "--classes", "40")
    assert (found["scores"], found["rows"], found["classes"]) == (name, 4, 40)
    assert found == content(name, *SMALL, "--classes", "40")  # the seed determines everything
    assert found != content(name, *SMALL, "--classes", "40", "--seed", "1")


def test_every_approximation_and_every_map_has_a_row() -> None:
    found = content(*SMALL, "--num-negatives", "7", "--classes", "40", "--dim", "2")
    rows = [(row["member"], row["correction"], row["num_negatives"]) for row in found["bias_variance"]]
    sampled = [("sampled_softmax", correction, k) for correction in ESTIMATES for k in (3, 7)]
    others = [(name, None, None) for name in ("hierarchical_softmax", "rg", "taylor_softmax")]
    assert rows == [*sampled, ("nce", None, 3), ("nce", None, 7), *others]
    assert {row["member"] for row in found["signals"]} >= {m.name for m in FAMILY.values() if m.map is not None}
    by_name = {row["member"]: row for row in found["signals"]}
    assert by_name["softmax"]["silent"] == 0
    assert by_name["sparsemax"]["silent"] > by_name["entmax"]["silent"] > 0.5
    assert by_name["sparsemax"]["tie_loss"] > by_name["softmax"]["tie_loss"] == pytest.approx(0, abs=1e-12)


def test_deviations_of_gradients() -> None:
    """A row per estimate and size: exact and predicted over the same rows; none where a class is masked."""
    found = content(*SMALL, "--num-negatives", "200", "--classes", "12")["deviations"]
    assert [(row["estimate"], row["num_negatives"]) for row in found] == [
        (name, k) for name in gradient_estimators() for k in (3, 200)
    ]
    for row in found[1::2]:  # of many negatives
        assert row["predicted_noise"] == pytest.approx(row["noise"], rel=0.2)
    bias = {row["estimate"]: row["bias"] for row in found[::2]}
    assert max(bias.values()) == bias["logq"] > 0.05
    printed = run(*SMALL, "--classes", "12").stdout
    assert all(name in printed for name in gradient_estimators())
    assert "in parts of its length" in printed


def test_deviations_of_many_classes_are_predicted_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(diagnosis, "EXACT_CLASSES", 11)
    assert {row["bias"] for row in content(*SMALL, "--classes", "12")["deviations"]} == {None}
    assert all(row["predicted_bias"] for row in content(*SMALL, "--classes", "12")["deviations"])
    masked = normal(4, 9)
    masked[0, 3] = -math.inf
    np.save(tmp_path / "masked.npy", masked.numpy())
    assert content(str(tmp_path / "masked.npy"), *SMALL)["deviations"] == []


@pytest.mark.parametrize("suffix", [".npy", ".pt", ".safetensors"])
def test_files(suffix: str, tmp_path: Path) -> None:
    scores, log_q = normal(6, 9), normal(9).log_softmax(-1)
    paths = []
    for name, tensor in (("scores", scores), ("log_q", log_q)):
        paths.append(str(tmp_path / f"{name}{suffix}"))
        if suffix == ".npy":
            np.save(paths[-1], tensor.numpy())
        elif suffix == ".pt":
            torch.save(tensor, paths[-1])
        else:
            safetensors.torch.save_file({name: tensor}, paths[-1])
    found = content(paths[0], "--proposal", paths[1], *SMALL)
    subject = diagnosis.from_scores("", scores, 4, diagnosis_generator())
    expected = estimate("ssm", scores[:4], subject.target, log_q=log_q, num_negatives=3, correction="partition")
    row = next(row for row in found["bias_variance"] if row["correction"] == "partition")
    assert row["exact_bias"] == pytest.approx(float(expected.exact_bias.mean()))
    assert row["exact_variance"] == pytest.approx(float(expected.exact_variance.mean()))
    assert row["in_range"] == pytest.approx(float(expected.in_range.double().mean()))


def diagnosis_generator() -> torch.Generator:
    from manymax.study.seeds import generator

    return generator(0, "diagnose")


def test_draws_agree_with_exact_values() -> None:
    found = content("--rows", "4", "--num-negatives", "6", "--draws", "4000", "--classes", "60")
    rows = [row for row in found["bias_variance"] if "drawn_bias" in row]
    assert len(rows) == len(ESTIMATES) + 1
    for row in rows:
        assert abs(row["drawn_bias"] - row["exact_bias"]) <= 4 * row["drawn_bias_error"]
        assert abs(row["drawn_variance"] - row["exact_variance"]) <= 4 * row["drawn_variance_error"]
    assert not any("drawn_bias" in row for row in content(*SMALL, "--draws", "0")["bias_variance"])


def test_masked_classes(tmp_path: Path) -> None:
    scores = normal(3, 8)
    scores[:, 5:] = -math.inf
    np.save(tmp_path / "scores.npy", scores.numpy())
    found = content(str(tmp_path / "scores.npy"), *SMALL, "--out", str(tmp_path / "out"))
    assert all(math.isfinite(row["deviation"]) for row in found["bias_variance"])
    assert "importance" not in {row["correction"] for row in found["bias_variance"]}
    assert {row["member"]: row["silent"] for row in found["signals"]}["softmax"] == 0


def test_a_trained_run(trained: Path) -> None:
    found = content(str(trained), *SMALL)
    assert found["rows"] == 4
    popular = content(str(trained), *SMALL, "--proposal", "popularity")
    assert popular["divergences"] != found["divergences"]
    subject, other = (diagnosis.of_run(trained, 4, q, diagnosis_generator()) for q in ("uniform", "popularity"))
    assert subject.scores.shape == (4, found["classes"])
    assert subject.dim == 8
    assert subject.counts is not None
    torch.testing.assert_close(subject.log_q.exp(), torch.full_like(subject.counts, 1 / found["classes"]))
    torch.testing.assert_close(other.log_q.exp(), (subject.counts + 1) / (subject.counts + 1).sum())
    assert torch.equal(subject.target, other.target)


@pytest.mark.slow
def test_heat_maps(tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    found = content(*SMALL, "--classes", "30", "--shown", "10", "--out", str(out))
    names = {
        "diagnosis.json",
        *(f"{name}.{suffix}" for name in ("gradients", "jacobians") for suffix in ("png", "svg")),
    }
    assert {path.name for path in out.iterdir()} == names == {Path(name).name for name in found["files"]}
    assert json.loads((out / "diagnosis.json").read_text()) | {"files": found["files"]} == found
    for name in ("gradients", "jacobians"):
        picture = matplotlib.image.imread(out / f"{name}.png")
        assert picture.shape[0] > 300
        assert picture[..., :3].std() > 0.05
        assert ElementTree.parse(out / f"{name}.svg").getroot().tag.endswith("svg")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    content(*SMALL, "--classes", "30", "--shown", "10", "--out", str(out))
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_nothing_is_left_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    def fails(self: Figure, path: Path, **_: Any) -> None:
        Path(path).write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", fails)
    result = run(*SMALL, "--classes", "30", "--out", str(tmp_path))
    assert "No space left" in str(result.exception)
    assert {path.name for path in tmp_path.iterdir()} == {"diagnosis.json"}


def test_panels_are_the_matrices() -> None:
    """In a heat map zeros are nan, which is drawn black, and each row is smallest at its label, where p - y < 0."""
    subject = diagnosis.built_in("gaussian", 5, 20, diagnosis_generator())
    figures = diagnosis.heat_maps(subject, 20)
    axes = {ax.get_title(): ax for ax in figures["gradients"].axes if ax.get_title()}
    maps = [member for member in FAMILY.values() if member.map is not None]
    assert list(axes) == [" ".join(map(str, (member.name, *member.examples[0].values()))) for member in maps]
    dense, sparse = (np.ma.getdata(axes[name].images[0].get_array()) for name in ("softmax", "sparsemax"))
    by_score = subject.scores.argsort(dim=-1, descending=True)
    labels = (by_score == subject.target[:, None]).nonzero()[:, 1]
    assert (dense.argmin(1) == labels.numpy()).all()
    assert not np.isnan(dense).any()
    assert np.isnan(sparse).mean() > 0.5


def test_the_tables_as_text(tmp_path: Path) -> None:
    result = run(*SMALL, "--classes", "30", "--out", str(tmp_path))
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "gaussian: 4 rows, 30 classes"
    assert "chi2(P || q)" in lines[1]
    assert any(line.startswith("sampled_softmax partition") and " ± " in line for line in lines)
    assert lines[-1] == f"wrote {tmp_path / 'jacobians.svg'}"


def save(path: Path, array: Any) -> str:
    np.save(path, np.asarray(array), allow_pickle=True)
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gausian"], "did you mean 'gaussian'"),
        (["nowhere.npy"], "cannot be read"),
        (["nowhere.csv"], "must be a file that ends in"),
        (["--proposal", "popularity"], "needs the folder of a run"),
        (["--proposal", "popular"], "Did you mean 'popularity'"),
        (["--num-negatives", "0"], "at least 1"),
        (["--draws", "1"], "at least 2"),
        (["{tmp}"], "{tmp}"),
        (["{tmp}/objects.npy"], "cannot be read"),
        (["{tmp}/flat.npy"], "must be a float table"),
        (["{tmp}/whole.npy"], "must be a float table"),
        (["{tmp}/nan.npy"], "must be finite"),
        (["{tmp}/pickled.pt"], "cannot be read"),
        (["--proposal", "{tmp}/low.npy"], "`log_q` must have shape"),
        (["--classes", "3", "--proposal", "{tmp}/low.npy"], "sums to"),
        (["--out", "{tmp}/flat.npy"], "cannot be written to"),
    ],
)
def test_what_it_refuses(arguments: list[str], message: str, tmp_path: Path) -> None:
    save(tmp_path / "objects.npy", [{"a": 1}])
    save(tmp_path / "flat.npy", [0.0, 1.0, 2.0])
    save(tmp_path / "low.npy", [-1.0, -2.0, -3.0])
    save(tmp_path / "whole.npy", [[1, 2], [3, 4]])
    save(tmp_path / "nan.npy", [[0.0, math.nan]])
    (tmp_path / "pickled.pt").write_bytes(pickle.dumps(Path("anything"), protocol=2))
    result = run(*(argument.format(tmp=tmp_path) for argument in (*SMALL, *arguments)))
    assert result.exit_code != 0
    assert message.format(tmp=tmp_path) in str(result.exception)
    assert type(result.exception).__module__ == "manymax.errors"


@pytest.mark.parametrize(("shape", "scale"), [((8, 1), 1.0), ((8, 30), 1e4)], ids=["one class", "a wide range"])
def test_scores_at_the_edge_give_json(tmp_path: Path, shape: tuple[int, int], scale: float) -> None:
    """One class has no negatives; in a wide range probabilities are 0 in float64 though nothing is masked."""
    np.save(tmp_path / "scores.npy", scale * np.random.default_rng(0).normal(size=shape))
    result = CliRunner().invoke(
        app, ["diagnose", str(tmp_path / "scores.npy"), "--draws", "0", "--num-negatives", "5", "--json"]
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)


def test_a_tree_is_not_called_perfect_where_there_are_too_few_rows_to_tell() -> None:
    for rows, shown in ((31, False), (32, True)):
        arguments = ["diagnose", "factors", "--rows", str(rows), "--draws", "0", "--classes", "100", "--json"]
        content = json.loads(CliRunner().invoke(app, arguments).stdout)
        members = {row["member"] for row in content["bias_variance"]}
        assert ("hierarchical_softmax" in members) == shown
        assert bool(content["notes"]) != shown
    text = CliRunner().invoke(app, ["diagnose", "factors", "--rows", "20", "--draws", "0", "--classes", "100"]).stdout
    assert "20 rows cannot tell how well vectors of size 16 fit" in " ".join(text.split())

"""README and docs: generated parts are current, examples print what they say, links lead somewhere."""

from __future__ import annotations

import ast
import doctest
import itertools
import re
from pathlib import Path

import pytest

import manymax
from manymax.cli.docs import (
    FAMILY_PAGE,
    PLANTED_PAGE,
    TYPE_STUB,
    family_page,
    head_types,
    planted_page,
    planted_runs,
)
from manymax.study.backbones import BACKBONES
from manymax.study.run_options import flat

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = [path for path in DOCUMENTS if ">>>" in path.read_text(encoding="utf-8")]


def examples(text: str) -> str:
    """The Python blocks of a Markdown text, one after the other."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL))


def failures(text: str) -> int:
    test = doctest.DocTestParser().get_doctest(examples(text), {}, "document", None, 0)
    return doctest.DocTestRunner().run(test).failed


def test_family_page_is_current() -> None:
    assert (ROOT / FAMILY_PAGE).read_text(encoding="utf-8") == family_page(), "run `make docs`"


def test_types_of_heads_are_current() -> None:
    """Editors and type checkers read the stub, because the heads exist only after the module was imported."""
    assert (ROOT / TYPE_STUB).read_text(encoding="utf-8") == head_types(), "run `make docs`"


def test_planted_page_is_current() -> None:
    assert (ROOT / PLANTED_PAGE).read_text(encoding="utf-8") == planted_page(planted_runs(ROOT)), "run `make docs`"


def test_what_was_run_on_planted_data_beats_popularity_clearly_on_every_backbone() -> None:
    records = [(flat(run.settings), run) for run in planted_runs(ROOT)]
    runs = {(settings["loss"], settings["backbone"]): run for settings, run in records}
    losses = {loss for loss, _ in runs}
    kinds = {name: member.kind for name, member in manymax.FAMILY.items()}
    assert {kinds[loss] for loss in losses & set(kinds)} == set(kinds.values())
    assert set(runs) == set(itertools.product(losses, BACKBONES))
    assert [key for key, run in runs.items() if run.test["ndcg@20"] < 1.2 * run.popularity["ndcg@20"]] == []


def test_readme_has_an_example() -> None:
    assert ROOT / "README.md" in EXAMPLES


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_print_what_they_say(path: Path) -> None:
    assert failures(path.read_text(encoding="utf-8")) == 0


def test_a_wrong_example_is_noticed() -> None:
    assert failures("```python\n>>> 1 + 1\n3\n```\n") == 1


def test_readme_fits_a_screen() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 60


@pytest.mark.parametrize("path", [*DOCUMENTS, ROOT / "CONTRIBUTING.md"], ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (path.parent / link).exists()] == []


def test_make_has_the_commands_that_readme_names() -> None:
    commands = re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    rules = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert set(commands) >= {"study", "test"}
    assert set(commands) <= set(rules)


def test_the_version_is_the_same_everywhere() -> None:
    citation = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert citation is not None
    assert citation[1] == manymax.__version__


def test_every_dependency_has_its_reason_and_its_pin() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    # Read with a pattern: the standard library has no TOML parser before Python 3.11.
    lists = dict(re.findall(r"^(\w+) = (\[.*?\])$", project, flags=re.MULTILINE | re.DOTALL))
    extras = (
        "dependencies",
        "study",
        "gpu",
        "track",
        "cluster",
        "peers",
        "huggingface",
        "sentences",
        "lightning",
        "rectools",
        "site",
        "dev",
    )
    names = {name: {re.split(r"[<>=]", entry)[0] for entry in ast.literal_eval(lists[name])} for name in extras}
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    reasons = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Dependencies")[2]
    installed = names["dependencies"] | names["study"] | names["dev"]
    assert {"torch", "typer", "pytest"} <= installed
    assert {name for name in installed if not re.search(rf"^{name}==", pins, flags=re.MULTILINE)} == set()
    found = {
        (name, extra)
        for name, extras in re.findall(r"^\| ([\w-]+) \| ?([\w, ]*?) ?\|", reasons, flags=re.MULTILINE)
        for extra in extras.split(", ")
        if name != "Package"
    }
    assert found == {(name, "" if extra == "dependencies" else extra) for extra in extras for name in names[extra]}

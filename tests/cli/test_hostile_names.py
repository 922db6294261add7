"""Names in data that hold escape sequences: every command shows their control characters as text."""

from __future__ import annotations

import csv
import io
import json
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest

from manymax.cli import main
from manymax.cli.console import PlainConsole, pairs, table
from manymax.study.data.planted import plant

# Clears the screen, sets the title of the window, writes the clipboard (OSC 52), and the one-byte form of "ESC [".
EVIL = "\x1b[2J\x1b]0;title\x07\x1b]52;c;cm0gLXJm\x07\x9b31m"
TURNED = "\u202edesrever"
Command = Callable[..., str]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command as from a shell, and returns all that it printed on stdout and stderr."""

    def run(*arguments: object) -> str:
        monkeypatch.setattr("sys.argv", ["manymax", *map(str, arguments)])
        with pytest.raises(SystemExit):
            main()
        printed = capsys.readouterr()
        return printed.out + printed.err

    return run


def controls(text: str) -> set[str]:
    """The characters of a text that a terminal acts upon."""
    return {c for c in text if c not in "\n\t" and (unicodedata.category(c) in ("Cc", "Zl", "Zp") or c in TURNED[:1])}


@pytest.fixture
def ratings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table whose name, columns, users, items and titles all hold escape sequences."""
    monkeypatch.setenv("MANYMAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"rat{EVIL}ings.csv"
    interactions, _ = plant("tiny", seed=1)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([f"{EVIL}user", "item", "time", f"title{TURNED}"])
        for user, item, time in zip(interactions.users, interactions.items, interactions.times, strict=True):
            writer.writerow([f"{EVIL}{user}", f"{item}{EVIL}", int(time), f"{item}{EVIL}{TURNED}\u2028"])
    return path


def test_what_commands_print_of_such_data(ratings: Path, command: Command, tmp_path: Path) -> None:
    columns = ["--columns", f"user={EVIL}user,item=item,time=time,title=title{TURNED}"]
    printed = {"prepare": command("data", "prepare", ratings, *columns)}
    run = tmp_path / f"run{EVIL}"
    sizes = ["--dim", "4", "--epochs", "1", "--out", run]
    printed["train"] = command("train", "--data", ratings, *columns, *sizes)
    assert (run / "record.json").exists(), printed["train"]
    printed["recommend"] = command("recommend", run, "--user", f"{EVIL}7", "--top", "3")
    printed["unknown user"] = command("recommend", run, "--user", f"{EVIL}nobody")
    printed["export"] = command("export", run, "--out", tmp_path / f"vectors{EVIL}")
    printed["no such column"] = command("data", "prepare", ratings, "--columns", "user=nobody,item=item")
    printed["no such file"] = command("train", "--data", f"{ratings}{EVIL}")
    printed["report"] = command("report", run.parent / f"empty{EVIL}")
    for name, text in printed.items():
        assert not controls(text), (name, text)
        assert r"\x1b[2J" in text or name == "no such column", (name, text)
    rows = printed["recommend"].splitlines()
    assert len(rows) == 2 + 3, "a name that ends a line would make two of a row"
    assert r"\u202edesrever\u2028" in rows[2]


def test_programs_get_the_names_as_they_are(ratings: Path, command: Command, tmp_path: Path) -> None:
    columns = ["--columns", f"user={EVIL}user,item=item,time=time,title=title{TURNED}"]
    run = tmp_path / "run"
    command("train", "--data", ratings, *columns, "--dim", "4", "--epochs", "1", "--out", run)
    printed = command("recommend", run, "--user", f"{EVIL}7", "--top", "3", "--json")
    assert not controls(printed)
    (found,) = json.loads(printed)
    assert found["user"] == f"{EVIL}7"
    assert all(item["item"].endswith(EVIL) for item in found["items"])


@pytest.mark.slow
def test_what_a_study_and_a_choice_print(ratings: Path, command: Command, tmp_path: Path) -> None:
    columns = f"user={EVIL}user,item=item,time=time,title=title{TURNED}"
    studies = tmp_path / f"study{EVIL}"
    settings = [f"data={ratings}", f"columns={columns}", "dim=4", "epochs=1", "loss=softmax", "lr=0.01", "seed=0"]
    printed = {
        "study": command("study", "--out", studies, *(part for s in settings for part in ("--set", s))),
        "report": command("report", studies),
        "choose": command(
            *("choose", ratings, "--columns", columns, "--minutes", "0.2", "--out", tmp_path / f"choice{EVIL}")
        ),
    }
    for name, text in printed.items():
        assert not controls(text), (name, text)
        assert r"\x1b[2J" in text, (name, text)


def test_tables_of_a_terminal_measure_names_as_they_are_shown() -> None:
    out = io.StringIO()
    console = PlainConsole(file=out, force_terminal=True, color_system=None, width=60)
    console.print(table(["name", "value"], [["a\x07b\nc", "1"], ["d", "2"]]))
    console.print(pairs([("e\x1b[31m", "f")]))
    console.print("g\x1b[2Jh\ni")
    lines = out.getvalue().splitlines()
    assert [line.split() for line in lines] == [
        *(["name", "value"], [lines[1].strip()], [r"a\x07b\nc", "1"], ["d", "2"]),
        *([r"e\x1b[31m", "f"], [r"g\x1b[2Jh"], ["i"]),
    ]
    assert lines[2].index("1") == lines[3].index("2")

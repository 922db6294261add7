"""`main`, in a process of its own: exit codes, and messages instead of tracebacks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from manymax import cli

SOURCE = Path(__file__).parents[2] / "src"


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *script.split(" ", 1), *arguments],
        env=os.environ | {"PYTHONPATH": str(SOURCE)} | environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )


def test_runs_as_a_module() -> None:
    result = run("-m manymax", "losses")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("member ")


def test_an_unknown_name_is_one_line_and_exit_code_2() -> None:
    result = run("-m manymax", "show", "sparsmax")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("manymax: unknown loss 'sparsmax': did you mean 'sparsemax'?")
    assert result.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "--data", "planted", "--dim", str(10**14)], "there is not enough memory"),
        (["data", "prepare", "~nobody-of-this-name/x.csv"], "does not exist"),
    ],
)
def test_missing_memory_or_files_end_in_one_line(arguments: list[str], words: str, tmp_path: Path) -> None:
    result = run("-m manymax", *arguments, *(["--out", str(tmp_path / "run")] if arguments[0] == "train" else []))
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert words in result.stderr


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (PermissionError(13, "Permission denied", "x.csv"), "x.csv: Permission denied."),
        (OSError(28, "No space left on device"), "No space left on device."),
        (MemoryError(), "not enough memory"),
        (RuntimeError("another fault"), None),
    ],
)
def test_errors_of_files_and_memory_are_distinguished_from_bugs(error: Exception, words: str | None) -> None:
    text = cli._resource_message(error)
    assert (text is None) if words is None else (text is not None and words in text)


@pytest.mark.slow
def test_an_unknown_command_is_exit_code_2() -> None:
    result = run("-m manymax", "lossse")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_a_pipe_that_is_closed_early_gives_no_traceback() -> None:
    writer = subprocess.Popen(
        [sys.executable, "-m", "manymax", "losses", "--json"],
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout is not None
    assert writer.stderr is not None
    writer.stdout.close()
    message = writer.stderr.read()
    writer.stderr.close()
    writer.wait()
    assert "Traceback" not in message


@pytest.mark.parametrize("missing", ["typer", pytest.param("rich", marks=pytest.mark.slow)])
def test_without_the_extra_it_says_what_to_install(missing: str) -> None:
    script = f"import sys; sys.modules[{missing!r}] = None; from manymax.cli import main; main()"
    result = run(f"-c {script}")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (f'manymax: the command needs `{missing}`. Install it with: pip install "manymax[study]"\n')


@pytest.mark.slow
def test_a_broken_installation_is_not_taken_for_a_missing_package() -> None:
    script = "import sys; sys.modules['manymax.cli.app'] = None; from manymax.cli import main; main()"
    result = run(f"-c {script}")
    assert result.returncode == 1
    assert "ModuleNotFoundError" in result.stderr

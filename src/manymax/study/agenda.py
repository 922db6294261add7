"""`study.json`: what a study is called, what it says to readers of its page, and which runs it consists of.

A command that knows more than the runs show, such as what it has left out, adds `cautions`, {kind: sentences}.

A folder can be worked on by several commands, each with a part of the runs: its agenda is that of all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from manymax.errors import ManymaxError
from manymax.study.files import read_json, write_json
from manymax.study.records import RECORD, SETTINGS_FILE, STUDY
from manymax.study.trials import has_rules


class StudyAgenda:
    """The agenda of one command, added to what the folder has.

    Args:
        folder: of the study; made if it is not there.
        title, note: of the study; empty ones replace nothing.
        planned: the hashes of its runs but for those of searches, which are not known before.
        searched: how many runs its searches have.
    """

    def __init__(self, folder: Path, title: str, note: str, planned: Sequence[str], searched: int) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            before = read_agenda(folder)
            told = {name: text for name, text in {"title": title, "note": note}.items() if text}
            runs = list(dict.fromkeys((*before.get("planned", ()), *planned)))
            # Two commands may do different searches, or the same one again: the larger number never claims too much.
            self.content = {**before, **told, "planned": runs, "searched": max(before.get("searched", 0), searched)}
            write_json(folder / STUDY, self.content)
        except OSError as error:
            raise ManymaxError(f"{folder} cannot be written to: {error.strerror}. Choose another folder.") from None

    def whole(self) -> None:
        """Note that all runs have ended: a search may have proposed the same settings twice, which is one run."""
        write_json(self.folder / STUDY, {**self.content, "searched": 0})


def note_cautions(folder: Path, cautions: Mapping[str, Sequence[str]]) -> None:
    """Note what a study cannot tell, in place of what its runs show of the same kinds; see `report/cautions.py`."""
    write_json(folder / STUDY, {**read_agenda(folder), "cautions": cautions})


def read_agenda(folder: Path) -> Mapping[str, Any]:
    """The content of `study.json`; empty where there is none."""
    content = read_json(folder / STUDY) if (folder / STUDY).is_file() else {}
    return content if isinstance(content, Mapping) else {}


def never_started(folder: Path) -> int:
    """The number of planned runs that have no folder yet."""
    agenda = read_agenda(folder)
    # A run that has failed early has a record and no settings.
    started = {path.parent.name for name in (SETTINGS_FILE, RECORD) for path in folder.glob(f"*/{name}")}
    trials = sum(has_rules(folder / name) for name in started)
    return len(set(agenda.get("planned", ())) - started) + max(0, int(agenda.get("searched", 0)) - trials)

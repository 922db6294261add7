"""What the page of the reproduction is made of: kept runs, decided findings, and causes of differences."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from manymax.errors import ManymaxError
from manymax.paper.findings import FindingCase
from manymax.paper.findings_file import FINDINGS_FILE, read_decided
from manymax.paper.method_comparisons import METHOD_COMPARISONS
from manymax.study.record_files import KEPT_SUFFIX
from manymax.study.report.runs import Run, read_study
from manymax.study.report.trials import Trial, trials

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RESULTS, CAUSES = Path("results/study"), Path("docs/causes.toml")


@dataclass(frozen=True)
class Collected:
    """What the page is made of.

    studies: {name: runs}.
    decided: the hashes of the runs that the findings were decided from.
    cases: {number of the finding: cases}.
    causes: {(data, backbone, loss): likely cause of a large difference from the paper}.
    """

    studies: Mapping[str, tuple[Run, ...]]
    decided: frozenset[str]
    cases: Mapping[int, tuple[FindingCase, ...]]
    causes: Mapping[tuple[str, str, str], str]

    @property
    def runs(self) -> list[Run]:
        """The runs that answer the paper's questions, each once: those of all studies but the method comparisons."""
        every = [run for name, runs in self.studies.items() if name not in METHOD_COMPARISONS for run in runs]
        return list({run.record.hash: run for run in every}.values())

    @property
    def done(self) -> list[Run]:
        """Those of `runs` that ended well."""
        return [run for run in self.runs if run.record.status == "done"]

    def compared_trials(self, name: str) -> list[Trial]:
        """The trials of a method comparison."""
        return trials([run for run in self.studies.get(name, ()) if run.record.status == "done"])


def read(root: Path) -> Collected:
    """Read the kept runs, the decided findings and the causes of differences of a checkout.

    Args:
        root: its top folder.
    """
    folder = root / RESULTS
    found = {name: read_study(path) for name, path in _study_sources(folder).items()}
    unreadable = [why for study in found.values() for why in study.unreadable]
    if unreadable:
        raise ManymaxError(" ".join(unreadable))
    decided, cases = read_decided(folder / FINDINGS_FILE)
    studies = {name: study.runs for name, study in found.items()}
    return Collected(studies, frozenset(decided), cases, _read_causes(root / CAUSES))


def _study_sources(folder: Path) -> dict[str, Path]:
    """{name: path} of the studies in a folder, sorted by name: files of kept runs, and folders of run folders."""
    sources: dict[str, Path] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir() or path.suffix == KEPT_SUFFIX:
            name = path.name if path.is_dir() else path.stem
            if name in sources:
                raise ManymaxError(f"{sources[name]} and {path} are two studies of one name: rename or remove one.")
            sources[name] = path
    return dict(sorted(sources.items()))


def _read_causes(path: Path) -> dict[tuple[str, str, str], str]:
    """{(data, backbone, loss): likely cause} of a TOML file with tables [[cause]]; `loss` may be a list there."""
    causes: dict[tuple[str, str, str], str] = {}
    try:
        rows = tomllib.loads(path.read_text(encoding="utf-8")).get("cause", []) if path.is_file() else []
        for row in rows:
            losses = [row["loss"]] if isinstance(row["loss"], str) else row["loss"]
            for key in ((row["data"], row["backbone"], loss) for loss in losses):
                if key in causes:
                    raise ManymaxError(f"{path} has two causes for {', '.join(key)}: leave one.")
                causes[key] = " ".join(row["text"].split()).rstrip(".")
    except (tomllib.TOMLDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ManymaxError(f"{path} must hold [[cause]] with data, backbone, loss and text: {error!r}.") from None
    return causes

"""Plant faults in the code one by one and see whether the tests notice.

    make mutants                                  all faults of mutants.toml
    python tests/mutants/plant.py --only kernel   those whose name or subject contains a word
    python tests/mutants/plant.py --named         run the tests that a fault names and no others; needs no measurement
    python tests/mutants/plant.py --check         only see that every fault can be planted
    python tests/mutants/plant.py --random 100 --seed 7      faults at random places of ops, engine and members

A fault is a small change of one place: `old` becomes `new` in `file`. For each one, the tests that execute the changed
lines are run in a copy of the checkout: first those of `make test`, then, if all of them pass, the slow ones of `make
test-all`. A fault is caught if a test fails. Which tests execute which lines is measured once, by running all of them
under coverage.py, and kept in `.mutants/` until a file with a planted fault changes. Lines that run in another process
or in compiled code are invisible to that measurement: their faults name files of tests that are added to the list.
Libraries of a copy are compiled again before its tests run if their sources have changed.

The exit code is 0 if every fault is caught by `make test-all` and at least 11 of 12 by `make test` alone; of random
faults, some of which change nothing that matters, if 9 of 10 are caught. Those that are not are printed in full.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import os
import platform
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from tests.mutants.random_faults import random_faults  # noqa: E402 (run as a script, it is not found before)

FAULTS = Path(__file__).with_name("mutants.toml")
WORK = ROOT / ".mutants"
TIERS = {
    "make test": "not slow and not extras and not realdata",
    "make test-all": "slow and not extras and not realdata",
}
SECONDS = 900  # a fault that makes the tests hang is caught when this has passed
SHARE = 11 / 12  # of the faults must be caught by the first tier
RANDOM_SHARE = 9 / 10  # of random faults by both tiers


@dataclass(frozen=True)
class Fault:
    """One row of mutants.toml.

    Args:
        name: unique, in a few words.
        subject: what kind of code it is in, such as "kernel" or "sampler".
        file: relative to the checkout.
        old: text that occurs exactly once in the file.
        new: what takes its place.
        tests: further tests to run, for lines that no test of this process executes.
    """

    name: str
    subject: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ()

    def lines(self) -> range:
        """The numbers of the lines that change."""
        text = (ROOT / self.file).read_text(encoding="utf-8")
        count = text.count(self.old)
        if count != 1:
            raise SystemExit(f"{self.name}: `old` must occur once in {self.file}; it occurs {count} times.")
        if self.old == self.new:
            raise SystemExit(f"{self.name}: `old` and `new` are the same.")
        first = text[: text.index(self.old)].count("\n") + 1
        return range(first, first + self.old.rstrip("\n").count("\n") + 1)


@dataclass(frozen=True)
class Outcome:
    """What happened to one fault: the tier and the test that caught it, or None for both."""

    name: str
    subject: str
    file: str
    caught_by: str | None
    test: str | None
    tests_run: int
    seconds: float


def read_faults() -> list[Fault]:
    """The faults of mutants.toml, checked against the code as it is."""
    rows = tomllib.loads(FAULTS.read_text(encoding="utf-8"))["fault"]
    faults = [Fault(**{**row, "tests": tuple(row.get("tests", ()))}) for row in rows]
    names = [fault.name for fault in faults]
    if twice := {name for name in names if names.count(name) > 1}:
        raise SystemExit(f"two faults have one name: {', '.join(sorted(twice))}")
    for fault in faults:
        fault.lines()
    return faults


def draw_faults(count: int, seed: int) -> list[Fault]:
    """Faults at random places."""
    print(f"{count} random faults, seed {seed}")
    return [
        Fault(f"{file.removeprefix('src/manymax/')}:{line}", "random", file, old, new)
        for file, line, old, new in random_faults(ROOT, count, seed)
    ]


def describe(fault: Fault) -> str:
    """What a fault changes, for somebody who looks at one that was not caught."""
    lines = difflib.unified_diff(fault.old.splitlines(), fault.new.splitlines(), fault.file, fault.name, "", "", 0, "")
    return "\n".join(lines)


def copy_checkout(folder: Path) -> Path:
    """A copy of all tracked files, so that the checkout itself never holds a planted fault."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    for name in filter(None, names):
        source, target = ROOT / name.decode(), folder / name.decode()
        if source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    return folder


def pytest(folder: Path, *arguments: str, seconds: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run pytest in a copy of the checkout, which comes before whatever is installed."""
    environment = os.environ | {"PYTHONPATH": f"{folder / 'src'}{os.pathsep}{folder}", "OMP_NUM_THREADS": "1"}
    # The copy has no libraries yet, or those of another fault. Nothing is compiled where they are up to date.
    subprocess.run([sys.executable, "hatch_build.py"], cwd=folder, env=environment, capture_output=True, check=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )


def content_hash(files: Iterable[str]) -> str:
    """A hash of some files of the checkout."""
    return hashlib.sha256(b"\0".join((ROOT / file).read_bytes() for file in sorted(set(files)))).hexdigest()


def measure_coverage(faults: Sequence[Fault]) -> dict[str, Any]:
    """Which tests execute which lines, how long each takes and in which tier it is; measured where it is not kept.

    Returns:
        {"lines": {file: {line: tests}}, "seconds": {test: seconds}, "tiers": {tier: tests}}
    """
    files = sorted({fault.file for fault in faults})
    path, key = WORK / "coverage.json", content_hash(files)
    if path.exists():
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["hash"] == key:
            return kept
    print("measuring which tests execute which lines: all tests run once, this takes about as long as `make test-all`")
    from coverage import CoverageData

    WORK.mkdir(exist_ok=True)
    lines: dict[str, dict[str, list[str]]] = {file: {} for file in files}
    seconds: dict[str, float] = {}
    tiers: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = copy_checkout(Path(place).resolve())
        for tier, marks in TIERS.items():
            data = folder / ".coverage"
            options = ["-n", "2", "--dist", "worksteal", "--durations=0", "--durations-min=0"]
            options += ["--cov=manymax", "--cov-context=test", "--cov-report="]
            result = pytest(folder, "-m", marks, *options)
            if result.returncode:
                raise SystemExit(f"the tests must pass before a fault is planted:\n{result.stdout[-3000:]}")
            seconds |= dict(read_durations(result.stdout))
            measured = CoverageData(str(data))
            measured.read()
            tiers[tier] = sorted({context.partition("|")[0] for context in measured.measured_contexts() if context})
            for file in files:
                for line, contexts in measured.contexts_by_lineno(str(folder / file)).items():
                    tests = {context.partition("|")[0] for context in contexts if context}
                    lines[file].setdefault(str(line), []).extend(sorted(tests))
            data.unlink()
    kept = {"hash": key, "lines": lines, "seconds": seconds, "tiers": tiers}
    path.write_text(json.dumps(kept), encoding="utf-8")
    return kept


def read_durations(output: str) -> Iterable[tuple[str, float]]:
    """(test, seconds) from the list that pytest prints for `--durations=0`."""
    for line in output.splitlines():
        seconds, _, rest = line.strip().partition("s ")
        phase, _, test = rest.strip().partition(" ")
        if phase == "call" and seconds.replace(".", "").isdigit():
            yield test.strip(), float(seconds)


def covering(fault: Fault, coverage: dict[str, Any]) -> dict[str, list[str]]:
    """{tier: tests that execute a changed line, the quickest first}; and what the fault names itself."""
    known = coverage["lines"].get(fault.file, {})
    found = {test for line in fault.lines() for test in known.get(str(line), ())}
    seconds = coverage["seconds"]
    tests = {}
    for tier, members in coverage["tiers"].items():
        tests[tier] = sorted(found & set(members), key=lambda test: (seconds.get(test, 0.0), test))
    return tests


def plant(fault: Fault, folder: Path, coverage: dict[str, Any]) -> Outcome:
    """Plant one fault in a copy of the checkout, run the tests that cover it, and take it out again."""
    path, began = folder / fault.file, time.monotonic()
    sound = path.read_text(encoding="utf-8")
    path.write_text(sound.replace(fault.old, fault.new), encoding="utf-8")
    count = 0
    try:
        for tier, tests in covering(fault, coverage).items():
            wanted = [*tests, *fault.tests]
            if not wanted:
                continue
            count += len(wanted)
            arguments = folder / "tests.txt"
            arguments.write_text("\n".join(wanted), encoding="utf-8")
            try:
                result = pytest(folder, "-x", "-m", TIERS[tier], f"@{arguments}", seconds=SECONDS)
            except subprocess.TimeoutExpired:
                return outcome(fault, tier, "a test that did not end", count, began)
            if result.returncode == 1:
                failed = [line for line in result.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
                return outcome(fault, tier, failed[0].split(" ")[1] if failed else "?", count, began)
            if result.returncode < 0:  # by a signal, as where native code reads at a wrong address
                return outcome(fault, tier, "the process of the tests died", count, began)
            if result.returncode in (2, 3, 4):  # the fault breaks the import or the collection: nothing would run
                return outcome(fault, tier, "the tests cannot be started", count, began)
    finally:
        path.write_text(sound, encoding="utf-8")
    return outcome(fault, None, None, count, began)


def outcome(fault: Fault, tier: str | None, test: str | None, count: int, began: float) -> Outcome:
    """The outcome of a fault, with the time since `began`."""
    return Outcome(fault.name, fault.subject, fault.file, tier, test, count, round(time.monotonic() - began, 1))


def plant_all(faults: Sequence[Fault], coverage: dict[str, Any], jobs: int) -> list[Outcome]:
    """Plant the faults, `jobs` at a time, each job in a copy of its own; a line is printed for each."""
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(jobs) as pool:
        copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(jobs):
            copies.put(copy_checkout(Path(place).resolve() / str(number)))

        def work(fault: Fault) -> Outcome:
            folder = copies.get()
            try:
                found = plant(fault, folder, coverage)
            finally:
                copies.put(folder)
            verdict = f"caught by {found.caught_by}: {found.test}" if found.caught_by else "NOT CAUGHT"
            print(f"{found.subject:16} {found.name:55} {found.seconds:6.1f} s  {verdict}", flush=True)
            return found

        return list(pool.map(work, faults))


def main() -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="plant only faults whose name or subject contains this text")
    parser.add_argument("--jobs", type=int, default=2, help="how many faults at a time (default: 2)")
    parser.add_argument("--named", action="store_true", help="run only the tests that the faults name themselves")
    parser.add_argument("--check", action="store_true", help="only see that every fault can be planted")
    parser.add_argument("--json", type=Path, help="write the outcomes into this file")
    parser.add_argument("--random", type=int, metavar="COUNT", help="plant so many faults at random places instead")
    parser.add_argument("--seed", type=int, default=0, help="of the random faults (default: 0)")
    arguments = parser.parse_args()
    faults = read_faults() if arguments.random is None else draw_faults(arguments.random, arguments.seed)
    if arguments.check:
        print(f"{len(faults)} faults can be planted")
        return 0
    chosen = [fault for fault in faults if arguments.only in fault.name or arguments.only in fault.subject]
    if arguments.named:
        chosen = [fault for fault in chosen if fault.tests]
        coverage: dict[str, Any] = {"lines": {}, "seconds": {}, "tiers": {tier: [] for tier in TIERS}}
    else:
        coverage = measure_coverage(faults)
    outcomes = plant_all(chosen, coverage, arguments.jobs)
    first = sum(found.caught_by == "make test" for found in outcomes)
    caught = sum(found.caught_by is not None for found in outcomes)
    print(
        f"{len(outcomes)} faults: {first} caught by make test, {caught} by make test-all, {len(outcomes) - caught} not"
    )
    if arguments.json is not None:
        versions = {"python": platform.python_version()} | {
            name: metadata.version(name) for name in ("manymax", "torch")
        }
        content = {"command": "make mutants", "versions": versions, "faults": [asdict(found) for found in outcomes]}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if arguments.random is not None:
        missed = {found.name for found in outcomes if found.caught_by is None}
        print("\n".join(describe(fault) for fault in chosen if fault.name in missed))
        return 0 if caught >= RANDOM_SHARE * len(outcomes) else 1
    return 0 if caught == len(outcomes) and first >= SHARE * len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())

"""What goes wrong around a run: signals, a second start, a full disk, folders of others, large tables, long runs."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from manymax.errors import ManymaxError
from manymax.heads import head_class
from manymax.members import FAMILY, REFERENCE_LOSSES
from manymax.study.config import RunConfig
from manymax.study.records import CHECKPOINT, read_record
from manymax.study.run import run

pytestmark = [pytest.mark.extras, pytest.mark.skipif(sys.platform != "linux", reason="limits are those of Linux")]
ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
SECONDS = 300  # for whatever takes seconds, on a machine that is busy
TINY = {"data": "planted", "size": "60x60x10", "dim": 4, "batch_size": 64, "threads": 1}
ENDLESS = {"epochs": 100_000, "patience": 100_000}


def train(out: Path, settings: dict[str, object]) -> subprocess.Popen[str]:
    """`manymax train` in a process of its own."""
    options = [str(part) for key, value in settings.items() for part in (f"--{key.replace('_', '-')}", value)]
    command = [sys.executable, "-m", "manymax", "train", *options, "--out", str(out), "--checkpoint-seconds", "0"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)


def until(condition, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_second_start_is_refused_and_sigterm_saves_like_ctrl_c(tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = train(out, TINY | ENDLESS)
    try:
        until((out / CHECKPOINT).exists, first)
        second = train(out, TINY | ENDLESS)
        _, errors = second.communicate(timeout=SECONDS)
        assert second.returncode == 2
        assert f"another process is working in {out}" in errors
        assert first.poll() is None, "the first start goes on"
        first.send_signal(signal.SIGTERM)
        printed, errors = first.communicate(timeout=SECONDS)
    finally:
        first.kill()
    assert first.returncode == 130
    assert "Traceback" not in errors
    assert printed.startswith("stopped by SIGTERM in epoch")
    assert "the same command goes on from there" in printed
    assert read_record(out).status == "stopped"
    assert (out / CHECKPOINT).exists()


FULL = """
import json, resource, sys
from pathlib import Path
from manymax.cli import main
limit = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
main()
"""


@pytest.mark.parametrize("limit", [0, 500, 3000, 9000])
def test_a_run_on_a_full_disk_says_so_and_goes_on_when_there_is_room(tmp_path: Path, limit: int) -> None:
    """A limit on the size of files: with room for none, for some of them, for all but the largest."""
    settings = TINY | {"epochs": 3}
    options = [str(part) for key, value in settings.items() for part in (f"--{key.replace('_', '-')}", value)]
    command = ["train", *options, "--out", str(tmp_path / "run"), "--checkpoint-seconds", "0"]
    result = subprocess.run(
        [sys.executable, "-c", FULL, str(limit), *command],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=SECONDS,
        check=False,
    )
    assert result.returncode == 2, result
    assert "File too large" in result.stderr
    assert str(tmp_path / "run") in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.rglob("*.partial"))
    config = RunConfig(**settings)
    assert run(config, tmp_path / "run").valid == run(config, tmp_path / "whole").valid


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    """Root may write everywhere: there the test becomes another user."""
    config = RunConfig(**TINY, epochs=1)
    run(config, tmp_path / "first")  # everything is imported before the user changes
    with tempfile.TemporaryDirectory() as place:  # others cannot even look into `tmp_path`
        folder = Path(place) / "run"
        Path(place).chmod(0o555)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                if os.getuid() == 0:
                    os.setgid(65534)
                    os.setuid(65534)
                run(config, folder)
            except ManymaxError as error:
                code = 0 if str(error).startswith(f"{folder} cannot be written to") else 3
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        Path(place).chmod(0o755)
    assert os.waitstatus_to_exitcode(status) == 0


def resident() -> int:
    """The memory of this process in kilobytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 1024


@pytest.mark.parametrize("name", [*FAMILY, *REFERENCE_LOSSES])
def test_memory_does_not_grow_over_2000_steps(name: str) -> None:
    """A tensor of a step that is kept would be 2,000 of 40 kilobytes, one of few numbers 2,000 objects."""
    torch.manual_seed(0)
    head = head_class({**FAMILY, **REFERENCE_LOSSES}[name])(16, 300)
    queries, target = torch.randn(32, 16, requires_grad=True), torch.randint(300, (32,))
    optimizer = torch.optim.SGD(head.parameters(), lr=1e-3)

    def steps(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            queries.grad = None
            head(queries, target).backward()
            optimizer.step()

    steps(500)  # pools of memory, caches of shapes and the like have their size then
    before = resident()
    steps(1500)
    assert resident() - before < 1500, "kilobytes"


PREPARE = """
import resource, sys
from manymax.cli import main
import atexit
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
atexit.register(lambda: print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr))
main()
"""


def test_five_million_rows_are_read_in_bounded_memory(tmp_path: Path) -> None:
    path, rows = tmp_path / "large.csv", 5_000_000
    with path.open("w") as file:
        file.write("user,item,time\n")
        part = 100_000
        for start in range(0, rows, part):
            chosen = torch.randint(1 << 30, (3, part), generator=torch.Generator().manual_seed(start)).tolist()
            file.writelines(f"user{u % 200_003},item{i % 50_021},{t}\n" for u, i, t in zip(*chosen, strict=True))
    result = subprocess.run(
        [sys.executable, "-c", PREPARE, "data", "prepare", str(path)],
        capture_output=True,
        text=True,
        env=ENVIRONMENT | {"MANYMAX_CACHE": str(tmp_path / "cache")},
        timeout=2 * SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "5,000,000" in result.stdout
    assert int(result.stderr.splitlines()[-1]) < 2_500_000, "kilobytes"

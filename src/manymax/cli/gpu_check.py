"""`manymax gpu-check`: the Triton kernels on a GPU, their values beside float64 and their times beside others'."""

from __future__ import annotations

import json as json_text
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.nn import functional

from manymax import __version__
from manymax.cli.console import open_console, put, say, table
from manymax.cli.exit_codes import FAILED
from manymax.engine.triton_backend import interpreted
from manymax.heads.gpu_report import Step, TimeReport, ValueReport, compare_values, time_of, time_steps

# What is compared in the interpreter: enough for each way through a kernel, and a minute or two of one core.
INTERPRETED: dict[str, Any] = {"rows": 3, "sizes": (130,), "dtypes": (torch.float32,)}
ON_DEVICE: dict[str, Any] = {"rows": 96, "sizes": (1, 130, 5003), "dtypes": (torch.float32, torch.bfloat16)}
TIMED_DTYPES = (torch.float32, torch.bfloat16)


def gpu_check(
    rows: Annotated[int, typer.Option(min=1, help="Queries of a timed step.")] = 2048,
    classes: Annotated[int, typer.Option(min=1, help="Classes of a timed step.")] = 50_257,
    features: Annotated[int, typer.Option(min=1, help="Features of a query in a timed step.")] = 256,
    json: Annotated[Path | None, typer.Option("--json", help="Write everything to this file too.")] = None,
) -> None:
    """Check the GPU kernels on this machine: values against float64, then times beside other ways.

    The kernels were written on machines without a GPU. If you have one, run this once: it compares losses and gradients
    of every kernel with float64 and times whole steps beside plain torch, torch's own head, Liger and cut cross entropy
    where they are installed. Attach the JSON file to an issue. Without a GPU the kernels are interpreted on the CPU and
    a few values compared; nothing is timed. The exit code is 1 if a value is wrong.

    \\b
    Examples:
      manymax gpu-check --json gpu.json
      manymax gpu-check --rows 8192 --classes 250000 --features 64
    """
    device = _device()
    if device is None:
        raise typer.Exit(_without_a_device(json))
    values = list(compare_values(device, **ON_DEVICE))
    _print_values(values)
    size = device, rows, classes, features
    times = [*time_steps(*size, TIMED_DTYPES), *_peers(*size)]
    _print_times(times, f"{rows} rows, {classes:,} classes, {features} features; forward and backward")
    _write(json, values, times, {"rows": rows, "classes": classes, "features": features})
    raise typer.Exit(FAILED if _failed(values) else 0)


def _device() -> torch.device | None:
    """The GPU that torch is set to, if there is one."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


def _without_a_device(json: Path | None) -> int:
    """Say that there is no GPU, compare what can be interpreted, and return the exit code."""
    if not interpreted():
        say("No GPU: torch finds no CUDA or ROCm device here.")
        if find_spec("triton") is None:
            say("Triton is not installed either, so that there is nothing to interpret.")
            return 0
        say("The kernels are interpreted on the CPU: a few values, and no times.")
        # Triton decides when it is imported whether it interprets.
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "manymax",
            "gpu-check",
            *(["--json", str(json)] if json else []),
        ]
        done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, text=True, capture_output=True)
        say(done.stdout.rstrip("\n"))
        if done.stderr:
            say(done.stderr.rstrip("\n"), err=True)
        return done.returncode
    values = list(compare_values(torch.device("cpu"), **INTERPRETED))
    _print_values(values)
    _write(json, values, [], {})
    return FAILED if _failed(values) else 0


def _failed(values: list[ValueReport]) -> bool:
    return any(not value.passed for value in values)


def _print_values(values: list[ValueReport]) -> None:
    """One line for each member, setting and precision; one more for each case that failed."""
    rows = []
    groups = {(one.member, str(dict(one.setting)), one.dtype): one for one in values}
    for member, setting, dtype in groups:
        own = [o for o in values if (o.member, str(dict(o.setting)), o.dtype) == (member, setting, dtype)]
        worst = max(one.difference or 0.0 for one in own)
        passed = sum(one.passed for one in own)
        told = ", ".join(f"{name}={value}" for name, value in own[0].setting.items())
        rows.append([member, told, dtype, f"{passed} of {len(own)}", f"{worst:.0e}", f"{own[0].tolerance:.0e}"])
    put(open_console(), table(["kernel", "setting", "inputs", "cases right", "largest error", "allowed"], rows))
    for one in values:
        if not one.passed:
            error = one.why or (f"off by {one.difference:.0e}" if one.difference is not None else "not a number")
            say(f"WRONG: {one.member} {dict(one.setting)}, {one.case}, {one.classes} classes, {one.dtype}: {error}")


def _print_times(times: list[TimeReport], size: str) -> None:
    """One line for each way."""
    say(f"\nTimes: {size}.")
    rows = [
        [
            *(one.loss, one.way, one.dtype),
            *((f"{one.milliseconds:.2f}", f"{one.megabytes:.0f}") if one.why is None else ("", one.why[:80])),
        ]
        for one in times
    ]
    put(open_console(), table(["loss", "way", "inputs", "ms", "MB beside arguments"], rows))


def _peers(device: torch.device, rows: int, classes: int, features: int) -> Iterator[TimeReport]:
    """Times of other packages' heads, of those that are installed."""
    for way, step in _other_heads().items():
        for dtype in TIMED_DTYPES:
            yield time_of("heads of other packages", way, step, device, rows, classes, features, dtype)


def _other_heads() -> dict[str, Step]:
    """From the name of a head of another package to its step."""
    ways: dict[str, Step] = {}
    if hasattr(functional, "linear_cross_entropy"):
        ways["torch's linear head"] = functional.linear_cross_entropy
    if find_spec("liger_kernel") is not None:
        liger = import_module("liger_kernel.transformers.fused_linear_cross_entropy").LigerFusedLinearCrossEntropyLoss()
        ways["Liger"] = lambda q, w, y: liger(w, q, y)
    if find_spec("cut_cross_entropy") is not None:
        ways["CCE"] = import_module("cut_cross_entropy").linear_cross_entropy
    return ways


def _write(path: Path | None, values: list[ValueReport], times: list[TimeReport], size: dict[str, int]) -> None:
    """Write everything as JSON, to attach to an issue."""
    if path is None:
        return
    packages = ("torch", "triton", "liger_kernel", "cut_cross_entropy")
    versions = {"manymax": __version__} | {name: _version(name) for name in packages if find_spec(name) is not None}
    machine: dict[str, Any] = {"system": platform.platform(), "python": platform.python_version(), "device": None}
    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        capability = list(torch.cuda.get_device_capability())
        machine |= {"device": found.name, "memory": found.total_memory, "capability": capability}
        machine |= {"cuda": torch.version.cuda, "hip": torch.version.hip}
    checks = [asdict(one) | {"passed": one.passed} for one in values]
    content = {
        "machine": machine,
        "versions": versions,
        "values": checks,
        "size": size,
        "times": list(map(asdict, times)),
    }
    path.write_text(json_text.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
    say(f"wrote {path}")


def _version(name: str) -> str:
    """The version of an installed package, under either way to write its name."""
    for spelled in (name, name.replace("_", "-")):
        try:
            return metadata.version(spelled)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"

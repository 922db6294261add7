"""Seeds, threads and hypothesis settings for all tests."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import settings

# One thread: results do not depend on the machine, and parallel test processes do not compete for its cores.
torch.set_num_threads(1)

# The values of bfloat16 products are tested on every processor, also where they are slow.
os.environ.setdefault("MANYMAX_ALLOW_SLOW", "1")

# The same examples in every run; no deadline, because a slow machine is no failure.
settings.register_profile("manymax", deadline=None, derandomize=True)
settings.load_profile("manymax")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seed",
        type=int,
        default=int(os.environ.get("MANYMAX_SEED", "0")),
        help="seed of the tests that use the fixture `seed` (default: $MANYMAX_SEED or 0)",
    )


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of this run, with which torch's global generator is seeded. Tests must pass for any seed."""
    value: int = request.config.getoption("--seed")
    torch.manual_seed(value)
    return value


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print how many cases of other people's tests agreed, were changed before or left out, with the reasons."""
    reports = [report for found in terminalreporter.stats.values() for report in found]
    groups = [
        value
        for report in reports
        if getattr(report, "when", "") == "call"
        for name, value in report.user_properties
        if name == "others"
    ]
    if groups:
        terminalreporter.section("cases of other people's tests")
    for group in groups:
        terminalreporter.line(f"{group['group']}: {group['agreed']} agree")
        for word in ("changed", "left_out"):
            for reason, number in group[word].items():
                terminalreporter.line(f"    {number} {word.replace('_', ' ')}: {reason}")

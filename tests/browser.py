"""Opens a page in Chromium, for tests of pages."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: the page was not opened")


def browse(page: Path, *options: str) -> tuple[str, str]:
    """The page after its scripts have run, and what the browser has logged."""
    assert CHROMIUM is not None
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    flags += [f"--user-data-dir={page.parent / 'browser'}", "--virtual-time-budget=60000", "--enable-logging=stderr"]
    command = [CHROMIUM, *flags, *options, "--dump-dom", page.resolve().as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return result.stdout, "\n".join(line for line in result.stderr.splitlines() if "CONSOLE" in line)

"""The clock of a choice: the time that was spent, over all starts, and what was decided by it.

Both are in a file, so that a choice that was killed goes on with the time that it had left, and does not decide again
what it has decided.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from manymax.study.files import read_json, write_json

PROGRESS = "choose_progress.json"
WRITE_SECONDS = 5.0  # between two writes: what a killed process loses at most


class OutOfTime(Exception):
    """The time is over while runs are under way."""


class Clock:
    """Seconds that were spent on the choice in a folder, and decisions by name.

    Args:
        folder: of the choice.
        budget: seconds in all; infinite where there is no limit.
        started: `now()` when this process began.
        now: a clock in seconds.
    """

    def __init__(
        self, folder: Path, budget: float, started: float, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self.path, self.budget, self.started, self.now = folder / PROGRESS, budget, started, now
        content = read_json(self.path) if self.path.exists() else {}
        self.before = float(content.get("seconds", 0.0))
        self.decisions: dict[str, Any] = content.get("decisions", {})
        self.written = self.now()

    @property
    def spent(self) -> float:
        """Seconds so far, those of earlier processes included."""
        return self.before + self.now() - self.started

    @property
    def left(self) -> float:
        """Seconds until the time is over."""
        return self.budget - self.spent

    def decide(self, name: str, value: Any) -> None:
        """Note a decision, before it has consequences."""
        self.decisions[name] = value
        self.write()

    def tick(self) -> None:
        """Note the time now and then."""
        if self.now() - self.written > WRITE_SECONDS:
            self.write()

    def write(self) -> None:
        """Note the time and the decisions."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, {"seconds": round(self.spent, 1), "decisions": self.decisions})
        self.written = self.now()

"""Exit codes that several commands share; the package's docstring lists all of them."""

from __future__ import annotations

FAILED = 1  # the run diverged, or no run of the study finished
STOPPED = 130  # by Ctrl-C or `kill`, as shells report it: 128 + SIGINT

"""How much memory a process holds, and how much of it training takes."""

from __future__ import annotations

import contextlib
import ctypes
import platform
import re
from pathlib import Path

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")  # of Linux; other systems do not have them

_before_resets = 0.0  # the peak of this process before its mark was last reset, in MB


def peak_memory_mb() -> float | None:
    """The largest amount of memory that this process has held; None where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows does not have this module
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS, KiB elsewhere
    return max(_before_resets, peak / (1 << 20 if platform.system() == "Darwin" else 1 << 10))


class MemoryWatch:
    """Measures by how much the memory of this process grows from now on, at its peak.

    Linux keeps a high-water mark for each process, which can be set back to what is held now. That mark also sees what
    is held for a moment only, such as a block of scores.
    """

    def __init__(self) -> None:
        global _before_resets
        self.held: float | None = None  # in MB, at the beginning; None where the system does not tell
        _before_resets = peak_memory_mb() or 0.0
        with contextlib.suppress(OSError, AttributeError):
            # Give back what was freed: otherwise training would take from there, unseen.
            ctypes.CDLL(None).malloc_trim(0)
        with contextlib.suppress(OSError):
            RESET.write_text("5", encoding="ascii")
            self.held = _status("VmRSS")

    def growth(self) -> float | None:
        """By how many MB more was held at the peak since the beginning; None where the system does not tell."""
        if self.held is None:
            return None
        most = _status("VmHWM")
        return None if most is None else max(0.0, most - self.held)


def _status(name: str) -> float | None:
    """An entry of the status of this process, in MB."""
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB", STATUS.read_text(encoding="ascii"), flags=re.MULTILINE)
    except OSError:
        return None
    return None if found is None else int(found[1]) / (1 << 10)

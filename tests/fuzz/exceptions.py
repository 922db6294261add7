"""Findings that are none, each with its reason."""

from __future__ import annotations

from tests.fuzz.outcome import Finding


def reason_for(found: Finding) -> str | None:
    """Why a finding is none; None if it is one."""
    if found.argument == "device" and found.kind == "unnamed" and "is on meta" in found.detail:
        return "a device may be given to a constructor, and the call after it has its tensors on another"
    return None

"""Findings that are none, each with its reason."""

from __future__ import annotations

from tests.fuzz.outcome import Finding


def reason_for(found: Finding) -> str | None:
    """Why a finding is none; None if it is one."""
    return None

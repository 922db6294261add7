"""Rankmax: everything about this member."""

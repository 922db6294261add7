"""Sparsemax: everything about this member."""

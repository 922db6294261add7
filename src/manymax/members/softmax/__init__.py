"""Softmax: everything about this member."""

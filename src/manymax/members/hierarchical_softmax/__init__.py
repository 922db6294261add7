"""Hierarchical softmax: everything about this member."""

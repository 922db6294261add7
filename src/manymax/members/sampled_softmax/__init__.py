"""Sampled softmax: everything about this member."""

"""Tensor functions without opinions: what the losses are computed with."""

"""Noise contrastive estimation: everything about this member."""

"""Backbones: from users or histories to queries, and the item vectors they are compared with."""

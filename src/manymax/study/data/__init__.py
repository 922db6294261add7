"""Interactions: where they come from, how they are filtered and split, how they become batches."""

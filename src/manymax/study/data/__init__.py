"""Interactions: sources and downloads, filters, the split into three parts, and batches for training."""

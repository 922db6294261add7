"""Heads inside of other people's frameworks: one module per framework, each of which is imported by who uses it."""

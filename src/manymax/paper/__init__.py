"""Everything that speaks of the one paper: its claims, its printed numbers, its findings, the reproduction."""

"""Alternating least squares: the solver of RG for matrix factorisation."""

from manymax.als.factorization import RGFactorization

__all__ = ["RGFactorization"]

"""Backbones: models that turn users or histories into queries and provide item vectors. `BACKBONES` is their table."""

from manymax.study.backbones import lightgcn, mf, sasrec
from manymax.study.backbones.base import Backbone, BackboneEntry, Vectors
from manymax.table import Table

BACKBONES: Table[BackboneEntry] = Table("backbone", mf.ENTRY, sasrec.ENTRY, lightgcn.ENTRY)

__all__ = ["BACKBONES", "Backbone", "BackboneEntry", "Vectors"]

"""Backbones: from users or histories to queries, and the item vectors they are compared with."""

from manymax.study.backbones import lightgcn, mf, sasrec
from manymax.study.backbones.base import Backbone, BackboneEntry, Vectors
from manymax.table import Table

BACKBONES: Table[BackboneEntry] = Table("backbone", mf.ENTRY, sasrec.ENTRY, lightgcn.ENTRY)

__all__ = ["BACKBONES", "Backbone", "BackboneEntry", "Vectors"]

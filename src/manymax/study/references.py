"""The heads of the losses that the family is compared with."""

from manymax.heads.build import head_class
from manymax.members import REFERENCES

HEADS = {name: head_class(member) for name, member in REFERENCES.items()}

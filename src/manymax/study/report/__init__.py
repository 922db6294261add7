"""The report: reads records, never models."""

from manymax.study.report.page import report

__all__ = ["report"]

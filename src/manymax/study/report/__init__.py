"""The report: reads records, never models."""

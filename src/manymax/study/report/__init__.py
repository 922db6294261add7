"""The report of a study: tables, figures and a page, made from the records of runs; models and data are not read."""

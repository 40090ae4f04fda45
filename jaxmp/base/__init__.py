"""Dtypes, number formats, tables, hardware and pytrees: what every other folder reads."""

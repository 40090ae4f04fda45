"""Dtypes, number formats, tables, hardware and pytrees, which every other folder uses."""

"""Dtypes, number formats, tables, hardware and pytrees for all other folders."""

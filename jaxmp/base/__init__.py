"""Dtypes, number formats, tables, hardware and pytrees, which all other folders use."""

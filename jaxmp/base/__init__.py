"""Dtypes, number formats, tables, hardware and pytrees.

Every other folder uses them.
"""

"""Benchmarks, each of which writes a table to a file and prints it.

Each result names its device, versions, date and command.
"""

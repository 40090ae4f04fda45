"""Benchmarks, each of which writes a table to a file and prints it.

A result has the device, versions, date and command.
"""

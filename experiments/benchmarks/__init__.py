"""Benchmarks. Each one prints a table and writes it to a file with the device, versions, date and command."""

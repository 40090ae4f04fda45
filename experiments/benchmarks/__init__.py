"""Benchmarks: each prints a table and writes it with device, versions, date and command."""

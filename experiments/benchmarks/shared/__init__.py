"""Shared by benchmarks: models, code by hand, readers of programs, run folders."""

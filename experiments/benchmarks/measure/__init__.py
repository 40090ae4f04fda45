"""Measure processes, programs and devices, for benchmarks."""

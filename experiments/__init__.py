"""Experiments on real data: one readable script each, and the data, models and benchmarks they share."""

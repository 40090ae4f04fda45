"""Training scripts on real data, with their data, models and benchmarks."""

"""Training scripts on real data, and the data, models and benchmarks that they share."""

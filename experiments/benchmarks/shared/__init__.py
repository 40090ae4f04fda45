"""Code that benchmarks share: flags, records of results, and train steps."""

"""What several benchmarks share: models in their sizes, code by hand, readers of compiled programs, run folders."""

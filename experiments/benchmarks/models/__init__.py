"""Models that only benchmarks use: without jaxmp, in torch, stacked, and in the usual sizes."""

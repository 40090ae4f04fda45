"""Models that only benchmarks use: without jaxmp, in torch, in NNX, and in the usual sizes."""

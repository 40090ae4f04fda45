"""Measure a whole train step in mixed precision on one GPU: jaxmp, JAX by hand, jmp, flax and torch."""

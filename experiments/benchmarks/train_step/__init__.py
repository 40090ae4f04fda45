"""A whole train step in mixed precision: jaxmp, JAX by hand, jmp, flax and torch, on one GPU, in one run."""

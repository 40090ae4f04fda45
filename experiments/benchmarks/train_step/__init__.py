"""Measure a whole train step in mixed precision on one GPU.

The rows are jaxmp, JAX by hand, jmp, flax and torch.
"""

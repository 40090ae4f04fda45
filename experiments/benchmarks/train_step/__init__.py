"""Measure a whole train step in mixed precision on one GPU.

The table compares jaxmp, JAX by hand and torch.compile.
"""

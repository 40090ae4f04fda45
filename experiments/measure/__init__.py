"""Measure a step: time, memory, FLOPs, zero gradients, energy and kernels."""

"""Measure a step: time, memory, FLOPs and zero gradients."""

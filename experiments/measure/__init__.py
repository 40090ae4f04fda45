"""Measure a step: time, memory and zero gradients."""

"""Measure a step: time, memory, operations, vanished gradients, and the machine."""

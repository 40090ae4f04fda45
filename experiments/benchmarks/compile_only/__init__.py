"""Compile train steps for a GPU that is not attached, and report their programs.

The report has the memory, products, kernels and bytes of each program.
"""

"""Memory, products, kernels and bytes of train steps on an absent GPU.

The steps are compiled for a GPU that is not attached.
"""

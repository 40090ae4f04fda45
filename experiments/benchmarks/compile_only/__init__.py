"""Memory, products, kernels and bytes of whole train steps, compiled for a GPU that is not attached."""

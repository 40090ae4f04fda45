"""Memory, products, kernels and bytes of whole train steps on a GPU that is not there."""

"""Programs of JAX libraries under autocast.

They are compared with two simple ways to compute in half precision.
"""

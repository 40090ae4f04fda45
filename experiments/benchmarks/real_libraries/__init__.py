"""Programs of JAX libraries under autocast, compared with two simple ways to compute in half precision."""

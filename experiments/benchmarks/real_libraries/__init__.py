"""Programs of libraries in JAX under autocast, beside two simple ways to compute in half precision."""

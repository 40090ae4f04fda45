"""The only room that touches JAX's internals."""

"""Private names of JAX: read programs, rewrite them, and bind their equations."""

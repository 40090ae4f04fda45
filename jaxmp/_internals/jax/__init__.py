"""Private names of JAX: read programs, write them again, and bind their equations."""

"""The only folder that touches private names of JAX, Flax and Python."""

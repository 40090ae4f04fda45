"""The only folder that touches private names of JAX and Flax."""

"""Private names of JAX under names of ours, and what works around them."""

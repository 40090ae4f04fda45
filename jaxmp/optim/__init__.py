"""Loss scales, the optax transform that applies them, and optimizers without float32 params."""

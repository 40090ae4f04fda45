"""Loss scales, the transform that applies them, and low-precision optimizers."""

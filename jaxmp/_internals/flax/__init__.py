"""Private names of Flax, for Linen modules and for NNX models."""

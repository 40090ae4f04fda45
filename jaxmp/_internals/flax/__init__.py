"""Private names of Flax: the hooks of Linen modules, and the variables and calls of NNX models."""

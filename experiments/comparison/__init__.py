"""Train and time one task under several policies, for `experiments.compare`."""

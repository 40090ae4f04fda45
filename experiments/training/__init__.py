"""Code of all training scripts: flags, loop, run folder and checkpoints."""

"""What all training scripts share: flags, loop, run folder and checkpoints."""

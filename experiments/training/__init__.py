"""Training of a script: flags, loop, run folder and checkpoints."""

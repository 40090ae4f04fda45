"""How a script trains: its flags, its loop, its run folder, its checkpoints."""

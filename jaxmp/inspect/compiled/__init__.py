"""What the tools of inspect read from a compiled program."""

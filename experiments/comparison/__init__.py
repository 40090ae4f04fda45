"""Compare one task under several policies and loss scales."""

"""What a step takes: time, memory, operations, zeros among gradients; and on which machine."""

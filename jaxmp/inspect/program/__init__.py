"""What the tools of inspect share to read a program: its equations, values, sums and products."""

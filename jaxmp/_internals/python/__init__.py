"""Code that uses private names of Python's standard library."""

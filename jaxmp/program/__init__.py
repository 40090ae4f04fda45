"""How programs are read and rebuilt, and one table of JAX's primitives.

README.md lists the files.
"""

"""The engine, which decides the dtype of each operation of a program.

README.md describes the algorithm.
"""

"""The engine: traces a program, decides on its graph, writes it again. README.md has the algorithm."""

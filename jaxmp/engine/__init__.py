"""The engine: trace a program, decide on its graph, emit it again. README.md describes the algorithm."""

"""Reads programs and runs: which precision ran where, what underflows, what broke, and what memory and time it takes.

Nothing else of jaxmp depends on it, and ``import jaxmp`` does not load it: ``import jaxmp.inspect``.
"""

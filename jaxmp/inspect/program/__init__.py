"""Shared code that reads programs, and the findings of an audit."""

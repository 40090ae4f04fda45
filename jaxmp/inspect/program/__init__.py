"""Shared code of the tools of inspect that reads programs, and the findings of an audit."""

"""Shared code of the tools of inspect that reads compiled programs."""

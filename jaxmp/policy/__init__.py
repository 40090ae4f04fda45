"""Policies: the dtypes of params, computation and output."""

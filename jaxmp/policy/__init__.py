"""Policies: the dtypes of the params, the computation and the output of a part of a model."""

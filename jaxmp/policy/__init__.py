"""Policies: which dtype a part of a model stores, computes and returns."""

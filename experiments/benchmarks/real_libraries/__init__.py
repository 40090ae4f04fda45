"""Measure the errors of autocast in programs of JAX libraries.

For comparison, the same programs run by two simple rules for half precision.
"""

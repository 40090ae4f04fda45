"""Predict the time of a call on a GPU: :func:`jaxmp.inspect.roofline`."""

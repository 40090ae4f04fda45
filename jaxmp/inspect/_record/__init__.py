"""Record a training loop in a folder: :func:`jaxmp.inspect.record`."""

"""Code of :func:`jaxmp.inspect.profile`."""

"""Count where values underflow or overflow: :func:`jaxmp.inspect.numerics`."""

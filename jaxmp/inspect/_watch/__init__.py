"""Count the values of every n-th step of a run: :class:`jaxmp.inspect.Watch`."""

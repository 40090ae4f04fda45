"""Read traced programs and calls, for the tools of ``jaxmp.inspect``."""

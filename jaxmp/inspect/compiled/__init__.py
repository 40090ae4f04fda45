"""Code that reads compiled programs, shared by the tools of ``jaxmp.inspect``."""

"""Pictures of the results of :mod:`jaxmp.inspect`.

Each function returns a ``matplotlib.figure.Figure``, which needs no display. ``.savefig(file)`` writes the figure, and
a notebook shows it. The title of the figure states the result. matplotlib is imported when a function is called; if
matplotlib is not installed, the functions raise ModuleNotFoundError.
"""

from jaxmp.inspect.plots.budget import budget
from jaxmp.inspect.plots.errors import errors
from jaxmp.inspect.plots.exponents import exponents
from jaxmp.inspect.plots.memory import memory
from jaxmp.inspect.plots.profile import profile
from jaxmp.inspect.plots.underflow import underflow

__all__ = ["budget", "errors", "exponents", "memory", "profile", "underflow"]

"""Writes the reference of the public names, as HTML, to build/docs."""

from __future__ import annotations

import importlib
import pkgutil
import warnings
from pathlib import Path

import pdoc

import jaxmp

for module in pkgutil.walk_packages(jaxmp.__path__, "jaxmp."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
for kind in tuple.__subclasses__():  # a NamedTuple's own methods are of no module, where pdoc looks for their types
    if kind.__module__.startswith("jaxmp."):
        kind.__new__.__module__ = kind.__module__

# Others stand as they are written: an alias of optax's that contains itself, and fields that come from another file.
warnings.filterwarnings("ignore", r"Error parsing type annotation (?!ForwardRef)")
pdoc.render.configure(docformat="google")
# Of a package with __all__ those names are shown, the modules among them too.
pdoc.pdoc("jaxmp", "jaxmp.inspect.plots", "jaxmp.inspect.program.targets", output_directory=Path("build/docs"))

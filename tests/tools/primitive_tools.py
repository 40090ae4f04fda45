"""Every primitive that the installed JAX has.

``jax.extend.core.primitives`` names about half of what a program can hold, so JAX's modules are imported, all of
them, and asked for their primitives.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
import warnings
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from jax.extend.core import Primitive

ROOMS = ("jax._src", "jax.experimental")
SKIPPED = {
    "jax._src.pallas.mosaic": "inside TPU kernels, which are opaque; `gather`, `scatter` and `swap` mean others there",
    "jax._src.pallas.mosaic_gpu": "inside GPU kernels, which are opaque",
    "jax._src.pallas.triton": "inside Triton kernels, which are opaque",
    "jax._src.pallas.primitives": "inside kernels of any kind",
    "jax._src.internal_test_util": "JAX's tests",
    "jax._src.public_test_util": "JAX's tests",
    "jax._src.test_util": "JAX's tests; importing them adds options to `jax.config`",
    "jax._src.test_warning_util": "JAX's tests",
    "jax._src.test_loader": "JAX's tests",
    "jax.experimental.jax2tf": "imports TensorFlow",
    "jax.experimental.pallas.ops": "ready-made kernels; they import JAX's tests",
    "jax.experimental.sparse.test_util": "JAX's tests",
}


@functools.cache
def installed_primitives() -> Mapping[str, str]:
    """The name of each primitive, with the first module (in alphabetical order) that has it.

    Takes seconds and some hundred modules: for tests and for reports, not for transforms. Left out are the modules of
    ``SKIPPED``, each with its reason there, and those that want what is not installed: no program of this process can
    hold their primitives.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # modules that are on their way out of JAX say so
        names = sorted(name for room in ROOMS for name in _import_below(room))
    found: dict[str, str] = {}
    for name in names:
        for value in vars(sys.modules[name]).values():
            if isinstance(value, Primitive):
                found.setdefault(value.name, name)
    return MappingProxyType(dict(sorted(found.items())))


def _import_below(name: str) -> Iterator[str]:
    if any(name == skipped or name.startswith(f"{skipped}.") for skipped in SKIPPED):
        return
    try:
        module = importlib.import_module(name)
    except ImportError:
        return
    yield name
    for child in pkgutil.iter_modules(getattr(module, "__path__", ()), f"{name}."):
        yield from _import_below(child.name)
